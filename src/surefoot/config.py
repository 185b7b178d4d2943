"""Recipes: what a run is asked to do. TOML in, resolved TOML out; unknown keys are refused with a suggestion.

A recipe is a frozen value. What follows from its fields (batch size, number of iterations) is a property, never filled in
later. No torch is imported here, so that ``--help`` is quick.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pydantic
import tomli_w
from pydantic import Field

from surefoot.algorithms import ALGORITHMS, TRUST_REGIONS, Objective
from surefoot.errors import SurefootError, did_you_mean
from surefoot.sections import (
    MAX_SEED,
    CheckpointSettings,
    EvaluationSettings,
    Network,
    NormaliseSettings,
    OptimizerSettings,
    RolloutSettings,
    Section,
    Steps,
)


class Recipe(Section):
    """Everything that decides a run of control, the machine aside."""

    kind: Literal["control"] = "control"
    """which world"""
    task: str
    """Gymnasium id, or module:function that makes an environment"""
    environment: dict[str, Any] = Field({})
    """keyword arguments for the environment's maker"""
    algorithm: str = "PPO_CLIP"
    """name of the algorithm that [objective] starts from; \"custom\" starts from nothing"""
    steps: Steps = 100_000
    """environment steps in all"""
    seed: int = Field(1, ge=0, le=MAX_SEED)
    """decides everything random"""
    device: str = Field("cpu", pattern=r"^(cpu|mps|cuda(:\d+)?)$")
    """where the network lives: cpu, cuda, cuda:1 …"""
    threads: int = Field(1, ge=1)
    """torch threads; one is fastest for small networks, and results are exact for a given number"""
    engine: Literal["eager", "compiled"] = "eager"
    """compiled runs each update as one compiled program: many times faster, once a C++ compiler has made it (about 30 s)"""
    objective: Objective
    rollout: RolloutSettings = RolloutSettings()
    network: Network = Network()
    optimizer: OptimizerSettings = OptimizerSettings()
    normalise: NormaliseSettings = NormaliseSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    @property
    def batch_size(self) -> int:
        """Steps per iteration, where they are counted in steps."""
        return self.rollout.environments * self.rollout.steps

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations."""
        return self.evaluation.every or max(1, self.steps // 10)

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints."""
        return self.checkpoint.every or max(1, self.steps // 10)

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "Recipe":
        reuse, objective = self.objective.reuse, self.objective
        if reuse and self.network.lstm and self.rollout.environments % reuse.minibatches:
            raise SurefootError(
                f"objective.reuse.minibatches={reuse.minibatches}: an LSTM learns from whole sequences, one per environment, "
                f"and this does not divide rollout.environments={self.rollout.environments}; choose a divisor, such as "
                f"{_nearest_divisor(self.rollout.environments, reuse.minibatches)}"
            )
        if reuse and not objective.needs_whole_episodes and self.batch_size % reuse.minibatches:
            raise SurefootError(
                f"objective.reuse.minibatches={reuse.minibatches}: does not divide the batch of {self.batch_size} steps "
                f"(rollout.environments={self.rollout.environments} x rollout.steps={self.rollout.steps}); "
                f"choose a divisor, such as {_nearest_divisor(self.batch_size, reuse.minibatches)}"
            )
        rollout = self.rollout
        if rollout.workers is not None and rollout.backend != "workers":
            raise SurefootError(
                f"rollout.workers={rollout.workers}: environments run in backend {rollout.backend!r}; set rollout.backend = "
                "'workers', or unset it"
            )
        if rollout.workers is not None and rollout.workers > rollout.environments:
            raise SurefootError(
                f"rollout.workers={rollout.workers}: more processes than rollout.environments={rollout.environments}; set at "
                "most that many"
            )
        if rollout.backend in ("native", "envpool") and objective.needs_whole_episodes:
            raise SurefootError(
                f"rollout.backend={rollout.backend!r}: can't run whole episodes side by side, and {self.algorithm} needs them; "
                "set 'workers' or 'loop', or use an objective with a critic"
            )
        if objective.aggregation != "token-mean":
            raise SurefootError(
                f"objective.aggregation={objective.aggregation!r}: is for sequences; control learns from single steps, "
                "set token-mean"
            )
        if objective.reference_coefficient:
            raise SurefootError(
                f"objective.reference_coefficient={objective.reference_coefficient}: control has no reference policy; set 0"
            )
        if objective.baseline != "critic" and self.optimizer.critic_learning_rate is not None:
            raise SurefootError(
                f"optimizer.critic_learning_rate={self.optimizer.critic_learning_rate}: {self.algorithm} has no critic; "
                "unset it"
            )
        if self.network.shared_trunk and objective.constraint is not None and objective.baseline == "critic":
            raise SurefootError(
                f"network.shared_trunk=true: under a KL constraint ({self.algorithm}) the critic is fitted apart from the "
                "policy and can't share its trunk; set network.shared_trunk = false"
            )
        if self.engine == "compiled":
            self._can_be_compiled()
        if self.network.shared_trunk and self.optimizer.critic_learning_rate is not None:
            raise SurefootError(
                f"optimizer.critic_learning_rate={self.optimizer.critic_learning_rate}: a critic on a shared trunk cannot "
                "have its own optimizer; unset it, or set network.shared_trunk = false"
            )
        return self

    def _can_be_compiled(self) -> None:
        """Raise SurefootError where an update has no static shape, or is more than one gradient step per minibatch."""
        reasons = {
            f"{self.algorithm} takes natural steps": self.objective.constraint is not None,
            f"{self.algorithm} collects whole episodes, whose lengths differ": self.objective.needs_whole_episodes,
            f"device = {self.device!r} is not the CPU": self.device != "cpu",
            "network.lstm learns from whole sequences": self.network.lstm is not None,
            "optimizer.micro_batch splits the minibatch": self.optimizer.micro_batch is not None,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise SurefootError(f"engine='compiled': {reason}; set engine = 'eager'")


def _nearest_divisor(total: int, wanted: int) -> int:
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - wanted), d))


