"""Verifiers: reward functions that check answers, named in recipes as ``surefoot.verifiers:exact``.

    exact     the same text, ignoring white space and optionally letter case
    numeric   the last number of a response, or the one at a marker
    math      a formula or number, equal as mathematics           extra ``verifiers``
    json      JSON that fits a schema                             extra ``verifiers``
    code      Python that passes tests, in a sandbox              Linux, the system's package bubblewrap

Each takes ``responses`` and the column with the correct answers, and returns 1.0 or 0.0 for every response. A recipe sets
further options with a term's ``arguments``. An invalid row of the data raises SurefootError; a wrong response always scores 0.
"""

from surefoot.verifiers.answers import exact, json, math, numeric
from surefoot.verifiers.programs import code

__all__ = ["code", "exact", "json", "math", "numeric"]
