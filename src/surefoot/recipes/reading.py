"""Recipes as tables: make one from the other, lay changes over them, switch the algorithm, and suggest fields."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import cache
from typing import Any

import pydantic
import tomli_w

from surefoot.core.algorithms import (
    ALGORITHMS,
    TRUST_REGIONS,
    Objective,
    algorithm_named,
    switches_between,
    switches_that_are_on,
)
from surefoot.errors import SurefootError, did_you_mean
from surefoot.files import parsed
from surefoot.recipes.base import Recipe, none_to_text
from surefoot.recipes.base import to_table as to_table
from surefoot.recipes.callables import GOLD, OBJECTS, term_field, tool_field
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.faults import shown, value_of
from surefoot.recipes.fields import KINDS, recipe_fields
from surefoot.recipes.rules import check_rules

MISSING = {
    "task": "task = 'CartPole-v1'",
    "model": "model = 'pocket', or a folder of transformers",
    "data": "data.train = 'rows.jsonl'",
    "data.train": "data.train = 'rows.jsonl'",
}
"""an example for each field without a default"""

LONGEST_VALUE = 200
"""most characters of a value in an error"""

SYNTAX = {
    "tuple_type": "a list, in brackets, such as [64, 64]",
    "dict_type": "a table, such as { key = value }",
    "model_type": "a table, such as { key = value }",
    "int_parsing": "a whole number, such as 20_000",
    "float_parsing": "a number, such as 3e-4",
}
"""how to write the values that pydantic describes with Python's names"""

OTHER_LIBRARIES = {
    "total_timesteps": ("steps",),
    "max_steps": ("steps",),
    "lr": ("optimizer.learning_rate",),
    "n_steps": ("rollout.steps",),
    "info_keywords": ("rollout.info",),
    "num_steps": ("rollout.steps",),
    "n_envs": ("rollout.environments",),
    "num_envs": ("rollout.environments",),
    "n_epochs": ("objective.reuse.epochs",),
    "update_epochs": ("objective.reuse.epochs",),
    "num_ppo_epochs": ("objective.reuse.epochs",),
    "batch_size": ("data.batch", "objective.reuse.minibatches"),
    "per_device_train_batch_size": ("data.batch", "objective.reuse.minibatches"),
    "ent_coef": ("objective.entropy_coefficient",),
    "vf_coef": ("objective.value_coefficient",),
    "clip_range": ("objective.trust_region.clip",),
    "cliprange": ("objective.trust_region.clip",),
    "normalize_advantage": ("objective.normalise_advantages",),
    "net_arch": ("network.hidden",),
    "policy_kwargs": ("network",),
    "num_generations": ("sampling.samples",),
    "max_completion_length": ("sampling.max_tokens",),
    "max_new_tokens": ("sampling.max_tokens",),
    "reward.model": ("reward.terms",),
    "reward_model": ("reward.terms",),
    "reward_model_path": ("reward.terms",),
    "reward_funcs": ("reward.terms",),
}
"""names in Stable-Baselines3, CleanRL and TRL -> the fields here, of which the first that the kind has is suggested"""


# ---- from tables to a recipe ------------------------------------------------------------------------------------------


def make_recipe(table: Mapping[str, Any]) -> Recipe:
    """A recipe from nested tables.

    ``kind`` is its kind (default: control). ``algorithm`` names the objective that the ``objective`` table changes; without it,
    the kind's default, or the algorithm like it that has the table's kind of trust region.

    Raises SurefootError, one line, for an unknown key, a wrong type or range, or a combination that can't work.
    """
    table = as_tables(table)
    _check_integers(table)
    kind = table.get("kind", "control")
    if not isinstance(kind, str) or kind not in KINDS:
        raise SurefootError(f"kind={kind!r}: unknown{did_you_mean(str(kind), KINDS)} (known: {', '.join(KINDS)})")
    if kind != "control" and "start" in table:
        raise SurefootError(f"start={table['start']!r}: a language model starts from model; set model to that folder or run")
    name = table.get("algorithm", _fitting_name(KINDS[kind].default_algorithm, table))
    name = algorithm_named(name) if isinstance(name, str) else name
    if not isinstance(name, str) or (name != "custom" and name not in ALGORITHMS):
        raise unknown_algorithm("algorithm", name)
    base = Objective() if name == "custom" else ALGORITHMS[name]
    table["algorithm"] = name
    usual = merge_tables(asdict(base), KINDS[kind].objective_overrides(base))
    table["objective"] = merge_tables(usual, table.get("objective", {}))
    region = _trust_region_of(table["objective"].get("trust_region"))
    _check_booleans(table)
    table = KINDS[kind].with_defaults(table)
    try:
        recipe = KINDS[kind].model_validate(table)
    except pydantic.ValidationError as error:
        raise SurefootError(validation_message(error, region, kind)) from None
    recipe.objective.require_complete()
    check_rules(recipe)
    _check_toml_values(recipe)
    return recipe


