"""Lay changes over the tables of a recipe, and switch its algorithm."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from surefoot.core.algorithms import ALGORITHMS, TRUST_REGIONS, Objective, switches_between, switches_that_are_on
from surefoot.errors import SurefootError


def text_to_none(value: Any) -> Any:
    """The same tables with None for the word "none", because TOML has no null."""
    if isinstance(value, Mapping):
        return {key: text_to_none(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [text_to_none(inner) if isinstance(inner, Mapping) else inner for inner in value]
    return None if isinstance(value, str) and value.lower() == "none" else value


def none_to_text(value: Any) -> Any:
    """The reverse of ``text_to_none``."""
    if isinstance(value, Mapping):
        return {key: none_to_text(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [none_to_text(inner) if isinstance(inner, Mapping) else inner for inner in value]
    return "none" if value is None else value


def merge_tables(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, table by table. A trust region of another kind replaces the whole table."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        if both and key == "trust_region" and trust_regions_of(value):
            both = trust_regions_of(value) == trust_regions_of(below)
        result[key] = merge_tables(dict(below or {}), value) if both else value
    return result


def with_changes(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's tables with changes laid over them; ``algorithm`` becomes the name that fits the result.

    If the changes name an algorithm, the settings that define it change, and nothing else: see ``for_algorithm``.

    Raises SurefootError if the changes name an algorithm and set another kind of trust region than it has.
    """
    table, changes = without_tuned_for(text_to_none(dict(table))), as_tables(text_to_none(dict(changes)))
    current = _fitting_name(str(table.get("algorithm", "PPO_CLIP")), table)
    wanted = changes.get("algorithm")
    if wanted is not None and wanted != current:
        table = for_algorithm(table, current, wanted)
    if wanted is not None:
        _check_trust_region(str(wanted), changes)
    result = merge_tables(table, changes)
    if isinstance(result.get("algorithm"), str):
        result["algorithm"] = _fitting_name(current if wanted is None else wanted, result)
    return result


def for_algorithm(table: Mapping[str, Any], current: str, wanted: object) -> dict[str, Any]:
    """The tables of a recipe for algorithm ``current``, changed to algorithm ``wanted``.

    The switches that differ between the two algorithms take the values of ``wanted``. All other settings stay, except those
    that belong to a switch that ``wanted`` has off. "custom" keeps only the discount, which belongs to the task.
    """
    tuned = table.get("objective")
    tuned = tuned if isinstance(tuned, Mapping) else {}
    base = ALGORITHMS.get(wanted) if isinstance(wanted, str) else None
    if base is None:
        return {**table, "objective": {name: value for name, value in tuned.items() if name == "gamma"}}
    defining = {"baseline", "scale_by_group", "ratio", *switches_between(ALGORITHMS.get(current, Objective()), base)}
    defining |= {name for name, value in tuned.items() if value is None and getattr(base, name, None) is not None}
    kept = {name: value for name, value in switches_that_are_on(base, tuned).items() if name not in defining}
    sections = {name: value for name, value in table.items() if base.baseline == "critic" or name != "critic"}
    return without_critic(base, {**sections, "objective": kept})


def without_critic(base: Objective, table: Mapping[str, Any]) -> dict[str, Any]:
    """The tables without ``optimizer.critic_*`` if the algorithm has no critic."""
    optimizer = table.get("optimizer")
    if base.baseline == "critic" or not isinstance(optimizer, Mapping):
        return dict(table)
    return {**table, "optimizer": {key: value for key, value in optimizer.items() if not key.startswith("critic_")}}


def without_tuned_for(table: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's tables without ``tuned_for``, which is no field of a recipe."""
    return {key: value for key, value in table.items() if key != "tuned_for"}


def as_tables(changes: dict[str, Any]) -> dict[str, Any]:
    """Changes from Python, with the fields of a trust region that is given as a value."""
    objective = changes.get("objective")
    region = objective.get("trust_region") if isinstance(objective, Mapping) else None
    if not isinstance(objective, Mapping) or not isinstance(region, TRUST_REGIONS):
        return changes
    return {**changes, "objective": {**objective, "trust_region": asdict(region)}}


def trust_regions_of(table: Any) -> list[str]:
    """The class names of the trust regions that the keys of a table belong to; empty for anything but a table."""
    table = table if isinstance(table, Mapping) else {}
    return [kind.__name__ for kind in TRUST_REGIONS if {f.name for f in fields(kind)} & set(table)]


def _fitting_name(name: str, table: Mapping[str, Any]) -> str:
    """The name of an algorithm after a table has changed its kind of trust region.

    That is the algorithm that differs from ``name`` only in its trust region and has the table's kind; else ``name``.
    """
    base, objective = ALGORITHMS.get(name), table.get("objective")
    if base is None or not isinstance(objective, Mapping) or "trust_region" not in objective:
        return name
    wanted = _kind(merge_tables(asdict(base), {"trust_region": objective["trust_region"]})["trust_region"])
    alike = (other for other, value in ALGORITHMS.items() if set(switches_between(base, value)) <= {"trust_region"})
    fitting = [other for other in (name, *alike) if _kind(asdict(ALGORITHMS[other])["trust_region"]) == wanted]
    return fitting[0] if fitting else name


def _kind(region: Any) -> tuple[list[str], bool]:
    """The kind of a trust region's table, and whether its coefficient adapts."""
    return trust_regions_of(region), isinstance(region, Mapping) and region.get("target") is not None


def _check_trust_region(wanted: str, changes: Mapping[str, Any]) -> None:
    """Raise SurefootError if changes that name an algorithm have keys of another kind of trust region."""
    objective = changes.get("objective")
    region = objective.get("trust_region") if isinstance(objective, Mapping) else None
    kinds, expected = trust_regions_of(region), getattr(ALGORITHMS.get(wanted), "trust_region", None)
    if len(kinds) == 1 and expected is not None and kinds != [type(expected).__name__]:
        other = _fitting_name(wanted, changes)
        raise SurefootError(
            f"objective.trust_region: has keys of a {kinds[0].lower()} ({', '.join(region or ())}), and algorithm={wanted!r} "
            f"has a {type(expected).__name__.lower()}; "
            + (f"name {other}" if other != wanted else f"use keys of a {type(expected).__name__.lower()}")
        )
