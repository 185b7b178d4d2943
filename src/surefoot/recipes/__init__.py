"""Tuned presets, one TOML file each, and how a name, a file or an environment id becomes a recipe.

A preset may say ``tuned_for = [ids]``: the tasks that it serves, also as patterns such as ``"ALE/*-v5"``. Everything else in
it is a field of the recipe.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from surefoot.algorithms import ALGORITHMS, PPO_CLIP, Objective, algorithm_name, switches_between
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
    """A preset's tables with changes laid over.

    What a preset sets under ``objective`` was tuned for its own algorithm. Asked for one that differs in nothing but the kind
    of its trust region, all but that table stays; asked for any other, only the discount. Keys of another kind of trust region
    ask for the algorithm that has it.

    Raises SurefootError for keys of one kind beside the name of an algorithm with another.
    """
    table = without_label(table)
    own = table.get("algorithm", "PPO_CLIP")
    wanted = changes.get("algorithm") or _with_region_of(own, changes)
    if wanted is not None:
        changes = {**changes, "algorithm": wanted}
        _refuse_another_region(wanted, changes)
    if wanted is not None and wanted != own:
        tuned = table.get("objective")
        tuned = tuned if isinstance(tuned, Mapping) else {}
        staying = set(tuned) - {"trust_region"} if _another_trust_region(own, wanted) else {"gamma"}
        table["objective"] = {name: value for name, value in tuned.items() if name in staying}
    return merged(table, none_from_text(dict(changes)))


def _region_asked_for(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table of a trust region among the changes, where its keys are those of one kind."""
    objective = changes.get("objective")
    region = objective.get("trust_region") if isinstance(objective, Mapping) else None
    return region if isinstance(region, Mapping) and len(regions_meant(region)) == 1 else {}


def _with_region_of(own: Any, changes: Mapping[str, Any]) -> str | None:
    """The algorithm that differs from ``own`` in its kind of trust region alone and has the kind that is asked for, if any."""
    region = _region_asked_for(changes)
    if not region:
        return None
    adapted = none_from_text(dict(region)).get("target") is not None
    penalty = "PPO_PENALTY_ADAPTIVE" if adapted else "PPO_PENALTY"
    name = {"Clip": "PPO_CLIP", "Penalty": penalty, "Constraint": "TRPO"}[regions_meant(region)[0]]
    same = type(ALGORITHMS[name].trust_region) is type(getattr(ALGORITHMS.get(str(own)), "trust_region", None))
    return name if _another_trust_region(own, name) and not same else None


def _refuse_another_region(wanted: Any, changes: Mapping[str, Any]) -> None:
    asked, algorithm = regions_meant(_region_asked_for(changes)), ALGORITHMS.get(str(wanted))
    if not asked or algorithm is None or algorithm.trust_region is None:
        return
    theirs = type(algorithm.trust_region).__name__
    if asked != [theirs]:
        other = _with_region_of(wanted, changes)
        raise SurefootError(
            f"objective.trust_region: has keys of a {asked[0].lower()} ({', '.join(_region_asked_for(changes))}), and "
            f"algorithm={wanted!r} has a {theirs.lower()}; " + (f"name {other}" if other else "give keys of that")
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
    known = {*gymnasium.registry, *(extra or ())}
    raise SurefootError(
        f"{task!r}: no recipe, .toml file or environment id of that name{did_you_mean(task, known)} (see: surefoot list)"
    )


__all__ = ["PPO_CLIP", "check_id", "find_recipe", "preset_for", "presets", "recipe_for", "with_changes"]
