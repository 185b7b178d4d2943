"""Search spaces of ``surefoot tune``: TOML files with a range or a list of choices in place of a recipe's values.

The files here name the presets that they are for in ``presets``. All other keys are fields of the recipe:

    [optimizer]
    learning_rate = { low = 1e-5, high = 1e-2, log = true }

    [objective]
    gamma = [0.98, 0.99, 0.999]
"""

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError, did_you_mean
from surefoot.files import read_toml
from surefoot.recipes.base import Recipe
from surefoot.recipes.fields import recipe_fields
from surefoot.recipes.presets import preset_of
from surefoot.recipes.reading import flatten, make_recipe, merge_tables

EXAMPLE = "a list of choices such as [0.98, 0.99], or a range such as { low = 1e-5, high = 1e-2, log = true }"
RANGE = ("low", "high", "log", "step")
"""keys of a range"""


@dataclass(frozen=True)
class Range:
    """All numbers from ``low`` to ``high``, both included; whole numbers if the field has those."""

    low: float
    high: float
    log: bool = False
    """draw the logarithm uniformly"""
    step: float | None = None
    """only low, low + step, …"""
    whole: bool = False

    def has(self, value: object) -> bool:
        """Whether a value lies in the range; one between two steps does not."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return False
        steps = (value - self.low) / (self.step or 1)
        return self.step is None or math.isclose(steps, round(steps), abs_tol=1e-9)

    @property
    def examples(self) -> Sequence[Any]:
        """Values for which a recipe is checked."""
        return (self.low, self.high)

    def to_json(self) -> Any:
        """The range as a space has it."""
        table: dict[str, Any] = {"low": self.low, "high": self.high, "log": self.log}
        return table if self.step is None else {**table, "step": self.step}


@dataclass(frozen=True)
class Choices:
    """A few values of any type."""

    values: tuple[Any, ...]

    def has(self, value: object) -> bool:
        """Whether a value is one of them."""
        return value in self.values

    @property
    def examples(self) -> Sequence[Any]:
        """Values for which a recipe is checked."""
        return self.values

    def to_json(self) -> Any:
        """The choices as a space has them."""
        return list(self.values)


Space = dict[str, Range | Choices]
"""the values to try of each field, by the dotted name of the field"""


def space_for(what: str, recipe: Recipe, fixed: Mapping[str, str]) -> tuple[str, Space]:
    """The shipped search space for a recipe, and its name. Fields that are off in the recipe are left out; the recipe's own
    values are added to the choices.

    what    the preset, file or id that the recipe was made from
    fixed   fields that can't be searched, with the reason
    """
    preset = preset_of(what, recipe)
    name, table = next((name, table) for name, table in shipped_spaces().items() if preset in table["presets"])
    flat, own = flat_entries(without_presets(table)), dict(flatten(recipe.table))
    space: Space = {}
    for field, entry in flat.items():
        with contextlib.suppress(SurefootError):  # off in this recipe
            part = parsed_space({field: entry}, recipe, fixed, name)[field]
            missing = isinstance(part, Choices) and not part.has(own[field])
            space[field] = Choices((*part.values, own[field])) if isinstance(part, Choices) and missing else part
    return name, space


def shipped_spaces() -> dict[str, dict[str, Any]]:
    """All shipped search spaces: name -> its tables."""
    return {file.stem: read_toml(file) for file in sorted(Path(__file__).parent.glob("*.toml"))}


def without_presets(table: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a shipped space without ``presets``, which is no field of a recipe."""
    return {key: value for key, value in table.items() if key != "presets"}


def parsed_space(table: Mapping[str, Any], recipe: Recipe, fixed: Mapping[str, str], where: str) -> Space:
    """A search space from its tables, or from dotted names.

    Raises SurefootError, one line, for an unknown field, one that is off in the recipe or in ``fixed``, and for values that the
    recipe rejects.
    """
    space: Space = {}
    types = {name: field.type for name, field in recipe_fields(recipe.kind)}
    own = dict(flatten(recipe.table))
    for field, entry in flat_entries(table).items():
        place = f"{where}: {field}"
        _check_field(field, place, types, own, fixed)
        space[field] = _part(entry, place, types.get(field, ""))
        for value in space[field].examples:
            _check_accepted(recipe, field, value, where)
    if not space:
        raise SurefootError(f"{where}: has no field to search; give each {EXAMPLE}")
    return space


