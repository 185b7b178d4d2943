"""Recipes in and out: nested tables and TOML to a recipe and back; unknown keys are refused with a suggestion.

What a recipe holds is in ``kinds``. No torch is imported here, so that ``--help`` is quick.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pydantic
import tomli_w

from surefoot.core.algorithms import ALGORITHMS, TRUST_REGIONS, Objective
from surefoot.errors import SurefootError, did_you_mean
from surefoot.recipes.base import Recipe
from surefoot.recipes.changes import merge_tables, none_to_text, text_to_none, trust_regions_of
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.language import DpoRecipe, LanguageRecipe, RewardRecipe, SftRecipe

KINDS: dict[str, type[Recipe]] = {
    "control": ControlRecipe,
    "sft": SftRecipe,
    "reward": RewardRecipe,
    "dpo": DpoRecipe,
    "language": LanguageRecipe,
}
"""every kind of run, by name"""

MISSING = {
    "task": "task = 'CartPole-v1'",
    "model": "model = 'pocket', or a folder of transformers",
    "data": "data.train = 'rows.jsonl'",
    "data.train": "data.train = 'rows.jsonl'",
}
"""fields without a default, each with an example"""


LONGEST_VALUE = 200
"""characters of a value that an error quotes"""


def make_recipe(table: Mapping[str, Any]) -> Recipe:
    """A recipe from nested tables. ``kind`` says of which kind it is (control, if it says nothing), ``algorithm`` names the
    objective that the ``objective`` table changes.

    Raises SurefootError, one line, for an unknown key, a wrong type or range, or a combination that can't work.
    """
    table = dict(text_to_none(table))
    _refuse_long_numbers(table)
    kind = table.get("kind", "control")
    if not isinstance(kind, str) or kind not in KINDS:
        raise SurefootError(f"kind={kind!r}: unknown{did_you_mean(str(kind), KINDS)} (known: {', '.join(KINDS)})")
    name = table.get("algorithm", KINDS[kind].default_algorithm)
    if not isinstance(name, str) or (name != "custom" and name not in ALGORITHMS):
        raise unknown_algorithm("algorithm", name)
    changes = table.get("objective", {})
    if not isinstance(changes, Mapping):
        raise SurefootError(f"objective={changes!r}: must be a table of switches, such as gae_lambda = 0.95")
    base = Objective() if name == "custom" else ALGORITHMS[name]
    table["algorithm"] = name
    table["objective"] = merge_tables(merge_tables(asdict(base), KINDS[kind].objective_overrides(base)), changes)
    region = _region_meant(table["objective"].get("trust_region"))
    _refuse_truth_for_numbers(table)
    table = KINDS[kind].with_defaults(table)
    try:
        recipe = KINDS[kind].model_validate(table)
    except pydantic.ValidationError as error:
        raise SurefootError(validation_message(error, region, kind)) from None
    recipe.objective.require_complete()
    _refuse_what_toml_cannot_hold(recipe)
    return recipe


def unknown_algorithm(field: str, name: object) -> SurefootError:
    """The one line for an algorithm that there is not. Who says PPO means the one with the clip."""
    meant = did_you_mean("PPO_CLIP" if str(name).upper() == "PPO" else str(name), ALGORITHMS)
    return SurefootError(f"{field}={name!r}: unknown{meant} (known: {', '.join(ALGORITHMS)})")


def control_recipe(table: Mapping[str, Any]) -> ControlRecipe:
    """The recipe of an agent in environments; SurefootError where the table is one of another kind."""
    return as_control(make_recipe(table))


def as_control(recipe: Recipe) -> ControlRecipe:
    """The same recipe; SurefootError unless it trains an agent in environments."""
    if not isinstance(recipe, ControlRecipe):
        raise SurefootError(f"kind={recipe.kind!r}: this is for agents in environments; name a task, such as CartPole-v1")
    return recipe


def _refuse_truth_for_numbers(table: Mapping[str, Any]) -> None:
    """Python takes True for 1; a recipe doesn't."""
    types = {name: described.type for name, described in recipe_fields(table.get("kind", "control"))}
    for name, value in _flat(table):
        if isinstance(value, bool) and "number" in types.get(name, ""):
            raise SurefootError(f"{name}={str(value).lower()}: must be a {types[name]}")


def _refuse_long_numbers(value: Any, name: str = "") -> None:
    """A whole number of TOML has 64 bits, and so have those that tensors hold; Python's may have any number."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            _refuse_long_numbers(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for part in value:
            _refuse_long_numbers(part, name)
    elif isinstance(value, int) and value.bit_length() > 63:
        shown = value if value.bit_length() < 100 else f"{hex(value)[:20]}…"  # of longer ones Python may refuse the digits
        raise SurefootError(f"{name}={shown}: is a number of more than 64 bits; give a smaller one")


def _refuse_what_toml_cannot_hold(recipe: Recipe) -> None:
    """What config.toml could not bring back would make a resumed run another run."""
    for name, value in ((name, getattr(recipe, name)) for name in type(recipe).model_fields):
        if not isinstance(value, Mapping):  # every other field has a type that TOML has, too
            continue
        try:
            kept = text_to_none(tomllib.loads(tomli_w.dumps({"value": none_to_text(value)})))["value"]
        except (TypeError, ValueError):
            kept = None
        if kept != value:
            raise SurefootError(f"{name}={value!r}: only numbers, text, lists and tables can be kept in a recipe")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _region_meant(value: Any) -> str:
    """Which trust region a recipe's value means. Raises SurefootError when it is no table, or the keys of two."""
    if value is None or isinstance(value, TRUST_REGIONS):
        return ""
    field = "objective.trust_region"
    if not isinstance(value, Mapping):
        raise SurefootError(f'{field}={value!r}: must be "none" or a table, such as {{ clip = 0.2 }} or {{ beta = 1.0 }}')
    meant = trust_regions_of(value)
    if len(meant) > 1:
        raise SurefootError(f"{field}: has keys of a {' and a '.join(meant).lower()} ({', '.join(value)}); give those of one")
    return meant[0] if meant else TRUST_REGIONS[0].__name__


