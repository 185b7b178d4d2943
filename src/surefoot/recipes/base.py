"""What the recipe of every kind has.

A recipe is a frozen value. What follows from its fields (batch size, number of iterations) is a property, never filled in
later.
"""

import math
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import ConfigDict, Field

from surefoot.core.algorithms import MAX_COUNT, MAX_LENGTH, Objective
from surefoot.core.seeding import MAX_SEED
from surefoot.errors import SurefootError

# Bounds above are far beyond any use: they are where a slip of the keyboard ends, before memory or a lifetime does.
Steps = Annotated[int, Field(ge=1, le=1_000_000_000_000_000)]
"""of a budget, or between two of the same thing"""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""of things that are there, or done, one after the other"""
Size = Annotated[int, Field(ge=1, le=MAX_LENGTH)]
"""of a batch: steps, rows or tokens"""
Width = Annotated[int, Field(ge=1, le=16_384)]
"""of a layer"""
Cores = Annotated[int, Field(ge=1, le=1_024)]
"""threads or processes on one machine"""
Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
"""that something may take"""


class Section(pydantic.BaseModel):
    """A frozen table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class OptimizerSettings(Section):
    """How θ moves."""

    learning_rate: float = Field(3e-4, gt=0)
    """Adam's learning rate; under TRPO the critic's, unless critic_learning_rate is set"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """linear and cosine fall to zero over the budget"""
    warmup: float = Field(0.0, ge=0, lt=1)
    """share of the budget over which the learning rate first rises from zero"""
    epsilon: float = Field(1e-5, gt=0)
    """Adam's epsilon"""
    max_grad_norm: float | None = Field(0.5, gt=0)
    """scale larger gradients down to this norm; TRPO's own step is bounded by its KL and not by this"""
    critic_learning_rate: float | None = Field(None, gt=0)
    """give the critic its own optimizer, with this learning rate"""
    critic_max_grad_norm: float | None = Field(0.5, gt=0)
    """gradient clip of the critic's own optimizer"""
    micro_batch: Size | None = None
    """rows per backward pass; bounds memory, changes no gradient"""
    micro_batch_tokens: Size | None = None
    """tokens of text per backward pass, padding included, in rows of like length; bounds memory, changes no gradient"""


class EvaluationSettings(Section):
    """Periodic evaluation; the best checkpoint is kept in best/."""

    every: Steps | None = None
    """steps between evaluations; none means a tenth of the budget"""
    seed: int = Field(1_000_000, ge=0, le=MAX_SEED)
    """seed of the evaluation's episodes or samples"""
    patience: Count | None = None
    """stop after so many evaluations in a row without a better one; none trains to the end"""


class CheckpointSettings(Section):
    """What is saved, and when."""

    every: Steps | None = None
    """steps between checkpoints; none means a tenth of the budget"""
    keep: Count = 2
    """how many of the last are kept, besides best/"""


class TraceSettings(Section):
    """Traces: every number behind an update, for a few steps or tokens, in traces/."""

    every: Steps | None = None
    """steps between traces, of which the first iteration has one; none means a tenth of the budget"""
    rows: int = Field(2, ge=0, le=MAX_COUNT)
    """responses, or episodes (the longest piece in the batch, of one environment each), per trace; 0 switches traces off"""
    max_megabytes: float = Field(64.0, gt=0, le=MAX_LENGTH)
    """what all traces of a run may take on the disk, in 10⁶ bytes; the oldest make room"""


class Recipe(Section):
    """What every run has, whatever is trained."""

    default_algorithm: ClassVar[str] = "PPO_CLIP"
    subject: ClassVar[str]
    """the field that says what is trained"""
    scores: ClassVar[tuple[str, ...]]
    """metrics that tell how well a run ended, the best known first"""

    kind: str
    """what is trained, and how: control, sft, reward, dpo or language"""
    algorithm: str = "PPO_CLIP"
    """name of the algorithm that [objective] starts from; \"custom\" starts from nothing"""
    steps: Steps = 100_000
    """the budget: environment steps in control; rows to learn from, or responses, in language"""
    seed: int = Field(1, ge=0, le=MAX_SEED)
    """decides everything random"""
    device: str = Field("cpu", pattern=r"^(cpu|mps|cuda(:\d+)?)$")
    """where the network lives: cpu, cuda, cuda:1 …"""
    threads: Cores = 1
    """torch threads; one is fastest for small networks, and results are exact for a given number"""
    engine: Literal["eager", "compiled"] = "eager"
    """compiled runs updates, and acting, as compiled programs: faster, once a C++ compiler has made them (under a minute)"""
    objective: Objective
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    traces: TraceSettings = TraceSettings()

    @classmethod
    def objective_overrides(cls, algorithm: Objective) -> dict[str, Any]:
        """What this kind sets otherwise in an algorithm's objective, where a recipe doesn't say."""
        return {}

    @classmethod
    def with_defaults(cls, table: dict[str, Any]) -> dict[str, Any]:
        """A recipe's tables, those of its objective whole, with what follows from them where it says nothing."""
        return table

    @property
    def trained(self) -> str:
        """What is trained, by name."""
        return str(getattr(self, self.subject))

    @property
    def title(self) -> str:
        """What a run does, in a few words."""
        return f"{self.algorithm} on {self.trained}"

    @property
    def compiled_rows(self) -> int | None:
        """How many single steps an update by the compiled engine reads; None for the eager one."""
        return None

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations."""
        return self.evaluation.every or max(1, self.steps // 10)

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints."""
        return self.checkpoint.every or max(1, self.steps // 10)

    @property
    def trace_every(self) -> int:
        """Steps between traces."""
        return self.traces.every or max(1, self.steps // 10)


def nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of ``total`` that is nearest to ``wanted``, the smaller of two; what messages propose."""
    below = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    return min((*below, *(total // d for d in below)), key=lambda d: (abs(d - wanted), d))


def require_size(total: int, what: str, first: tuple[str, int], second: tuple[str, int]) -> None:
    """Raise SurefootError where an iteration, the product of two counts, is larger than a batch may be."""
    (name, value), (other, times) = first, second
    if total > MAX_LENGTH:
        raise SurefootError(
            f"{name}={value}: an iteration of {total:,} {what} (x {other}={times}) is more than {MAX_LENGTH:,}; lower one of "
            "them"
        )
