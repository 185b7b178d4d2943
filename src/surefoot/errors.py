"""The errors a user can cause, or be told of. Each message is one line: what is wrong, why, and the remedy."""

import difflib
from collections.abc import Iterable

LONGEST_CAUSE = 500
"""characters of a foreign exception that still make a line"""


class SurefootError(ValueError):
    """Something the user can mend. The command line prints its one line and exits with 2."""


class NotFiniteError(SurefootError):
    """An observation, reward, loss or gradient is NaN or infinite: the update it belongs to is not taken."""


class Interrupted(BaseException):
    """The run was asked to stop and has stopped; it resumes exactly.

    No Exception, so that nothing on the way (an environment, a callback) takes it for an error of its own.
    """


def cause_of(error: BaseException) -> str:
    """An exception of any kind as one line, ``RuntimeError: the wheels came off``; its own text may fail to be made."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message can't be shown)"
    text = text if len(text) <= LONGEST_CAUSE else text[:LONGEST_CAUSE] + " …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause such as ``; did you mean 'CartPole-v1'?`` for a word that is not among the known ones, or nothing."""
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    close = close or [name for name in lowered if word and name.startswith(word.lower())][-1:]
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""


def missing_extra(package: str, extra: str, purpose: str) -> SurefootError:
    """The one line for an optional package that is not installed."""
    return SurefootError(
        f"{purpose} needs {package}, which is not installed; run: pip install 'surefoot[{extra}]', in a checkout: "
        f"pip install -c constraints.txt -e '.[{extra}]'"
    )