def unknown_algorithm(field: str, name: object) -> SurefootError:
    """The error for an unknown algorithm."""
    suggestion = did_you_mean(str(name), ALGORITHMS)
    return SurefootError(f"{field}={name!r}: unknown{suggestion} (known: {', '.join(ALGORITHMS)})")


def control_recipe(table: Mapping[str, Any]) -> ControlRecipe:
    """The recipe of an agent in environments; SurefootError if the tables are of another kind."""
    return as_control(make_recipe(table))


def as_control(recipe: Recipe) -> ControlRecipe:
    """The recipe as a ControlRecipe; SurefootError unless it trains an agent in environments."""
    if not isinstance(recipe, ControlRecipe):
        raise SurefootError(f"kind={recipe.kind!r}: this is for agents in environments; name a task, such as CartPole-v1")
    return recipe


def _check_booleans(table: Mapping[str, Any]) -> None:
    """Raise SurefootError for true or false in place of a number, which Python would take for 1 or 0."""
    types = {name: described.type for name, described in recipe_fields(table.get("kind", "control"))}
    for name, value in flatten(table):
        if isinstance(value, bool) and "number" in types.get(name, ""):
            raise SurefootError(f"{name}={str(value).lower()}: must be a {types[name]}")


def _check_integers(value: Any, name: str = "") -> None:
    """Raise SurefootError for a whole number of more than 64 bits, which TOML and tensors can't hold."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            _check_integers(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for part in value:
            _check_integers(part, name)
    elif isinstance(value, int) and value.bit_length() > 63:
        shown = value if value.bit_length() < 100 else f"{hex(value)[:20]}…"  # Python may not print longer ones in decimal
        raise SurefootError(f"{name}={shown}: is a number of more than 64 bits; use a smaller one")


def _check_toml_values(recipe: Recipe) -> None:
    """Raise SurefootError for a value that config.toml can't restore: the resumed run would be another run."""
    for name, value in ((name, getattr(recipe, name)) for name in type(recipe).model_fields):
        if not isinstance(value, Mapping):  # the types of all other fields exist in TOML
            continue
        try:
            restored = text_to_none(tomllib.loads(tomli_w.dumps({"value": none_to_text(value)})))["value"]
        except (TypeError, ValueError):
            restored = None
        if restored != value:
            raise SurefootError(f"{name}={value!r}: a recipe can only store numbers, text, lists and tables; use those")


def _trust_region_of(value: Any) -> str:
    """The class name of a recipe's trust region, "" for none.

    Raises SurefootError if it has keys of two kinds.
    """
    if value is None:
        return ""
    kinds = trust_regions_of(value)
    if len(kinds) > 1:
        what = f"has keys of a {' and a '.join(kinds).lower()} ({', '.join(value)})"
        raise SurefootError(f"objective.trust_region: {what}; use those of one")
    return kinds[0] if kinds else TRUST_REGIONS[0].__name__


