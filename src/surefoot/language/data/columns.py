"""Columns beside the text of a row: those that its messages bring to the chat template, and those that nothing reads."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from surefoot.errors import SurefootError, cause_of
from surefoot.language.data.dialogue import SETTINGS, TOOLS, WEIGHT
from surefoot.language.data.rows import Row, kind_of
from surefoot.language.data.tokens import Tokens


def template_options(row: Row, tokens: Tokens) -> dict[str, Any]:
    """What the messages of a row bring to the chat template: ``tools``, and what ``chat_template_kwargs`` holds.

    Both may be JSON in text, as files with a schema store them. Null and empty ones are as good as none.

    Raises SurefootError where they are something else, or the chat template has no use for them: they would have no effect.
    """
    found = dict(_parsed(row, SETTINGS, dict, "an object"))
    for name in found:
        if name in _taken(tokens):
            raise SurefootError(f"column {SETTINGS!r}: {name!r} is not for a row to set; remove it")
    tools = _parsed(row, TOOLS, list, "a list of objects, each the JSON schema of a function")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise SurefootError(f"column {TOOLS!r}, tool {index + 1} is {kind_of(tool)}; it must be an object")
    if tools:
        found[TOOLS] = tools
    for name in found:
        if not tokens.reads(name, found):
            column = repr(TOOLS) if name == TOOLS else f"{SETTINGS!r}: {name!r}"
            raise SurefootError(
                f"column {column} has no effect, because the chat template does not read it; remove it, or use another model"
            )
    return found


def unused_columns(rows: Iterable[Row], read: Callable[[Row], Sequence[str]], tokens: Tokens) -> tuple[str, ...]:
    """What has a value in some row and no effect: columns other than those that are ``read``, and keys of messages that the
    chat template does not have, as ``messages[].name``.
    """
    found: dict[str, None] = {}
    known: dict[str, bool] = dict.fromkeys(("role", "content", WEIGHT), True)
    for row in rows:
        names = read(row)
        for name, value in row.columns.items():
            if name not in names and value not in (None, [], {}, ""):
                found[name] = None
            elif name in names and name not in (TOOLS, SETTINGS) and isinstance(value, list):
                for key in (key for message in value for key, part in message.items() if part not in (None, [], {}, "")):
                    if key not in known:
                        known[key] = tokens.reads(key, {})
                    if not known[key]:
                        found[f"{name}[].{key}"] = None
    return tuple(found)


def check_weight(message: Mapping[str, Any], place: str) -> None:
    """Raise SurefootError where a message has a weight other than 0 and 1, or one that would train what others wrote."""
    weight = message.get(WEIGHT)
    if weight is None:
        return
    if isinstance(weight, bool) or weight not in (0, 1):
        raise SurefootError(f"{place}: {WEIGHT!r} is {weight!r:.40}; it must be 0 (not trained) or 1")
    if weight and message["role"] != "assistant":
        raise SurefootError(f"{place}: {WEIGHT!r} is 1, but only messages of the assistant are trained; remove it")


def _taken(tokens: Tokens) -> set[str]:
    """Names that mean something else where messages are rendered."""
    return {*inspect.signature(tokens.tokenizer.apply_chat_template).parameters, "messages"} - {"documents"}


def _parsed(row: Row, name: str, wanted: type, words: str) -> Any:
    value = row.columns.get(name)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SurefootError(f"column {name!r} is text that is not JSON ({cause_of(error)}); it must be {words}") from None
    if not value:
        return wanted()
    if not isinstance(value, wanted):
        raise SurefootError(f"column {name!r} is {kind_of(value)}; it must be {words}")
    return value
