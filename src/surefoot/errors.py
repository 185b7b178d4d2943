"""The errors that users see, and lines about work that takes long.

The message of an error is one line: what is wrong, why, and the remedy.
"""

import difflib
import errno
import importlib.util
import re
import shlex
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

Call = TypeVar("Call", bound=Callable[..., Any])
LONGEST_CAUSE = 500
"""longest text of another library's exception, in characters"""
_announce: ContextVar[Callable[[str], None]] = ContextVar("announce", default=lambda line: None)
_check: ContextVar[Callable[[], None]] = ContextVar("check", default=lambda: None)
_in_command: ContextVar[bool] = ContextVar("in_command", default=False)
IN_PYTHON = (
    (r"surefoot resume ([^;]+?)(?: --ranks \d+)?(?=;|$)", r"surefoot.resume('\1')"),
    (r"surefoot train ([^;]+?) --run-dir ([^;]+?)(?=;|$)", r"surefoot.train('\1', run_dir='\2')"),
    (r" \(--seed of a command\)", ""),
    (r"(?<!\S)\(?--(allow-changes|profile)\b", lambda found: found[0].replace("--", "").replace("-", "_") + "=True"),
    (r"(?<![\w-])--(?:run-dir|name)\b", "run_dir"),
    (r"(?<![\w-])--(steps|seed|task|data|rows|episodes)\b", r"\1"),
)
"""words of the command line, and what they are in Python"""


class SurefootError(ValueError):
    """Something the user can fix. The command line prints its one line and exits with 2."""

    result: Any = None
    """what a run that it ended has trained: the agent or language model so far"""
    on_all_ranks = False
    """whether all of several ranks raise an error at this place, so that they can go on together"""


class NotFiniteError(SurefootError):
    """An observation, reward, loss or gradient is NaN or infinite: its update is skipped."""


class NotCompiledError(SurefootError):
    """A program of the compiled engine can't be made here."""


class LabelsNeededError(SurefootError):
    """People must label pairs first: the work is saved and goes on then. The command line prints the text and exits with 0."""


class RankLostError(SurefootError):
    """Another of several ranks has died or does not answer."""


class Interrupted(BaseException):
    """A signal has stopped the run, which resumes exactly if it has a folder.

    Not an Exception, so that no handler on the way (in an environment, in a callback) catches it.
    """

    result: Any = None
    """what the run has trained: the agent or language model so far"""


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def in_command() -> AbstractContextManager[None]:
    """Errors are read by a user of the command line in this block, elsewhere by one who calls functions."""
    return _set(_in_command, True)


def announced(show: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call ``show`` with each line that is announced in this block."""
    return _set(_announce, show)


def checked(check: Callable[[], None]) -> AbstractContextManager[None]:
    """Call ``check`` at every ``check_stopped`` in this block; it raises Interrupted when a signal has come."""
    return _set(_check, check)


def in_python_words(call: Call) -> Call:
    """The call with errors in Python's words, ``run_dir`` for ``--run-dir``, unless a command makes it; a limit of the machine
    is a SurefootError.
    """

    @wraps(call)
    def calling(*arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        except (RuntimeError, MemoryError, OSError) as error:
            of_gpu = type(error).__name__ == "OutOfMemoryError" or "cuda" in str(error).lower()
            limit = None if of_gpu else limit_reached(error)
            if limit is None:
                raise
            raise SurefootError(limit) from error
        except (SurefootError, Interrupted) as error:
            if not _in_command.get():
                text = str(error)
                for words, python in IN_PYTHON:
                    text = re.sub(words, python, text)
                error.args = (text,)
            raise

    return cast(Call, calling)


def announce(line: str) -> None:
    """Show a line about work that takes long, such as a compilation; outside ``announced`` nothing shows it."""
    _announce.get()(line)


def check_stopped() -> None:
    """Raise Interrupted if a signal has come and this work may end here."""
    _check.get()()


def cause_of(error: BaseException) -> str:
    """An exception of any kind as one line, ``RuntimeError: the wheels came off``; making its text may fail.

    One without a text, such as a bare assert, is named with its place and line if that is in a library: ``place_of`` has
    that of the user's code.
    """
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message can't be shown)"
    if not text and not place_of(error) and (frames := traceback.extract_tb(error.__traceback__)):
        text = f"{'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}, {frames[-1].line}"
    text = text if len(text) <= LONGEST_CAUSE else text[:LONGEST_CAUSE] + " …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def limit_reached(error: BaseException) -> str | None:
    """The line for an error because the machine, or a limit of the process, gives no more of something; else None."""
    text = str(error).lower()
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"too many open files ({cause_of(error)}); raise ulimit -n, then repeat the command, or resume the run"
    if "start new thread" in text or "thread creation failed" in text:
        return (
            f"no more threads or memory for them ({cause_of(error)}); raise ulimit -u and ulimit -v, or the limits of the "
            "container, then repeat the command, or resume the run"
        )
    if isinstance(error, MemoryError) or any(words in text for words in ("allocate memory", "out of memory", "failed to map")):
        return (
            f"out of memory ({cause_of(error)}); raise ulimit -v or train with less, then repeat the command, or resume the run"
        )
    return None


def place_of(error: BaseException) -> str:
    """``robot.py:32``, the line of the user's code that raised an exception; empty if there is none."""
    ours = (str(Path(__file__).parent), *sysconfig.get_paths().values())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*ours, "<"))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def cause_at(error: BaseException) -> str:
    """``cause_of``, with the line of the user's code in parentheses, if there is one."""
    return f"{cause_of(error)} ({place})" if (place := place_of(error)) else cause_of(error)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """A clause such as ``; did you mean 'CartPole-v1'?`` for an unknown word; empty if nothing is similar."""
    lowered = {name.lower(): name for name in words}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    close = close or [name for name in lowered if word and name.startswith(word.lower())][-1:]
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""


def missing_extra(package: str, extra: str, purpose: str) -> SurefootError:
    """The error for an optional package that is not installed."""
    return SurefootError(f"{purpose} needs {package}, which is not installed; run: {to_install(extra)}")


def require_package(package: str, extra: str, purpose: str, module: str = "") -> None:
    """Raise SurefootError, naming the extra, unless an optional package is installed.

    module   its name in Python, if that is another
    """
    if importlib.util.find_spec(module or package.replace("-", "_")) is None:
        raise missing_extra(package, extra, purpose)


def to_install(extras: str, code: Path = Path(__file__), here: Path | None = None) -> str:
    """The command that installs extras: from the package index, or from the checkout that is running.

    extras  such as ``"mujoco"`` or ``"mujoco,plots"``
    code    a file of Surefoot; in ``src/surefoot`` if this is a checkout
    here    the folder to type the command in; default: the working folder
    """
    root = code.resolve().parents[2]
    if not ((root / "pyproject.toml").is_file() and (root / "src" / "surefoot").is_dir()):
        return f"pip install {shlex.quote(f'surefoot[{extras}]')}"
    there = Path() if root == (here or Path.cwd()).resolve() else root
    return f"pip install -e {shlex.quote(f'{there}[{extras}]')}"
