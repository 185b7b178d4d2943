"""Tuned presets, one TOML file each, and how a name, a file or an environment id becomes a recipe.

A preset may say ``tuned_for = [ids]``: the tasks that it serves, also as patterns such as ``"ALE/*-v5"``. Everything else in
it is a field of the recipe.
"""

import contextlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib import resources
from importlib.metadata import entry_points, packages_distributions, requires
from pathlib import Path
from typing import Any

from surefoot.core.algorithms import (
    ALGORITHMS,
    PPO_CLIP,
    TRUST_REGIONS,
    Objective,
    algorithm_name,
    switches_between,
    switches_that_are_on,
)
from surefoot.errors import SurefootError, did_you_mean, missing_extra
from surefoot.recipes.kinds import Recipe
from surefoot.recipes.reading import make_recipe, merged, none_from_text, regions_meant
from surefoot.recipes.toml import read_toml


def presets() -> dict[str, dict[str, Any]]:
    """Every shipped preset: name -> its tables."""
    folder = resources.files(__package__)
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {f.name.removesuffix(".toml"): read_toml(Path(str(f))) for f in files}


@dataclass(frozen=True)
class Origin:
    """What a recipe has from a preset."""

    name: str
    fields: tuple[str, ...]
    """its settings that nothing else has decided; a table's name stands for all that the preset sets in it"""

    @property
    def line(self) -> str:
        """For people: ``preset cartpole: steps, objective.gamma, …``."""
        return f"preset {self.name}: {', '.join(self.fields)}"


@dataclass(frozen=True)
class Found:
    """A recipe and what it has from a preset; None where it has nothing."""

    recipe: Recipe
    origin: Origin | None


def find(
    what: str,
    changes: Mapping[str, Any] | None = None,
    algorithm: Objective | str | None = None,
    preset: str | None = None,
) -> Found:
    """The recipe that a word names: a preset, a ``.toml`` file, an environment id, or ``module:function``.

    changes     are laid over it
    algorithm   a name, as it may be in the changes: that algorithm's own switches are laid over (see ``with_changes``); or a
                value, which is taken as it stands unless it has a name
    preset      the preset that lies below, in place of the one tuned for the task; "none" is the plain defaults

    Raises SurefootError when nothing answers to the name.
    """
    asked: dict[str, Any] = none_from_text(dict(changes or {}))
    name, below, own = _layers(what, preset)
    table: Mapping[str, Any] = without_label(merged(below, own))
    named = algorithm_name(algorithm) if isinstance(algorithm, Objective) else algorithm
    if isinstance(algorithm, Objective) and named is None:
        given = merged({"algorithm": "custom", "objective": asdict(algorithm)}, asked)
        table = merged({**table, "objective": {}}, given)
    else:
        given = asked if named is None else {**asked, "algorithm": named}
        table = with_changes(table, given)
    fields = tuple(_inherited(without_label(below), table, merged(own, _as_tables(given))))
    return Found(make_recipe(table), Origin(name, fields) if name is not None and fields else None)


