"""The fields that recipes of every kind have, and what follows from them.

A recipe is a frozen value. What follows from its fields, such as the batch size, is a property.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field

from surefoot.core.algorithms import MAX_COUNT, MAX_LENGTH, Objective
from surefoot.core.seeding import MAX_SEED
from surefoot.errors import SurefootError, did_you_mean

# The upper bounds are far beyond any use; they catch typing errors before memory or time runs out.
Steps = Annotated[int, Field(ge=1, le=1_000_000_000_000_000)]
"""of a budget, or between two events"""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""of objects or repetitions"""
Size = Annotated[int, Field(ge=1, le=MAX_LENGTH)]
"""of a batch: steps, rows or tokens"""
Width = Annotated[int, Field(ge=1, le=16_384)]
"""of a layer"""
Cores = Annotated[int, Field(ge=1, le=1_024)]
"""threads or processes on one machine"""
Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
"""a time limit"""


class Section(pydantic.BaseModel):
    """A frozen table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def names_in(value: Any) -> Any:
    """Text such as ``"wandb,trackio"``, or a list, as a list with each name once; anything else unchanged."""
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
    return list(dict.fromkeys(names)) if isinstance(names, (list, tuple)) else names


SCHEDULES = ("constant", "linear", "cosine", "adaptive")
"""schedules of the learning rate by name"""


def _check_schedule(value: Any) -> Any:
    if isinstance(value, str) and (value in SCHEDULES or ":" in value):
        return value
    near = did_you_mean(value, SCHEDULES) if isinstance(value, str) else ""
    raise SurefootError(f"optimizer.schedule={value!r}: must be {', '.join(SCHEDULES)} or file.py:function{near}")


class OptimizerSettings(Section):
    """Adam or RMSprop, the learning-rate schedule, gradient clipping and micro-batches."""

    kind: Literal["adam", "rmsprop"] = "adam"
    """rmsprop is the optimizer of the original A2C (eager engine only)"""
    learning_rate: float = Field(3e-4, gt=0)
    """the optimizer's learning rate; under TRPO the critic's, unless critic_learning_rate is set"""
    schedule: Annotated[Literal["constant", "linear", "cosine", "adaptive"] | str, BeforeValidator(_check_schedule)] = (
        "constant"
    )
    """linear and cosine decay the learning rate to zero over the budget; adaptive moves it within 1e-5 … 1e-2 so that the KL of
    each minibatch stays near kl_target (as rsl_rl); module:function or file.py:function returns its factor from the remaining
    share of the budget, 1 to 0"""
    kl_target: float = Field(0.01, gt=0)
    """KL(π_old‖π_θ) that schedule = "adaptive" aims at"""
    warmup: float = Field(0.0, ge=0, lt=1)
    """share of the budget over which the learning rate rises from zero"""
    epsilon: float = Field(1e-5, gt=0)
    """Adam's or RMSprop's epsilon"""
    weight_decay: float = Field(0.0, ge=0, lt=1)
    """decoupled weight decay of matrices, not of norms and biases (AdamW; in control with the eager engine only)"""
    max_grad_norm: float | None = Field(0.5, gt=0)
    """clip gradients to this norm (none: no clipping); TRPO's policy step is bounded by its KL instead"""
    critic_learning_rate: float | None = Field(None, gt=0)
    """use a separate optimizer for the critic, with this learning rate"""
    critic_max_grad_norm: float | None = Field(0.5, gt=0)
    """gradient clip of the critic's separate optimizer"""
    micro_batch: Size | None = None
    """rows per backward pass; limits memory, gradients stay the same"""
    micro_batch_tokens: Size | None = None
    """tokens per backward pass, with padding, in rows of similar length; limits memory, gradients stay the same"""


class EvaluationSettings(Section):
    """Periodic evaluation; the best checkpoint is kept in best/."""

    every: Steps | None = None
    """steps between evaluations; none: a tenth of the budget (in control once if below an iteration)"""
    seed: int = Field(1_000_000, ge=0, le=MAX_SEED)
    """seed of the evaluation's episodes or samples"""
    patience: Count | None = None
    """stop after this many evaluations in a row without a new best; none: train to the end"""


