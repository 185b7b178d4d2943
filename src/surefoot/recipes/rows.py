"""The data of a language-model recipe: files or hub names, their columns, and how rows are read."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field

from surefoot.core.algorithms import MAX_LENGTH
from surefoot.recipes.base import Count, Section, Size


class RowSettings(Section):
    """How rows are read."""

    columns: dict[str, str] = Field({})
    """own names of columns in train and held_out, and the names they are read by, such as { question = "prompt" }"""
    control_tokens: Literal["split", "keep", "reject"] = "split"
    """control tokens, such as EOS, in messages of the user, the system and tools. split: encoded as ordinary text; keep: as
    control tokens; reject: the run does not start if a row has one"""

    answers: Literal["template", "row"] = "template"
    """the assistant's messages that are trained. template: as the chat template renders them, which may omit a part, such as
    thoughts; row: as they are written"""


class DataSettings(RowSettings):
    """Training rows: a file, a folder, or a data set on the hub."""

    train: str
    """training rows: a file (.jsonl, .json, .csv, .tsv, .parquet, also .gz and .zst), a folder, or hf://org/name:split"""
    held_out: str | None = None
    """rows for evaluation, never trained on; none: no evaluation"""
    max_length: int = Field(1024, ge=2, le=MAX_LENGTH)
    """longest row in tokens; longer rows are dropped and counted"""
    batch: Count = 64
    """rows per update"""


class PromptSettings(RowSettings):
    """Prompts: a file, a folder, or a data set on the hub. The reward gets the other columns of a row."""

    train: str
    """training prompts: a file (.jsonl, .json, .csv, .tsv, .parquet, also .gz and .zst), a folder, or hf://org/name:split"""
    held_out: str | None = None
    """prompts for evaluation, never trained on; none: no evaluation"""
    max_length: Size = 1024
    """longest prompt in tokens; longer prompts are dropped and counted"""


ROW_FIELDS = (
    "data.train",
    "data.held_out",
    "evaluation.demonstrations",
    "mixing.demonstrations",
    "demonstrations",
    "cloning.data",
)
"""fields that name rows"""


def with_row_fields(table: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The tables of a recipe with ``change(field, value)`` for each value that names rows."""
    result = dict(table)
    for field in ROW_FIELDS:
        section, _, name = field.rpartition(".")
        place = result.get(section) if section else result
        if isinstance(place, Mapping) and name in place:
            changed = {**place, name: change(field, place[name])}
            result = {**result, section: changed} if section else changed
    return result
