"""Tuned presets, one TOML file each, and how a name, a file or an environment id becomes a recipe.

A preset lists the tasks it is tuned for in ``tuned_for = [ids]``; patterns such as ``"ALE/*-v5"`` work too. Its other keys are
fields of the recipe.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from surefoot.core.algorithms import Objective, algorithm_name, algorithm_named
from surefoot.errors import SurefootError, did_you_mean
from surefoot.files import read_toml
from surefoot.recipes.base import Recipe, none_to_text
from surefoot.recipes.control import check_id
from surefoot.recipes.fields import recipe_fields
from surefoot.recipes.reading import (
    as_tables,
    flatten,
    for_algorithm,
    make_recipe,
    merge_tables,
    with_changes,
    without_tuned_for,
)

REQUIRED = (("data", "train"), ("reward", "terms"))
"""tables and fields that recipes need besides their task or model"""
TITLE_FIELDS = ("kind", "task", "algorithm")
"""fields that are in every run's title, so the line about the preset leaves them out"""


def presets() -> dict[str, dict[str, Any]]:
    """All shipped presets: name -> its tables."""
    return deepcopy(_shipped())


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """The presets, read once in a process: each recipe needs them, and reading takes longer than the rest of resolving it."""
    return {file.stem: read_toml(file) for file in sorted(Path(__file__).parent.glob("*.toml"))}


@dataclass(frozen=True)
class Origin:
    """The fields that a recipe takes from a preset."""

    name: str
    fields: tuple[str, ...]
    """settings that nothing else sets; the name of a table stands for everything that the preset sets in it"""

    @property
    def line(self) -> str:
        """The line that is printed: ``preset cartpole: steps, objective.gamma, …``."""
        return f"preset {self.name}: {', '.join(self.fields)}"


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe, and what it takes from a preset; None if it takes nothing."""

    recipe: Recipe
    origin: Origin | None


def resolve_recipe(
    what: str, changes: Mapping[str, Any] | None = None, algorithm: Objective | str | None = None, preset: str | None = None
) -> ResolvedRecipe:
    """The recipe for the name of a preset, a ``.toml`` file, an environment id, or ``module:function``.

    changes     laid over the recipe
    algorithm   a name, as in ``changes["algorithm"]`` (see ``with_changes``); or a value, which is used as it is unless it
                has a name
    preset      the preset to start from, instead of the one tuned for the task; "none" starts from the plain defaults

    Raises SurefootError for an unknown name.
    """
    settings = as_tables(changes or {})
    preset_name, below, own = _layers(what, preset)
    table: Mapping[str, Any] = without_tuned_for(merge_tables(below, own))
    name = algorithm_name(algorithm) if isinstance(algorithm, Objective) else algorithm
    if isinstance(algorithm, Objective) and name is None:
        settings = merge_tables({"algorithm": "custom", "objective": asdict(algorithm)}, settings)
        table = merge_tables({**table, "objective": {}}, settings)
    else:
        settings = settings if name is None else {**settings, "algorithm": name}
        table = with_changes(table, settings)
    inherited = tuple(_inherited(without_tuned_for(below), table, merge_tables(own, settings)))
    origin = Origin(preset_name, inherited) if preset_name is not None and inherited else None
    return ResolvedRecipe(make_recipe(table), origin)


def find_recipe(what: str, changes: Mapping[str, Any] | None = None, algorithm: Objective | str | None = None) -> Recipe:
    """The recipe that ``resolve_recipe`` returns, without its origin."""
    return resolve_recipe(what, changes, algorithm).recipe


def recipe_table(what: str) -> dict[str, Any]:
    """The tables for a name, a file or an id, before any change."""
    _, below, own = _layers(what)
    return merge_tables(below, own)


@dataclass(frozen=True)
class Setting:
    """A field of a resolved recipe, and where its value comes from."""

    name: str
    """with its tables, such as ``objective.gamma``"""
    value: Any
    source: Literal["default", "preset", "recipe"]
    """"recipe": neither the default nor the preset has this value"""
    before: Any
    """the value without the recipe: the preset's, else the default; equal to ``value`` unless ``source`` is "recipe"; None for
    the task, the model and other fields that every recipe sets"""
    default: Any


def settings_of(table: Mapping[str, Any], origin: Mapping[str, Any] | None = None) -> list[Setting]:
    """Every field of the recipe in a run's config.toml, compared with the defaults of its kind and algorithm.

    origin   ``preset`` of the run's environment.json: the name of the preset, and the settings that the run has from it

    Raises SurefootError if the tables are no recipe.
    """
    recipe = make_recipe(table)
    resolved = recipe.table
    own: dict[str, Any] = {"kind": recipe.kind, recipe.subject: recipe.trained, "algorithm": recipe.algorithm}
    for section, name in REQUIRED:
        if name in resolved.get(section, {}):
            own[section] = {name: resolved[section][name]}
    if recipe.engine == recipe.engine_choice()[0]:  # a run records what "auto", the default, stood for
        own["engine"] = recipe.engine
    preset, inherited = (None, ()) if not origin else (origin.get("name"), tuple(origin.get("fields") or ()))
    below = without_tuned_for(presets().get(str(preset), {}))
    first = {"algorithm": type(recipe).default_algorithm}
    defaults = _flat_recipe(own) | first
    first = {"algorithm": below.get("algorithm", first["algorithm"])}
    if first["algorithm"] != recipe.algorithm:
        below = for_algorithm(below, first["algorithm"], recipe.algorithm)
    befores = _flat_recipe(merge_tables(below, own)) | first if below else defaults
    required = {recipe.subject, *(f"{section}.{name}" for section, name in REQUIRED)}
    settings = []
    for field, value in flatten(resolved):
        if field in required:
            settings.append(Setting(field, value, "recipe", None, None))
            continue
        default, before = defaults.get(field), befores.get(field)
        source: Literal["default", "preset", "recipe"] = "recipe"
        if value == before or any(field == name or field.startswith(f"{name}.") for name in inherited):
            source, before = "default" if value == default else "preset", value
        settings.append(Setting(field, value, source, before, default))
    return settings


def _flat_recipe(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the recipe that some tables resolve to; if they can't stand alone, the plain defaults with the tables."""
    try:
        return dict(flatten(make_recipe(table).table))
    except SurefootError:
        plain = {name: none_to_text(field.default) for name, field in recipe_fields(str(table["kind"]))}
        return plain | dict(flatten(none_to_text(table)))