# ---- from tables to a recipe ------------------------------------------------------------------------------------------


def make_recipe(table: Mapping[str, Any]) -> Recipe:
    """A recipe from nested tables. ``algorithm`` names the objective that the ``objective`` table changes.

    Raises SurefootError, one line, for an unknown key, a wrong type or range, or a combination that can't work.
    """
    table = dict(none_from_text(table))
    name = table.get("algorithm", "PPO_CLIP")
    if not isinstance(name, str) or (name != "custom" and name not in ALGORITHMS):
        known = ", ".join(ALGORITHMS)
        raise SurefootError(f"algorithm={name!r}: unknown{did_you_mean(str(name), ALGORITHMS)} (known: {known})")
    changes = table.get("objective", {})
    if not isinstance(changes, Mapping):
        raise SurefootError(f"objective={changes!r}: must be a table of switches, such as gae_lambda = 0.95")
    base = Objective() if name == "custom" else ALGORITHMS[name]
    table["objective"] = merged(asdict(base), changes)
    region = _region_meant(table["objective"].get("trust_region"))
    _refuse_truth_for_numbers(table)
    try:
        recipe = Recipe.model_validate(table)
    except pydantic.ValidationError as error:
        raise SurefootError(explain(error, region)) from None
    _refuse_what_toml_cannot_hold(recipe)
    return recipe


def _refuse_truth_for_numbers(table: Mapping[str, Any]) -> None:
    """Python takes True for 1; a recipe doesn't."""
    kinds = {name: described.kind for name, described in recipe_fields()}
    for name, value in _flat(table):
        if isinstance(value, bool) and "number" in kinds.get(name, ""):
            raise SurefootError(f"{name}={str(value).lower()}: must be a {kinds[name]}")


def _refuse_what_toml_cannot_hold(recipe: Recipe) -> None:
    """What config.toml could not bring back would make a resumed run another run."""
    try:
        kept = none_from_text(tomllib.loads(tomli_w.dumps({"value": none_to_text(recipe.environment)})))["value"]
    except (TypeError, ValueError):
        kept = None
    if kept != recipe.environment:
        raise SurefootError(f"environment={recipe.environment!r}: only numbers, text, lists and tables can be kept in a recipe")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, table by table. A table of another trust region replaces the one below."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        if both and key == "trust_region" and _regions(value):
            both = _regions(value) == _regions(below)
        result[key] = merged(dict(below or {}), value) if both else value
    return result