def _check_field(field: str, place: str, types: Collection[str], own: Collection[str], fixed: Mapping[str, str]) -> None:
    reason = next((fixed[name] for name in fixed if field == name or field.startswith(f"{name}.")), None)
    if reason is not None:
        raise SurefootError(f"{place}: {reason}; leave it out")
    if field not in types and field not in own:
        raise SurefootError(f"{place}: no field of the recipe{did_you_mean(field, types)}")
    if field not in own:
        raise SurefootError(f"{place}: this field is off in the recipe; turn it on, or leave it out")


def _part(entry: Any, place: str, kind: str) -> Range | Choices:
    """One entry of a space. Raises SurefootError for anything but a list of choices or a range."""
    if isinstance(entry, Mapping) and set(entry) == {"choices"}:
        entry = entry["choices"]
    if isinstance(entry, list):
        if len(entry) < 2 or any(value in entry[:index] for index, value in enumerate(entry)):
            raise SurefootError(f"{place}={entry}: needs at least two choices, and each once")
        return Choices(tuple(entry))
    if not isinstance(entry, Mapping):
        raise SurefootError(f"{place}={entry!r}: fixes the field; set it in the recipe, or give {EXAMPLE}")
    unknown = sorted(set(entry) - set(RANGE))
    if unknown or not {"low", "high"} <= set(entry):
        what = f"unknown key {unknown[0]!r}{did_you_mean(unknown[0], RANGE)}" if unknown else "lacks low or high"
        raise SurefootError(f"{place}: {what}; give {EXAMPLE}")
    numbers = [entry[key] for key in ("low", "high", "step") if key in entry]
    if not isinstance(entry.get("log", False), bool) or not all(map(_is_number, numbers)):
        raise SurefootError(f"{place}={dict(entry)}: low, high and step must be finite numbers, and log true or false")
    part = Range(whole=kind.startswith("whole number"), **entry)
    _check_range(part, place)
    return part


def _check_range(part: Range, place: str) -> None:
    if part.low >= part.high:
        raise SurefootError(f"{place}: low={part.low} must be below high={part.high}; swap them")
    if part.log and part.low <= 0:
        raise SurefootError(f"{place}: low={part.low} has no logarithm; raise it above 0, or leave out log")
    if part.step is not None and (part.log or not 0 < part.step <= part.high - part.low):
        raise SurefootError(f"{place}: step={part.step} must lie between 0 and high - low, without log")
    if part.whole and not all(float(x).is_integer() for x in (part.low, part.high, part.step or 1)):
        raise SurefootError(f"{place}: has whole numbers only; use whole numbers for low, high and step")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_accepted(recipe: Recipe, field: str, value: Any, where: str) -> None:
    """Raise SurefootError if the recipe's type or bounds reject a value.

    Combinations of fields, such as minibatches that don't divide a batch, are rejected trial by trial, because another field of
    the space may change too; an error that begins with this field is about the value.
    """
    try:
        with_values(recipe, {field: value})
    except SurefootError as error:
        if str(error).startswith((f"{field}=", f"{field}.", f"{field}:")) and "does not divide" not in str(error):
            raise SurefootError(f"{where}: {error}") from None


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with new values for some fields, by their dotted names. Raises SurefootError if it rejects them."""
    return make_recipe(merge_tables(recipe.table, nested(values)))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested tables."""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        *path, leaf = name.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[leaf] = value
    return tables


def flat_entries(table: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a space by the dotted names of their fields; a table with a key of a range or ``choices`` is an entry."""
    return dict(flatten(table, is_value=lambda value: bool({*RANGE, "choices"} & set(value))))