def _layers(what: str, preset: str | None = None) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """The name and tables of the preset to start from, and the tables that ``what`` itself sets."""
    tables = presets()
    default: str | None
    if what.endswith(".toml"):
        own = as_tables(read_toml(Path(what)))
        if preset is None and "algorithm" in own:  # a resolved recipe has its algorithm; without one a file extends a preset
            return None, {}, own
        kind = own.get("kind", "control")
        default = _preset_for(str(own["task"]), tables) if "task" in own else str(kind) if kind in tables else None
    elif what in tables:
        own = {name: value for name, value in tables[what].items() if name in ("kind", "task")}
        if not own:
            raise SurefootError(f"{what!r}: this preset is a starting point for any task; name an environment id instead")
        default = what
    else:
        if ":" not in what and not what.endswith(".py"):
            check_id(what, extra=tables)
        own, default = {"task": what}, _preset_for(what, tables)
    if isinstance(own.get("algorithm"), str):
        own = {**own, "algorithm": algorithm_named(own["algorithm"])}
    name = default if preset is None else _check_preset(preset, own, tables)
    below = {} if name is None else tables[name]
    if "algorithm" in own and own["algorithm"] != below.get("algorithm", own["algorithm"]):
        below = for_algorithm(below, below["algorithm"], own["algorithm"])
    return name, below, own


def preset_of(what: str, recipe: Recipe) -> str:
    """The name of the preset that fits a recipe best: ``what``, the one tuned for its task, or the one of its kind."""
    tables = presets()
    return what if what in tables else _preset_for(recipe.trained, tables) if recipe.kind == "control" else recipe.kind


def _preset_for(task: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The name of the preset tuned for an environment id, or "default"."""
    tuned = (name for name, t in tables.items() if any(fnmatchcase(task, pattern) for pattern in t.get("tuned_for", ())))
    return next(tuned, "default")


def _check_preset(preset: str, own: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The preset's name, or None for "none". Raises SurefootError if it is unknown or of another kind of recipe."""
    if preset.lower() == "none":
        return None
    if preset not in tables:
        raise SurefootError(
            f"preset={preset!r}: unknown{did_you_mean(preset, tables)} (known: none, for plain defaults; {', '.join(tables)})"
        )
    of_preset, kind = tables[preset].get("kind", "control"), own.get("kind", "control")
    if of_preset != kind:
        raise SurefootError(f"preset={preset!r}: is for kind = {of_preset!r}, not {kind!r}; name a preset of that kind")
    return preset


def _inherited(below: Mapping[str, Any], table: Mapping[str, Any], own: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of the settings that come from ``below``: still in ``table`` and not in ``own``.

    A nested table is one name if all its settings come from ``below``.
    """
    for name, value in below.items():
        here, changed = table.get(name, {}), own.get(name, {})
        if name not in table or (not prefix and name in TITLE_FIELDS):
            continue
        if isinstance(value, Mapping) and isinstance(here, Mapping) and (not prefix or isinstance(changed, Mapping)):
            parts = list(_inherited(value, here, changed if isinstance(changed, Mapping) else {}, f"{prefix}{name}."))
            yield from [f"{prefix}{name}"] if prefix and len(parts) == len(value) else parts
        elif name not in own:
            yield f"{prefix}{name}"