def _regions(table: Mapping[str, Any] | None) -> list[str]:
    """The trust regions that a table's keys belong to, by the names of their classes."""
    return [kind.__name__ for kind in TRUST_REGIONS if {f.name for f in fields(kind)} & set(table or ())]


def _region_meant(value: Any) -> str:
    """Which trust region a recipe's value means. Raises SurefootError when it is no table, or the keys of two."""
    if value is None or isinstance(value, TRUST_REGIONS):
        return ""
    field = "objective.trust_region"
    if not isinstance(value, Mapping):
        raise SurefootError(f'{field}={value!r}: must be "none" or a table, such as {{ clip = 0.2 }} or {{ beta = 1.0 }}')
    meant = _regions(value)
    if len(meant) > 1:
        raise SurefootError(f"{field}: has keys of a {' and a '.join(meant).lower()} ({', '.join(value)}); give those of one")
    return meant[0] if meant else TRUST_REGIONS[0].__name__


def explain(error: pydantic.ValidationError, region: str = "") -> str:
    """The first complaint of a validation as one line: field, value, remedy. ``region`` is the trust region that is meant."""
    kinds = {kind.__name__ for kind in TRUST_REGIONS}
    complaints = error.errors(include_url=False)  # one for every kind of trust region that a table is not
    first = next((e for e in complaints if not (kinds - {region}) & set(e["loc"])), complaints[0])
    place = [str(part) for part in first["loc"] if part not in ("Reuse", *kinds)]
    field = ".".join(place)
    if isinstance(cause := first.get("ctx", {}).get("error"), SurefootError):
        return str(cause)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        paths = [name.split(".") for name, _ in recipe_fields()]
        depth = len(place) - 1
        siblings = {path[depth] for path in paths if len(path) > depth and path[:depth] == place[:-1]}
        hint = did_you_mean(place[-1], siblings)
        return f"{field}={first['input']!r}: unknown key{hint or '; known here: ' + ', '.join(sorted(siblings))}"
    if first["type"] == "missing":
        return f"{field}: is missing; set it, for example task = 'CartPole-v1'" if field == "task" else f"{field}: is missing"
    message = first["msg"].removeprefix("Value error, ")
    return f"{field}={first['input']!r}: {message[:1].lower()}{message[1:]}"


def none_from_text(value: Any) -> Any:
    """TOML has no null: the word "none" stands for it, in every table."""
    if isinstance(value, Mapping):
        return {key: none_from_text(inner) for key, inner in value.items()}
    return None if isinstance(value, str) and value.lower() == "none" else value


def none_to_text(value: Any) -> Any:
    """The reverse of ``none_from_text``."""
    if isinstance(value, Mapping):
        return {key: none_to_text(inner) for key, inner in value.items()}
    return "none" if value is None else value


def to_table(recipe: Recipe) -> dict[str, Any]:
    """Plain tables of every field; ``make_recipe`` gives the same recipe back."""
    table: dict[str, Any] = none_to_text(recipe.model_dump(mode="json", exclude={"objective"}))
    table["objective"] = none_to_text(asdict(recipe.objective))
    return table


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML."""
    return tomli_w.dumps(to_table(recipe))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises SurefootError when it is missing, a folder, or not TOML (with the line).
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SurefootError(f"{path}: not TOML ({error})") from None
    except OSError as error:
        raise SurefootError(f"{path}: can't be read ({error.strerror})") from None


def parse_value(text: str) -> Any:
    """A flag's text as TOML would read it (0.9, true, [64, 64]); a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@dataclass(frozen=True)
class RecipeField:
    """One leaf of the recipe, for help texts and reference pages."""

    name: str
    kind: str
    default: Any
    meaning: str


def recipe_fields() -> Iterator[tuple[str, RecipeField]]:
    """Every leaf as (dotted name, its description), in order."""
    schema = Recipe.model_json_schema()
    yield from _leaves(schema, schema["$defs"], "")


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
    names = {"null": "none", "integer": "whole number", "object": "table", "array": "list", "boolean": "true | false"}
    return names.get(option.get("type", ""), str(option.get("type", "any")))
