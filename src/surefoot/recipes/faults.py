"""How errors name fields, and the fields of a recipe that have no effect with the value of another."""

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any

import pydantic

SET = "set"
"""any value but the default"""
Faults = Iterator[tuple[str, str]]
"""fields, each with what is wrong and the remedy"""
FieldsFor = Sequence[tuple[str, str, tuple[Any, ...]]]
"""a field, another, and the values of that one with which the first may differ from its default"""


def value_of(thing: Any, name: str) -> Any:
    """The value of a field by its dotted name; None if there is no such field."""
    for part in name.split("."):
        thing = getattr(thing, part, None)
    return thing


def shown(value: Any) -> str:
    """A value as a recipe has it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else repr(list(value) if isinstance(value, tuple) else value)


def one_of(values: Sequence[Any]) -> str:
    """The values, with "or" before the last."""
    *first, last = map(shown, values)
    return f"{', '.join(first)} or {last}" if first else last


def named_value(thing: Any, name: str) -> str:
    """The start of an error, ``name=value``, without values that are tables or secrets."""
    value = value_of(thing, name)
    table = isinstance(value, pydantic.BaseModel) or is_dataclass(value)
    return name if table or name.endswith("token_from") else f"{name}={shown(value)}"


def misplaced(thing: Any, fields_for: FieldsFor) -> Faults:
    """The fields that have no effect."""
    for field, other, values in fields_for:
        owner = value_of(thing, other.rpartition(".")[0]) or thing
        default, actual = _default_of(thing, field), value_of(thing, other)
        if not hasattr(owner, other.rpartition(".")[2]) or value_of(thing, field) in (default, None):
            continue
        if actual != _default_of(thing, other) if values == (SET,) else actual in values:
            continue
        why = f"is for {other} = {one_of(values)}, and it is {shown(actual)}"
        if values == (SET,):
            why = f"is for {other}, which is not set"
        elif values in ((None,), (False,)):
            why = f"can't be combined with {named_value(thing, other)}"
        yield field, f"{why}; {f'set {shown(default)}' if default or default == 0 else 'unset it'}"


def _default_of(thing: Any, name: str) -> Any:
    """The default of a field by its dotted name; None if there is no such field."""
    table, _, field = name.rpartition(".")
    kind = type(value_of(thing, table) if table else thing)
    known = getattr(kind, "model_fields", {}).get(field)
    return getattr(kind, field, None) if known is None else known.default