def validation_message(error: pydantic.ValidationError, region: str = "", kind: str | None = None) -> str:
    """The first error of a validation as one line: field, value, remedy. ``region`` is the class name of the trust region."""
    regions = {trust_region.__name__ for trust_region in TRUST_REGIONS}
    errors = error.errors(include_url=False)  # with one for every kind of trust region that a table is not
    first = next((e for e in errors if not (regions - {region}) & set(e["loc"])), errors[0])
    path = [part for part in map(str, first["loc"]) if part not in ("Reuse", *regions) and "[" not in part]
    field, value = ".".join(path), _shortened(repr(first["input"]))
    if isinstance(cause := first.get("ctx", {}).get("error"), SurefootError):
        return str(cause)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{field}={value}: unknown key{_key_suggestion(path, kind)}"
    if first["type"] == "missing":
        example = MISSING.get(field)
        return f"{field}: is missing; set it, for example {example}" if example else f"{field}: is missing; set it"
    if field == "device" and first["type"] == "string_pattern_mismatch":
        return f"device={value}: must be cpu, mps, cuda, or one of several such as cuda:1"
    if first["type"] == "tuple_type" and isinstance(text := first["input"], str):
        return f"{field}={value}: must be a list; write [{text if set(text) <= set('0123456789., ') else json.dumps(text)}]"
    if first["type"] in SYNTAX:
        return f"{field}={value}: must be {SYNTAX[first['type']]}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{field}={value}: {message[:1].lower()}{message[1:]}"


def _key_suggestion(path: list[str], kind: str | None) -> str:
    """The end of the error for an unknown key: the field that was probably meant, else the known keys of the table."""
    fields = [name.split(".") for name, _ in recipe_fields(kind)]
    depth = len(path) - 1
    siblings = {field[depth] for field in fields if len(field) > depth and field[:depth] == path[:-1]}
    if any(part.isdigit() for part in path):  # tables in lists have no listed fields, and other tables are not meant
        return ""
    known = OTHER_LIBRARIES.get(".".join(path), OTHER_LIBRARIES.get(path[-1], ()))
    candidates = [".".join(field) for field in fields if field[-1] == path[-1]]  # the same name in another table
    if not candidates or ".".join(path) in OTHER_LIBRARIES:
        names = {".".join(field[:end]) for field in fields for end in range(1, len(field) + 1)}
        candidates = [name for name in known if name in names][:1]
    if len(candidates) == 1:
        return f"; did you mean {candidates[0]!r}?"
    listed = f"; known here: {', '.join(sorted(siblings))}" if siblings else ""
    return did_you_mean(path[-1], siblings) or listed


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"


# ---- from a recipe to tables ------------------------------------------------------------------------------------------


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML."""
    return tomli_w.dumps(recipe.table)


def named_functions(recipe: Recipe) -> dict[str, str | None]:
    """The names of the functions and classes that a recipe may have as objects, by field."""
    terms, tools = value_of(recipe, "reward.terms") or (), value_of(recipe, "turns.tools") or ()
    return {
        **{term_field(place): term.function for place, term in enumerate(terms)},
        **{tool_field(place): path for place, path in enumerate(tools)},
        **{field: value_of(recipe, field) for field in (GOLD, *OBJECTS)},
    }


def parse_flag(text: str) -> Any:
    """The value of a flag, read as TOML (0.9, true, [64, 64]); a bare word is a string."""
    try:
        return parsed(f"value = {text}", tomllib.loads)["value"]
    except ValueError:
        return text


def text_to_none(value: Any) -> Any:
    """Tables with None for the word "none", because TOML has no null."""
    if isinstance(value, Mapping):
        return {key: text_to_none(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [text_to_none(inner) if isinstance(inner, Mapping) else inner for inner in value]
    return None if isinstance(value, str) and value.lower() == "none" else value


def set_fields(value: Any) -> Any:
    """The value of a field for a reader: tables of a list, such as ``reward.terms``, without fields that are None."""
    if not isinstance(value, (list, tuple)):
        return value
    return [{k: v for k, v in each.items() if v is not None} if isinstance(each, Mapping) else each for each in value]


def flatten(
    table: Mapping[str, Any], prefix: str = "", is_value: Callable[[Mapping[str, Any]], bool] = lambda table: not table
) -> Iterator[tuple[str, Any]]:
    """Nested tables as ``a.b.c`` and value. ``is_value`` decides which tables are values; by default only empty ones are."""
    for key, value in table.items():
        if isinstance(value, Mapping) and not is_value(value):
            yield from flatten(value, f"{prefix}{key}.", is_value)
        else:
            yield f"{prefix}{key}", value


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
    table, changes = without_tuned_for(as_tables(table)), as_tables(changes)
    current = _fitting_name(str(table.get("algorithm", "PPO_CLIP")), table)
    if isinstance(changes.get("algorithm"), str):
        changes["algorithm"] = algorithm_named(changes["algorithm"])
    wanted = changes.get("algorithm")
    if wanted is not None and wanted != current:
        table = for_algorithm(table, current, wanted)
    if wanted is not None:
        check_trust_region(str(wanted), changes)
    result = merge_tables(table, changes)
    if isinstance(result.get("algorithm"), str):
        result["algorithm"] = _fitting_name(current if wanted is None else wanted, result)
    return result


def for_algorithm(table: Mapping[str, Any], current: str, wanted: object) -> dict[str, Any]:
    """The tables of a recipe for algorithm ``current``, changed to algorithm ``wanted``.

    The switches that differ between the two algorithms take the values of ``wanted``. All other settings stay, except those
    that belong to a switch that ``wanted`` has off. "custom" keeps only the discount, which belongs to the task.
    """
    tuned = table.get("objective", {})
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
    if base.baseline == "critic" or "optimizer" not in table:
        return dict(table)
    return {**table, "optimizer": {key: value for key, value in table["optimizer"].items() if not key.startswith("critic_")}}


def without_tuned_for(table: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's tables without ``tuned_for``, which is no field of a recipe."""
    return {key: value for key, value in table.items() if key != "tuned_for"}


