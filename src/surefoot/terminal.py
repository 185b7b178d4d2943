"""Text of others on a terminal: whatever would move a cursor or change a colour is shown as what it is."""

import json
import unicodedata
from typing import Any

MARKS = {"\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    """The same text in one line, in which what is not printed has a mark or a number: ``⏎``, ``\\x1b``, ``\\u202e``."""
    return "".join(c if c.isprintable() else _mark(c) for c in text)


def visible_lines(text: str) -> str:
    """The same with its line breaks and tabs as they are: what may go to a terminal in more than one line."""
    return "".join(c if c.isprintable() or c in "\n\t" else _mark(c) for c in text)


def shown_on(stream: Any, text: str) -> str:
    """The same for a stream, which may have no letter for all that a model or a name holds."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return visible_lines(text).encode(encoding, "backslashreplace").decode(encoding)


def visible_json(value: Any) -> str:
    """JSON of one line that says the same and can be printed: what is not printed in it is escaped."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in json.dumps(value, ensure_ascii=False))


def _mark(c: str) -> str:
    if unicodedata.category(c) == "Zs":
        return " "
    return MARKS.get(c) or c.encode("unicode_escape").decode()
