"""The errors a user can cause, or be told of. Each message is one line: what is wrong, why, and the remedy."""

import difflib
import shlex
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

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


def place_of(error: BaseException) -> str:
    """``robot.py:32``, the line of the user's own code that an exception comes from; empty where none is known."""
    ours = (str(Path(__file__).parent), *sysconfig.get_paths().values())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*ours, "<"))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause such as ``; did you mean 'CartPole-v1'?`` for a word that is not among the known ones, or nothing."""
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    close = close or [name for name in lowered if word and name.startswith(word.lower())][-1:]
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""


def missing_extra(package: str, extra: str, purpose: str) -> SurefootError:
    """The one line for an optional package that is not installed."""
    return SurefootError(f"{purpose} needs {package}, which is not installed; run: {to_install(extra)}")


def to_install(extras: str, code: Path = Path(__file__), here: Path | None = None) -> str:
    """The command that adds extras to Surefoot as it is installed: by its name, or from the checkout that it runs from.

    extras  such as ``"mujoco"`` or ``"mujoco,plots"``
    code    of Surefoot: a file of ``src/surefoot``, if it is a checkout's
    here    where the command is to be typed; none: the working folder
    """
    root = code.resolve().parents[2]
    if not ((root / "pyproject.toml").is_file() and (root / "src" / "surefoot").is_dir()):
        return f"pip install {shlex.quote(f'surefoot[{extras}]')}"
    there = Path() if root == (here or Path.cwd()).resolve() else root
    pinned = there / "constraints.txt"
    bounds = f"-c {shlex.quote(str(pinned))} " if (root / "constraints.txt").is_file() else ""
    return f"pip install {bounds}-e {shlex.quote(f'{there}[{extras}]')}"
