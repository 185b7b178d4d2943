"""Rows of data: their columns, messages and weights, checked; hashes of rows."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError, did_you_mean
from surefoot.files import write_text

TOOLS, SETTINGS = "tools", "chat_template_kwargs"
"""columns for the chat template of a row's messages"""
CALLS, WEIGHT = "tool_calls", "weight"
"""keys of a message: tool calls, which may replace its content; and 1 or 0, whether it is trained"""
DEEPEST = 200
"""levels of lists and objects in a column"""
RENDERED = ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "tools", "chat_template_kwargs")
"""columns passed to a chat template"""


@dataclass(frozen=True)
class Row:
    """One row of a file: its columns and its location."""

    columns: dict[str, Any]
    where: str
    """such as ``train.jsonl, line 3``; errors begin with it"""
    file: str


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines atomically."""
    write_text(Path(path), rows_text(rows))


def rows_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as JSON lines."""
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message; of one without text, its calls of tools."""
    return str(message.get("content") or message.get(CALLS) or "")


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the common beginning of two texts or lists."""
    shorter = min(len(first), len(second))
    return bisect_left(range(1, shorter + 1), True, key=lambda n: first[:n] != second[:n])


def json_type(value: Any) -> str:
    """The type of a JSON value, in words."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def fault_in(value: Any) -> str | None:
    """What is wrong with a JSON value, in words: half of a surrogate pair, as text that was cut within one has and no tokenizer
    encodes; or lists nested deeper than Python copies. None if nothing is.
    """
    level = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for part in level:
            if isinstance(part, str):
                try:
                    part.encode()
                except UnicodeEncodeError as error:
                    return f"half of a character ({part[error.start]!r})"
            elif isinstance(part, dict):
                below += chain(part, part.values())
            elif isinstance(part, (list, tuple)):
                below += part
        if not below:
            return None
        level = below
    return f"lists or objects nested more than {DEEPEST} deep"


def check_values(columns: Mapping[str, Any], where: str) -> None:
    """Raise SurefootError for a column with a fault."""
    for name, value in columns.items():
        if fault := fault_in(name) or fault_in(value):
            raise SurefootError(f"{where}: column {name!r} has {fault}; remove it")


def require_columns(row: Row, names: Sequence[str], shape: str, renamed: str = "; data.columns renames them") -> None:
    for name in names:
        if name not in row.columns:
            there = ", ".join(map(repr, row.columns))
            there = f"{there}{renamed}" if there else "none"
            raise SurefootError(f"missing column {name!r}{did_you_mean(name, row.columns)}; {shape}; columns here: {there}")


def text_or_messages(row: Row, name: str) -> str | list[dict[str, Any]]:
    """The text or messages of a column."""
    value = row.columns[name]
    return messages_column(row, name) if isinstance(value, list) else text_column(row, name, "text or a list of messages")


def text_column(row: Row, name: str, wanted: str = "text") -> str:
    value = row.columns[name]
    if not isinstance(value, str):
        raise SurefootError(f"column {name!r} is {json_type(value)}; it must be {wanted}")
    return value


def messages_column(row: Row, name: str) -> list[dict[str, Any]]:
    """The messages of a column: objects with a role, and a content or tool calls; or JSON text of them.

    Null keys, which Parquet adds, are removed. Text parts of a content are joined; arguments of calls that are JSON text become
    objects, as chat templates expect.
    """
    value = row.columns[name]
    value = json_list(value) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise SurefootError(f"column {name!r} is {json_type(value)}; it must be a list of messages")
    if not value:
        raise SurefootError(f"column {name!r} is an empty list; it must have at least one message")
    return [_message(message, f"column {name!r}, message {number}") for number, message in enumerate(value, start=1)]


def _message(message: Any, place: str) -> dict[str, Any]:
    """A message as chat templates expect it. Raises SurefootError for anything else, beginning with ``place``."""
    if not isinstance(message, dict):
        raise SurefootError(f"{place} is {json_type(message)}; a message is an object with a role and a content")
    result = {key: part for key, part in message.items() if part is not None and (key != CALLS or part)}
    calls = result.get(CALLS, [])
    if not isinstance(calls, list):
        raise SurefootError(f"{place}: {CALLS!r} is {json_type(calls)}; it must be a list")
    for key in ("role", "content"):
        if key == "content" and key not in result and calls and result["role"] == "assistant":
            continue
        if key not in message:
            raise SurefootError(f"{place} has no {key!r}; a message is an object with a role and a content")
        part = joined_parts(message[key], place) if key == "content" else message[key]
        if not isinstance(part, str):
            raise SurefootError(f"{place}: {key!r} is {json_type(part)}; it must be text")
        result[key] = part
    weight = result.get(WEIGHT)
    if isinstance(weight, bool) or weight not in (None, 0, 1):
        raise SurefootError(f"{place}: {WEIGHT!r} is {weight!r:.40}; it must be 0 (not trained) or 1")
    if weight and result["role"] != "assistant":
        raise SurefootError(f"{place}: {WEIGHT!r} is 1, but only the assistant's messages are trained; remove it")
    if calls:
        result[CALLS] = [_call(call) for call in calls]
    return result


def json_list(text: str) -> Any:
    """The list of a text that is JSON, as CSV stores messages; any other text unchanged."""
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else text
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list) else text


def joined_parts(content: Any, place: str) -> Any:
    """A list of text parts, ``[{"type": "text", "text": …}]``, as one text; anything else unchanged.

    Raises SurefootError for parts of other types, such as images.
    """
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise SurefootError(f"{place}: a part of the content is of type {kind!r}; only text can be trained, remove it")
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise SurefootError(f"{place}: a part of the content has no text; write {{'type': 'text', 'text': …}}")
    return "".join(part["text"] for part in content)


def _call(call: Any) -> Any:
    """A tool call whose arguments are an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def check_same_kind(parts: Mapping[str, str | list[dict[str, Any]]]) -> None:
    """Raise SurefootError unless all parts are text, or all are messages."""
    if len({isinstance(part, str) for part in parts.values()}) > 1:
        kinds = ", ".join(f"{name!r} is {'text' if isinstance(part, str) else 'messages'}" for name, part in parts.items())
        raise SurefootError(f"columns differ: {kinds}; make all text, or all messages")


def rows_hash(rows: Iterable[object]) -> str:
    """SHA-256 of rows in order, shortened."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row}\n".encode())
    return digest.hexdigest()[:32]


def check_row_count(train: str, before: int, now: int) -> None:
    """Raise SurefootError if the number of rows in ``data.train`` has changed since the checkpoint."""
    if before != now:
        raise SurefootError(
            f"data.train={train!r}: had {before} rows at the checkpoint and has {now} now; restore the old file"
        )


def check_unchanged(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise SurefootError if an input has changed since the checkpoint. Both map field and value to a hash."""
    for name, current in now.items():
        if before.get(name, current) != current:
            raise SurefootError(
                f"{name}: its content has changed since the checkpoint; restore the old one, or start a new run"
            )