class CheckpointSettings(Section):
    """Periodic checkpoints."""

    every: Steps | None = None
    """steps between checkpoints; none: a tenth of the budget"""
    keep: Count = 2
    """latest checkpoints to keep, besides best/"""


class TraceSettings(Section):
    """Traces: every number behind an update, for a few steps or tokens, in traces/."""

    every: Steps | None = None
    """steps between traces; none: a tenth of the budget, in control with a critic at least four iterations"""
    rows: int = Field(2, ge=0, le=MAX_COUNT)
    """rows per trace: responses, or the longest episode part of that many environments; 0: no traces"""
    max_megabytes: float = Field(64.0, gt=0, le=MAX_LENGTH)
    """disk space for all traces of a run, in 10⁶ bytes; the oldest are deleted first"""


TrackerName = Literal["tensorboard", "wandb", "trackio"]


class TrackingSettings(Section):
    """How trackers name a run; its group holds the seeds of one recipe."""

    project: str = Field("surefoot", min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")
    """project at W&B and Trackio"""
    group: str | None = Field(None, min_length=1, max_length=128)
    """group of the run; none: task and algorithm, so that seeds are one group"""
    name: str | None = Field(None, min_length=1, max_length=128)
    """name of the run; none: its folder's name"""
    tags: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(max_length=64), pydantic.BeforeValidator(names_in)
    ] = ()
    """tags of the run"""


