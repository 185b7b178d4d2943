"""What the recipe of every kind has.

A recipe is a frozen value. What follows from its fields (batch size, number of iterations) is a property, never filled in
later.
"""

import math
from typing import Any, ClassVar, Literal

from pydantic import Field

from surefoot.core.algorithms import MAX_LENGTH, Objective
from surefoot.core.seeding import MAX_SEED
from surefoot.errors import SurefootError
from surefoot.recipes.sections import (
    CheckpointSettings,
    Cores,
    EvaluationSettings,
    OptimizerSettings,
    Section,
    Steps,
    TraceSettings,
)


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
    def switches(cls, algorithm: Objective) -> dict[str, Any]:
        """What this kind sets otherwise in an algorithm's objective, where a recipe doesn't say."""
        return {}

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
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
