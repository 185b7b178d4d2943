"""Verifiers: reward functions for answers that can be checked, as recipes name them (``surefoot.verifiers:exact``).

    exact     text, the same up to white space, and letter case where asked
    numeric   the last number of a response
    math      a formula or number, equal as mathematics           extra ``verifiers``
    json      JSON that fits a schema                             extra ``verifiers``
    code      Python that passes tests, in a sandbox              Linux, the system's package bubblewrap

Each takes ``responses`` and the column with what is right, and gives 1.0 or 0.0 for every response. A recipe sets the rest by
a term's ``arguments``. A wrong row is SurefootError, for that is the data's fault; a wrong response, however wrong, is 0.
"""

from surefoot.verifiers.answers import exact, numeric
from surefoot.verifiers.packages import json, math
from surefoot.verifiers.programs import code

__all__ = ["code", "exact", "json", "math", "numeric"]