class Recipe(Section):
    """The fields of every kind of run."""

    default_algorithm: ClassVar[str] = "PPO_CLIP"
    subject: ClassVar[str]
    """name of the field with the task or model"""
    scores: ClassVar[tuple[str, ...]]
    """metrics that show how good the result is, the most reliable first"""

    kind: str
    """kind of training: control, sft, reward, dpo or language"""
    algorithm: str = "PPO_CLIP"
    """algorithm that [objective] starts from; \"custom\": the plain defaults"""
    steps: Steps = 100_000
    """budget: environment steps in control; rows, or responses of online runs, in language"""
    seed: int = Field(1, ge=0, le=MAX_SEED)
    """seed of all randomness"""
    device: str = Field("cpu", pattern=r"^(cpu|mps|cuda(:\d+)?)$")
    """device of the network: cpu, mps, cuda, cuda:1 …"""
    threads: Cores = 1
    """torch threads; 1 is fastest for small networks. Results are exact for a fixed number"""
    tf32: bool = False
    """let NVIDIA GPUs multiply float32 matrices in TF32, with 10 bits of mantissa: faster; no effect elsewhere"""
    deterministic: bool = True
    """on NVIDIA GPUs, use algorithms that give the same bits each time, so that a resumed run is exact; actions are sampled all
    the same"""
    engine: Literal["eager", "compiled", "auto"] = "eager"
    """compiled: compile updates and acting, in up to a minute, or the blocks of a language model and its reference, in minutes;
    they run faster then. Needs a C++ compiler. auto: compiled if a run of control is long enough to win that time back.
    Default: auto in control, eager in language"""
    objective: Objective
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    traces: TraceSettings = TraceSettings()
    fingerprints: bool = True
    """write a hash of each stage of an iteration to fingerprints.jsonl, for surefoot verify and diff"""
    trackers: tuple[TrackerName, ...] = ()
    """also log to these: tensorboard, wandb, trackio; each needs the extra of its name"""
    tracking: TrackingSettings = TrackingSettings()

    @pydantic.field_validator("trackers", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        names = () if value is None else names_in(value)
        if isinstance(names, list) and "mlflow" in names:
            raise SurefootError("trackers='mlflow': is a callback; train from Python, see docs/how-to/log-to-trackers.md")
        return names

    @classmethod
    def objective_overrides(cls, algorithm: Objective) -> dict[str, Any]:
        """Switches of the objective that this kind sets differently by default."""
        return {}

    @classmethod
    def with_defaults(cls, table: dict[str, Any]) -> dict[str, Any]:
        """A recipe's tables, with the defaults that depend on other fields. The objective's table is complete already."""
        return table

    @cached_property
    def table(self) -> dict[str, Any]:
        """``to_table`` of the recipe, written once: for reading only."""
        return to_table(self)

    def __copy__(self) -> Self:
        """A copy, which ``model_copy`` changes, writes its own table."""
        copied = super().__copy__()
        copied.__dict__.pop("table", None)
        return copied

    def with_value(self, name: str, value: Any) -> Self:
        """The recipe with a valid value in a field, by its dotted name."""
        table, _, field = name.rpartition(".")
        inner = getattr(self, table).model_copy(update={field: value}) if table else value
        return self.model_copy(update={table or name: inner})

    def check_ranks(self, ranks: int) -> None:
        """Raise SurefootError if a batch does not give every one of several ranks enough rows."""

    @property
    def trained(self) -> str:
        """The name of the task or model."""
        return str(getattr(self, self.subject))

    @property
    def title(self) -> str:
        """The run in a few words."""
        return f"{self.algorithm} on {self.trained}"

    @property
    def minibatches(self) -> int:
        """Minibatches of a batch."""
        return self.objective.reuse.minibatches if self.objective.reuse else 1

    @property
    def has_critic(self) -> bool:
        """Whether V(s) is learned."""
        return self.objective.baseline == "critic"

    def compiled_obstacle(self) -> str | None:
        """The error of a recipe that has no compiled engine, None if it has one."""
        return None

    @property
    def compiled_rows(self) -> int | None:
        """Rows per update of the compiled engine; None for the eager engine."""
        return None

    def engine_choice(self) -> tuple[str, str]:
        """The engine that "auto" stands for, and why; it depends on the recipe alone."""
        return "eager", f"kind = {self.kind!r} has no other"

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations."""
        return self.evaluation.every or max(1, self.steps // 10)

    @property
    def iteration_steps(self) -> int | None:
        """Steps of an iteration; None if it depends on what is collected."""
        return None

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints."""
        return self.checkpoint.every or max(1, self.steps // 10)

    @property
    def trace_every(self) -> int:
        """Steps between traces."""
        return self.traces.every or max(1, self.steps // 10)


def to_table(recipe: Recipe) -> dict[str, Any]:
    """Plain tables of every field; ``make_recipe`` returns the same recipe for them."""
    first = {"kind": recipe.kind, recipe.subject: recipe.trained}
    table: dict[str, Any] = first | none_to_text(recipe.model_dump(mode="json", exclude={"objective"}))
    table["objective"] = none_to_text(asdict(recipe.objective))
    return table


def none_to_text(value: Any) -> Any:
    """Tables with the word "none" for None, because TOML has no null; the reverse of ``text_to_none``."""
    if isinstance(value, Mapping):
        return {key: none_to_text(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [none_to_text(inner) if isinstance(inner, Mapping) else inner for inner in value]
    return "none" if value is None else value


def nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of ``total`` that is nearest to ``wanted``, the smaller of two; for suggestions in errors."""
    below = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    return min((*below, *(total // d for d in below)), key=lambda d: (abs(d - wanted), d))


def check_shares(field: str, count: int, ranks: int, rows: int = 1, minibatches: int = 1) -> None:
    """Raise SurefootError unless each rank's share of ``count`` things, of ``rows`` rows each, has a row for each minibatch."""
    if count < ranks:
        raise SurefootError(f"{field}={count}: too few for {ranks} ranks; set at least {ranks}")
    smallest = count // ranks * rows
    if smallest < minibatches:
        raise SurefootError(
            f"objective.reuse.minibatches={minibatches}: a rank has only {smallest} of the rows of {field}={count} on {ranks} "
            f"ranks; set at most {smallest}, or a larger {field}"
        )