def as_tables(table: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a recipe or of changes, with None for "none" and the fields of a trust region that is a value.

    Raises SurefootError for anything else in place of a table, so that what reads them need not look.
    """
    tables: dict[str, Any] = text_to_none(dict(table))
    for name in tables.keys() & _sections():
        optional = tables[name] is None and name in ("adapter", "server", "preferences", "cloning")
        if not (isinstance(tables[name], Mapping) or optional):
            raise SurefootError(f"{name}={shown(tables[name])}: must be a table, such as {{ key = value }}")
    region = tables.get("objective", {}).get("trust_region")
    if isinstance(region, TRUST_REGIONS):
        return {**tables, "objective": {**tables["objective"], "trust_region": asdict(region)}}
    if region is not None and not isinstance(region, Mapping):
        raise SurefootError(f'objective.trust_region={region!r}: must be "none" or a table, such as {{ beta = 1.0 }}')
    return tables


@cache
def _sections() -> set[str]:
    """The names of the tables of all kinds."""
    return {name.partition(".")[0] for name, _ in recipe_fields() if "." in name}


def trust_regions_of(table: Any) -> list[str]:
    """The class names of the trust regions that the keys of a table belong to; empty for anything but a table."""
    return [kind.__name__ for kind in TRUST_REGIONS if {f.name for f in fields(kind)} & set(table or ())]


def _fitting_name(name: str, table: Mapping[str, Any]) -> str:
    """The name of an algorithm after a table has changed its kind of trust region.

    That is the algorithm that differs from ``name`` only in its trust region and has the table's kind; else ``name``.
    """
    base, objective = ALGORITHMS.get(name), table.get("objective", {})
    if base is None or "trust_region" not in objective:
        return name
    wanted = _kind(merge_tables(asdict(base), {"trust_region": objective["trust_region"]})["trust_region"])
    alike = (other for other, value in ALGORITHMS.items() if set(switches_between(base, value)) <= {"trust_region"})
    fitting = [other for other in (name, *alike) if _kind(asdict(ALGORITHMS[other])["trust_region"]) == wanted]
    return fitting[0] if fitting else name


def _kind(region: Any) -> tuple[list[str], bool, bool]:
    """The kind of a trust region's table, whether its coefficient adapts, and whether it applies to some samples only."""
    table = region or {}
    return trust_regions_of(region), table.get("target") is not None, table.get("fraction", 1) != 1


def check_trust_region(wanted: str, changes: Mapping[str, Any]) -> None:
    """Raise SurefootError if changes that name an algorithm have keys of another kind of trust region."""
    region = changes.get("objective", {}).get("trust_region")
    kinds, expected = trust_regions_of(region), getattr(ALGORITHMS.get(wanted), "trust_region", None)
    if len(kinds) == 1 and expected is not None and kinds != [type(expected).__name__]:
        other = _fitting_name(wanted, changes)
        raise SurefootError(
            f"objective.trust_region: has keys of a {kinds[0].lower()} ({', '.join(region or ())}), and algorithm={wanted!r} "
            f"has a {type(expected).__name__.lower()}; "
            + (f"name {other}" if other != wanted else f"use keys of a {type(expected).__name__.lower()}")
        )
