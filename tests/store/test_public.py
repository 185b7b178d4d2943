"""What leaves a machine: the fields of recipes that are published, and that every other one is not."""

import inspect
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pydantic
import pytest

from surefoot.recipes.fields import KINDS
from surefoot.store.public import ARGUMENTS, HARMLESS, TEXTS, is_harmless, public_table

PRIVATE = {"server.url", "server.weights", "server.token_from", "reward.terms.token_from", "trackers", "tracking.project"}
PRIVATE |= {"tracking.group", "tracking.name", "tracking.tags", "turns.response_template"}
"""fields with text that is never published"""


def parts(annotation: object) -> Iterator[type]:
    """The tables in a field's type."""
    if inspect.isclass(annotation) and (issubclass(annotation, pydantic.BaseModel) or is_dataclass(annotation)):
        yield annotation
    for inside in typing.get_args(annotation):
        yield from () if isinstance(inside, str) else parts(inside)


def texts(table: type, before: str = "") -> Iterator[str]:
    """The fields of a recipe that may hold text, by their dotted names."""
    if issubclass(table, pydantic.BaseModel):
        types = {name: field.annotation for name, field in table.model_fields.items()}
    else:
        types = {field.name: typing.get_type_hints(table)[field.name] for field in fields(table)}
    for name, annotation in types.items():
        for part in parts(annotation):
            yield from texts(part, f"{before}{name}.")
        if any(word in str(annotation) for word in ("str", "Literal")):
            yield f"{before}{name}"


def test_every_field_with_text_is_published_or_private_and_none_by_accident() -> None:
    known = {name for kind in KINDS.values() for name in texts(kind)}
    assert known - TEXTS - PRIVATE - set(ARGUMENTS) == set(), "decide whether a new field may be published"
    assert set() == TEXTS & PRIVATE


@pytest.mark.parametrize("name", ["jwt", "cookie", "key", "pin", "Authorization", "x-api-key", "dsn", "passphrase", "sid"])
def test_a_name_that_is_not_listed_is_not_published(name: str) -> None:
    table = {"environment": {name: "s3cret", "deep": {name: 1}}, "turns": {"arguments": {"weights": [{name: "s3cret"}]}}}
    assert "s3cret" not in str(public_table(table)[0])
    assert "s3cret" not in str(public_table(table, places=True)[0])


def test_a_harmless_name_is_known_however_it_is_written() -> None:
    assert all(map(is_harmless, ["maxTokens", "max-tokens", "max_tokens", "sortKey"]))
    assert all(name == name.lower() and "-" not in name for name in HARMLESS)


def test_tokens_and_generated_addresses_are_not_published_under_any_name() -> None:
    token, hook = "hf_" + "a" * 30, "https://hooks.example.com/services/T0123456789abcdefghij0"
    table = {"environment": {"mode": token, "assets": hook}, "task": token, "reward": {"terms": [{"url": hook}]}}
    shown = str(public_table(table)[0])
    assert token not in shown
    assert "T0123456789" not in shown
