"""Tuned presets, one TOML file each, and how a name, a file or an environment id becomes a recipe.

A preset may say ``tuned_for = [ids]``: the tasks that it serves, also as patterns such as ``"ALE/*-v5"``. Everything else in
it is a field of the recipe.
"""

import contextlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib import resources
from importlib.metadata import entry_points, packages_distributions, requires
from pathlib import Path
from typing import Any

from surefoot.algorithms import ALGORITHMS, PPO_CLIP, TRUST_REGIONS, Objective, algorithm_name, switches_between
from surefoot.config import make_recipe, merged, none_from_text, regions_meant
from surefoot.errors import SurefootError, did_you_mean, missing_extra
from surefoot.kinds import Recipe
from surefoot.toml import read_toml


def presets() -> dict[str, dict[str, Any]]:
    """Every shipped preset: name -> its tables."""
    folder = resources.files(__package__)
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {f.name.removesuffix(".toml"): read_toml(Path(str(f))) for f in files}


def preset_for(task: str) -> dict[str, Any]:
    """The preset tuned for an environment id, or the default one, with the task filled in."""
    tables = presets()
    serving = (t for t in tables.values() if any(fnmatchcase(task, served) for served in t.get("tuned_for", ())))
    found = next(serving, tables["default"])
    return {**without_label(found), "task": task}


def find_recipe(what: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe that a word names: a preset, a ``.toml`` file, an environment id, or ``module:function``.

    ``changes`` are laid over it; one of another algorithm takes that algorithm's own switches (see ``with_changes``).
    Raises SurefootError when nothing answers to the name.
    """
    return make_recipe(with_changes(base_table(what), changes or {}))


def base_table(what: str) -> dict[str, Any]:
    """The tables that a word names, before any change."""
    tables = presets()
    if what.endswith(".toml"):
        table = read_toml(Path(what))
        if "algorithm" in table:  # a resolved recipe always names its algorithm; one that doesn't is laid over a preset
            return table
        kind = table.get("kind", "control")
        below = preset_for(str(table["task"])) if "task" in table else tables.get(str(kind), {})
        return merged(below, table)
    if what in tables:
        if "task" not in tables[what] and "kind" not in tables[what]:
            raise SurefootError(f"{what!r}: this preset is a starting point for any task; name an environment id instead")
        return tables[what]
    if ":" not in what:
        check_id(what, extra=tables)
    return preset_for(what)


def without_label(table: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's tables without the list of tasks that it serves."""
    return {key: value for key, value in table.items() if key != "tuned_for"}


def with_changes(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's tables with changes laid over, under the name of what comes out.

    What a preset sets under ``objective`` was tuned for its own algorithm. Asked for one that differs in nothing but the kind
    of its trust region, all but that table stays; asked for any other, only the discount.

    Raises SurefootError for keys of one kind of trust region beside the name of an algorithm with another.
    """
    table, changes = without_label(none_from_text(dict(table))), _as_tables(none_from_text(dict(changes)))
    own = _called(str(table.get("algorithm", "PPO_CLIP")), table)
    wanted = changes.get("algorithm")
    if wanted is not None and wanted != own:
        tuned = table.get("objective")
        tuned = tuned if isinstance(tuned, Mapping) else {}
        staying = set(tuned) - {"trust_region"} if _another_trust_region(own, wanted) else {"gamma"}
        table["objective"] = {name: value for name, value in tuned.items() if name in staying}
    if wanted is not None:
        _refuse_another_region(str(wanted), changes)
    together = merged(table, changes)
    if isinstance(together.get("algorithm"), str):
        together["algorithm"] = _called(own if wanted is None else wanted, together)
    return together


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


def _another_trust_region(own: Any, wanted: Any) -> bool:
    """Whether two names are those of algorithms that both have a trust region and differ in nothing else."""
    one, other = ALGORITHMS.get(str(own)), ALGORITHMS.get(str(wanted))
    if one is None or other is None or one.trust_region is None or other.trust_region is None:
        return False
    return set(switches_between(one, other)) == {"trust_region"}


def recipe_for(task: str, algorithm: Objective | str | None, changes: Mapping[str, Any]) -> Recipe:
    """The recipe of a call from Python: a task, an algorithm as a value or a name, and fields to change.

    A named algorithm brings the settings tuned for the task with it; a value of the user's own is taken as it stands.
    """
    changes = dict(changes)
    if isinstance(algorithm, Objective):
        name = algorithm_name(algorithm)
        if name is None:
            table = {**base_table(task), "algorithm": "custom", "objective": asdict(algorithm)}
            return make_recipe(merged(without_label(table), none_from_text(changes)))
        algorithm = name
    if algorithm is not None:
        changes["algorithm"] = algorithm
    return find_recipe(task, changes)


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


__all__ = ["PPO_CLIP", "check_id", "find_recipe", "preset_for", "presets", "recipe_for", "with_changes"]