def find_recipe(what: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe that ``find`` finds."""
    return find(what, changes).recipe


def base_table(what: str) -> dict[str, Any]:
    """The tables that a word names, before any change."""
    _, below, own = _layers(what)
    return merged(below, own)


def _layers(what: str, preset: str | None = None) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """The name and the tables of the preset below, and what the word itself says."""
    tables = presets()
    if what.endswith(".toml"):
        own = read_toml(Path(what))
        if preset is None and "algorithm" in own:  # a resolved recipe names its algorithm; one that doesn't lies over a preset
            return None, {}, own
        kind = own.get("kind", "control")
        usual = _tuned_for(str(own["task"]), tables) if "task" in own else str(kind) if kind in tables else None
    elif what in tables:
        own = {name: value for name, value in tables[what].items() if name in ("kind", "task")}
        if not own:
            raise SurefootError(f"{what!r}: this preset is a starting point for any task; name an environment id instead")
        usual = what
    else:
        if ":" not in what:
            check_id(what, extra=tables)
        own, usual = {"task": what}, _tuned_for(what, tables)
    name = usual if preset is None else _asked_for(preset, own, tables)
    below = {} if name is None else tables[name]
    if "algorithm" in own and own["algorithm"] != below.get("algorithm", own["algorithm"]):
        below = for_algorithm(below, below["algorithm"], own["algorithm"])
    return name, below, own


def _tuned_for(task: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The name of the preset tuned for an environment id, or of the default one."""
    serving = (name for name, t in tables.items() if any(fnmatchcase(task, served) for served in t.get("tuned_for", ())))
    return next(serving, "default")


def _asked_for(preset: str, own: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The preset of a name, or None for "none"; SurefootError for a name that is unknown, or that of another kind of recipe."""
    if preset.lower() == "none":
        return None
    if preset not in tables:
        raise SurefootError(
            f"preset={preset!r}: unknown{did_you_mean(preset, tables)} (known: none, for plain defaults; {', '.join(tables)})"
        )
    theirs, kind = tables[preset].get("kind", "control"), own.get("kind", "control")
    if theirs != kind:
        raise SurefootError(f"preset={preset!r}: is for kind = {theirs!r}, and this is of kind {kind!r}; name one of that kind")
    return preset


WHICH = ("kind", "task", "algorithm")
"""fields that say which recipe it is; every run's title has them"""


def _inherited(below: Mapping[str, Any], table: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of what ``below`` sets, is still in ``table``, and was not given; a table's own where all of it is, in a table."""
    for name, value in below.items():
        here, changed = table.get(name, {}), given.get(name, {})
        if name not in table or (not prefix and name in WHICH):
            continue
        if isinstance(value, Mapping) and isinstance(here, Mapping) and (not prefix or isinstance(changed, Mapping)):
            parts = list(_inherited(value, here, changed if isinstance(changed, Mapping) else {}, f"{prefix}{name}."))
            yield from [f"{prefix}{name}"] if prefix and len(parts) == len(value) else parts
        elif name not in given:
            yield f"{prefix}{name}"


def without_label(table: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's tables without the list of tasks that it serves."""
    return {key: value for key, value in table.items() if key != "tuned_for"}


def with_changes(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's tables with changes laid over, under the name of what comes out.

    Naming an algorithm changes what defines it, and nothing else: see ``for_algorithm``.

    Raises SurefootError for keys of one kind of trust region beside the name of an algorithm with another.
    """
    table, changes = without_label(none_from_text(dict(table))), _as_tables(none_from_text(dict(changes)))
    own = _called(str(table.get("algorithm", "PPO_CLIP")), table)
    wanted = changes.get("algorithm")
    if wanted is not None and wanted != own:
        table = for_algorithm(table, own, wanted)
    if wanted is not None:
        _refuse_another_region(str(wanted), changes)
    together = merged(table, changes)
    if isinstance(together.get("algorithm"), str):
        together["algorithm"] = _called(own if wanted is None else wanted, together)
    return together


def for_algorithm(table: Mapping[str, Any], own: str, wanted: object) -> dict[str, Any]:
    """A recipe's tables, made for the algorithm ``own``, for another.

    The switches in which the two algorithms differ are those of the one that is wanted; all other settings stay, but for those
    of a switch that it has off. "custom" starts from nothing and keeps the discount alone, which belongs to the task.
    """
    tuned = table.get("objective")
    tuned = tuned if isinstance(tuned, Mapping) else {}
    base = ALGORITHMS.get(wanted) if isinstance(wanted, str) else None
    if base is None:
        return {**table, "objective": {name: value for name, value in tuned.items() if name == "gamma"}}
    theirs = {"baseline", "scale_by_group", "ratio", *switches_between(ALGORITHMS.get(own, Objective()), base)}
    theirs |= {name for name, value in tuned.items() if value is None and getattr(base, name, None) is not None}
    kept = {name: value for name, value in switches_that_are_on(base, tuned).items() if name not in theirs}
    stays = {name: value for name, value in table.items() if base.baseline == "critic" or name != "critic"}
    return without_critic(base, {**stays, "objective": kept})


def without_critic(base: Objective, table: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's tables without an optimizer of the critic's own, where there is no critic."""
    optimizer = table.get("optimizer")
    if base.baseline == "critic" or not isinstance(optimizer, Mapping):
        return dict(table)
    return {**table, "optimizer": {key: value for key, value in optimizer.items() if not key.startswith("critic_")}}


def _as_tables(changes: dict[str, Any]) -> dict[str, Any]:
    """Changes from Python may have a trust region as a value: the same as its fields."""
    objective = changes.get("objective")
    region = objective.get("trust_region") if isinstance(objective, Mapping) else None
    if not isinstance(objective, Mapping) or not isinstance(region, TRUST_REGIONS):
        return changes
    return {**changes, "objective": {**objective, "trust_region": asdict(region)}}


def _called(name: str, table: Mapping[str, Any]) -> str:
    """What an algorithm is called once a table's objective is laid over it and changes its kind of trust region: by the name
    of the one that differs in that alone, where there is one.
    """
    base, objective = ALGORITHMS.get(name), table.get("objective")
    if base is None or not isinstance(objective, Mapping) or "trust_region" not in objective:
        return name
    wanted = _kind(merged(asdict(base), {"trust_region": objective["trust_region"]})["trust_region"])
    alike = (other for other, value in ALGORITHMS.items() if set(switches_between(base, value)) <= {"trust_region"})
    fitting = [other for other in (name, *alike) if _kind(asdict(ALGORITHMS[other])["trust_region"]) == wanted]
    return fitting[0] if fitting else name


def _kind(region: Any) -> tuple[list[str], bool]:
    """Of which kind a trust region's table is, and whether its coefficient is adapted."""
    return regions_meant(region), isinstance(region, Mapping) and region.get("target") is not None


def _refuse_another_region(wanted: str, changes: Mapping[str, Any]) -> None:
    """Keys of another kind of trust region than that of the algorithm that is named beside them."""
    objective = changes.get("objective")
    region = objective.get("trust_region") if isinstance(objective, Mapping) else None
    asked, theirs = regions_meant(region), getattr(ALGORITHMS.get(wanted), "trust_region", None)
    if len(asked) == 1 and theirs is not None and asked != [type(theirs).__name__]:
        other = _called(wanted, changes)
        raise SurefootError(
            f"objective.trust_region: has keys of a {asked[0].lower()} ({', '.join(region or ())}), and algorithm={wanted!r} "
            f"has a {type(theirs).__name__.lower()}; " + (f"name {other}" if other != wanted else "give keys of that")
        )


def recipe_for(task: str, algorithm: Objective | str | None, changes: Mapping[str, Any]) -> Recipe:
    """The recipe of a call from Python: a task, an algorithm as a value or a name, and fields to change."""
    return find(task, changes, algorithm).recipe


def check_id(task: str, extra: Mapping[str, Any] | None = None) -> None:
    """Raise SurefootError, with a suggestion, for an id that Gymnasium doesn't know."""
    import gymnasium

    if task.startswith("ALE/"):
        if importlib.util.find_spec("ale_py") is None:
            raise missing_extra("ale-py", "atari", f"task={task!r}")
        gymnasium.register_envs(importlib.import_module("ale_py"))
    if task in gymnasium.registry:
        return
    if task.endswith(".py"):
        raise SurefootError(f"task={task!r}: is a file; name what in it makes the environment, as in '{task}:make'")
    if package := _package_with(task):
        raise SurefootError(f"task={task!r}: is registered when {package} is imported; name it {f'{package}:{task}'!r}")
    known = {*gymnasium.registry, *(extra or ())}
    raise SurefootError(
        f"{task!r}: no recipe, .toml file or environment id of that name{did_you_mean(task, known)} (see: surefoot list)"
    )


def _package_with(task: str) -> str | None:
    """The installed package that registers an id when it is imported, as ``module:id`` has Gymnasium do.

    Looked at are packages that say they have environments, and the one that is called as the id begins, if it needs Gymnasium.
    """
    import gymnasium

    stated = {entry.module.partition(".")[0] for entry in entry_points(group="gymnasium.envs")}
    first = re.split(r"\W", task)[0].lower()
    needing = (name for name in packages_distributions().get(first, ()) for need in requires(name) or () if "gymnasium" in need)
    for package in sorted(stated | ({first} if any(needing) else set())):
        with contextlib.suppress(Exception):  # one that can't be imported registers nothing
            importlib.import_module(package)
        if task in gymnasium.registry:
            return package
    return None


__all__ = ["PPO_CLIP", "Origin", "check_id", "find", "find_recipe", "preset_for", "presets", "recipe_for", "with_changes"]