WRITTEN = {
    "tuple_type": "a list, in brackets, such as [64, 64]",
    "dict_type": "a table, such as { key = value }",
    "model_type": "a table, such as { key = value }",
}
"""how kinds of values are written that pydantic calls by Python's names"""

OTHER_LIBRARIES = {
    "total_timesteps": ("steps",),
    "max_steps": ("steps",),
    "lr": ("optimizer.learning_rate",),
    "n_steps": ("rollout.steps",),
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
}
"""what other libraries call it (Stable-Baselines3, CleanRL, TRL), and the field here: the first that the kind has"""


def validation_message(error: pydantic.ValidationError, region: str = "", kind: str | None = None) -> str:
    """The first complaint of a validation as one line: field, value, remedy. ``region`` is the trust region that is meant."""
    regions = {kind.__name__ for kind in TRUST_REGIONS}
    complaints = error.errors(include_url=False)  # one for every kind of trust region that a table is not
    first = next((e for e in complaints if not (regions - {region}) & set(e["loc"])), complaints[0])
    place = [str(part) for part in first["loc"] if part not in ("Reuse", *regions)]
    field, given = ".".join(place), _shortened(repr(first["input"]))
    if isinstance(cause := first.get("ctx", {}).get("error"), SurefootError):
        return str(cause)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        paths = [name.split(".") for name, _ in recipe_fields(kind)]
        depth = len(place) - 1
        siblings = {path[depth] for path in paths if len(path) > depth and path[:depth] == place[:-1]}
        within = [".".join(path) for path in paths if path[-1] == place[-1]]  # it may be a field of a table
        if not within:
            known = {".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}
            within = [name for name in OTHER_LIBRARIES.get(place[-1], ()) if name in known][:1]
        hint = f"; did you mean {within[0]!r}?" if len(within) == 1 else did_you_mean(place[-1], siblings)
        listed = f"; known here: {', '.join(sorted(siblings))}" if siblings else ""  # of a list's tables none are listed
        return f"{field}={given}: unknown key{hint or listed}"
    if first["type"] == "missing":
        example = MISSING.get(field)
        return f"{field}: is missing; set it, for example {example}" if example else f"{field}: is missing"
    if field == "device" and first["type"] == "string_pattern_mismatch":
        return f"device={given}: must be cpu, mps, cuda, or one of several such as cuda:1"
    if first["type"] in WRITTEN:
        return f"{field}={given}: must be {WRITTEN[first['type']]}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{field}={given}: {message[:1].lower()}{message[1:]}"


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"


def to_table(recipe: Recipe) -> dict[str, Any]:
    """Plain tables of every field; ``make_recipe`` gives the same recipe back."""
    first = {"kind": recipe.kind, recipe.subject: recipe.trained}
    table: dict[str, Any] = first | none_to_text(recipe.model_dump(mode="json", exclude={"objective"}))
    table["objective"] = none_to_text(asdict(recipe.objective))
    return table


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML."""
    return tomli_w.dumps(to_table(recipe))


@dataclass(frozen=True)
class RecipeField:
    """One leaf of a recipe, for help texts and reference pages."""

    name: str
    type: str
    default: Any
    meaning: str


def recipe_fields(kind: str | None = None) -> Iterator[tuple[str, RecipeField]]:
    """Every leaf of a kind's recipe, or of all kinds', as (dotted name, its description), in order."""
    seen = set()
    for recipe in KINDS.values() if kind is None else [KINDS[kind]]:
        schema = recipe.model_json_schema()
        for name, described in _leaves(schema, schema["$defs"], ""):
            if name not in seen:
                seen.add(name)
                yield name, described


BOOLEAN = "true | false"
"""the type of a field that is one or the other"""


def _leaves(node: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, RecipeField]]:
    for name, described in node["properties"].items():
        dotted = f"{prefix}{name}"
        options = described.get("anyOf", [described])
        below = [o["$ref"].rpartition("/")[2] for o in options if "$ref" in o]
        if not below:
            kinds = [_kind(option) for option in options]
            yield (
                dotted,
                RecipeField(dotted, " | ".join(kinds), described.get("default"), described.get("description", "")),
            )
            continue
        if len(options) > 1:  # a switch that is off by default and is turned on by its own table
            yield dotted, RecipeField(dotted, "table | none", "none", described.get("description", ""))
        for kind in below:
            yield from _leaves(definitions[kind], definitions, f"{dotted}.")


def _kind(option: Mapping[str, Any]) -> str:
    if "enum" in option:
        return " | ".join(str(value) for value in option["enum"])
    if "const" in option:
        return str(option["const"])
    names = {"null": "none", "integer": "whole number", "object": "table", "array": "list", "boolean": BOOLEAN}
    name = names.get(option.get("type", ""), str(option.get("type", "any")))
    least, most = option.get("minimum"), option.get("maximum")
    return f"{name} from {least:,} to {most:,}" if None not in (least, most) else name
