"""Text on a terminal and in a log: characters that would move the cursor or change colours become visible codes, and long lines
are broken. A stream may be missing, closed or of another kind, as in a windowed program, a service or a closed terminal.
"""

import contextlib
import json
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from textwrap import wrap
from typing import Any

MARKS = {"\n": "⏎", "\t": "⇥"}
LOG_COLUMNS = 120
"""most columns of a plain line"""


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; False for None, a closed stream, and one that can't say."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return bool(stream.isatty())
    return False


class Output:
    """A stream for text that is shown while work goes on: what it can't write is dropped, so that the work survives."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.encoding = stream, getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write text; its length."""
        with contextlib.suppress(Exception):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if it has a buffer."""
        with contextlib.suppress(Exception):
            self.stream.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return is_terminal(self.stream)


def print_line(text: str) -> None:
    """Print text on stdout while work goes on, with control characters made visible."""
    print(shown_on(sys.stdout, text), file=Output(sys.stdout), flush=True)


def visible(text: str) -> str:
    """The text in one line; unprintable characters become ``⏎``, ``\\x1b``, ``\\u202e``."""
    return "".join(c if c.isprintable() else _mark(c) for c in text)


def visible_lines(text: str) -> str:
    """The text with unprintable characters as visible codes; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else _mark(c) for c in text)


def shown_on(stream: Any, text: str) -> str:
    """``visible_lines`` of a text, with escapes for characters that a stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return visible_lines(text).encode(encoding, "backslashreplace").decode(encoding)


def wrapped(line: str, indent: int = 4) -> str:
    """A line broken at spaces into lines of at most ``LOG_COLUMNS``, except single words; all but the first are indented."""
    if len(line) <= LOG_COLUMNS:
        return line
    return "\n".join(wrap(line, LOG_COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False))


def visible_json(value: Any) -> str:
    """A value as one line of JSON, with unprintable characters escaped."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in json.dumps(value, ensure_ascii=False))


def _mark(c: str) -> str:
    if unicodedata.category(c) == "Zs":
        return " "
    return MARKS.get(c) or c.encode("unicode_escape").decode()


# ---- what a program does while nothing else is shown ----

Show = Callable[[str], AbstractContextManager[object]]
_show: ContextVar[Show] = ContextVar("show", default=lambda text: nullcontext())


def phase(text: str) -> AbstractContextManager[object]:
    """Show ``text`` while a block runs, in the way that ``phases_shown`` has set; without it nothing is shown."""
    return _show.get()(text)


@contextmanager
def phases_shown(show: Show) -> Iterator[None]:
    """Show phases this way in a block."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def on_terminal(text: str) -> AbstractContextManager[object]:
    """A line on stderr with the seconds, which disappears at the end; nothing if stderr is not a terminal."""
    if not is_terminal(sys.stderr):
        return nullcontext()
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    shown.add_task(text)
    return shown
