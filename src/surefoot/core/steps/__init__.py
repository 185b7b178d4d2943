"""The interface through which the learner moves θ.

The learner gets one ``PendingStep`` after another from its ``Stepper``, checks its KL, checks that it is finite, and takes it.
``eager.py`` has the steps of Adam, ``trpo.py`` the natural step; ``surefoot.accel`` has both as compiled programs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from surefoot.core.algorithms import Objective
from surefoot.core.minibatches import advantage_moments, normalised, random_order
from surefoot.core.objective import Batch
from surefoot.core.optimizer import FlatParameters, Optimizer
from surefoot.core.rollout import AuxiliaryLoss, LearnerState, Metrics, Policy
from surefoot.core.traces import Recording
from surefoot.functional import Moments
from surefoot.ranks.collectives import all_sum_together


@dataclass(frozen=True)
class UpdateContext:
    """What all steps on one rollout share."""

    state: LearnerState
    rates: Callable[[int], float]
    """the factor of the learning rate at a step of Adam, which are counted from 0"""
    clip_scale: float
    """multiplies the bounds of the clip"""
    beta: float
    """weight of the KL penalty; 0 without one"""
    recording: Recording | None
    auxiliary_loss: AuxiliaryLoss | None
    orders: list[Tensor] = field(default_factory=list)
    """the orders of the rows that were drawn, one for each pass"""

    def order(self, count: int) -> Tensor:
        """``count`` rows in a new random order.   [count]"""
        self.orders.append(random_order(count, self.state.generators["shuffle"]))
        return self.orders[-1]

    def normalised(self, batch: Batch, moments: Moments | None = None) -> Batch:
        """The batch with advantages of mean 0 and variance 1; a trace records the moments, which are computed if not given."""
        moments = advantage_moments(batch) if moments is None else moments
        if self.recording is not None:
            self.recording.normalised_by(moments)
        return normalised(batch, moments)


@dataclass
class PendingStep:
    """A step that is computed but not yet taken."""

    terms: dict[str, float]
    """of the loss, over all ranks; a step with one that is not finite is not taken"""
    metrics: dict[str, float]
    """of the loss, over all ranks; they may be anything"""
    ratios: tuple[float, float]
    """the smallest and the largest ρ of this rank's samples"""
    norms: dict[str, float]
    """norm of the gradient of each optimizer's parameters, over all ranks"""
    epoch: int
    """the pass over the batch that it belongs to, from 0; −1: a natural step, which comes before them"""
    move: Callable[["PendingStep"], bool]
    """moves θ; returns False if θ stays where it was"""
    rate_scale: float | None = None
    """factor of the learning rate, which may change until the step is taken; None: it can't"""
    gradients_of: Sequence[FlatParameters | Optimizer] = ()
    """the parameters that have the gradient of this step; none if it is inside a program"""
    outcome: Metrics = field(default_factory=dict)
    """metrics of the step, set when it is taken"""

    def take(self) -> bool:
        """Move θ. Return False if θ stays where it was."""
        return self.move(self)


class Stepper(Protocol):
    """A way to move θ."""

    def steps(self, batch: Batch, context: UpdateContext) -> Iterator[PendingStep]:
        """All steps on a batch. Each is computed from the present θ, so the one before it must have been taken."""

    def simplified(self, batch: Batch) -> Batch:
        """The batch in the simplest form that has the same loss: itself, unless the steps need another."""
        return batch


class Passes(Protocol):
    """Passes over a minibatch. ``denominator`` is the global count that its means divide by."""

    @property
    def policy(self) -> Policy: ...
    @property
    def objective(self) -> Objective: ...

    def add(
        self, rows: Batch, denominator: Tensor, context: UpdateContext, parameters: Sequence[nn.Parameter] | None
    ) -> "LossSums":
        """Add the gradient of the loss to ``.grad`` of ``parameters``, or of all parameters if None."""

    def evaluate(self, rows: Batch, denominator: Tensor) -> "LossSums":
        """The loss at the present θ. Its metrics end with those of ``objective.further_sums``."""

    def curvature(self, rows: Batch, denominator: Tensor, parameters: Sequence[nn.Parameter]) -> Callable[[Tensor], Tensor]:
        """v -> H v, with H the Hessian at θ_old of the rows' part of the mean KL(π_old‖π_θ).   [n] -> [n]"""


@dataclass(frozen=True)
class LossSums:
    """The loss of this rank's rows."""

    terms: list[str]
    """names of the loss's terms"""
    metrics: list[str]
    """names of its metrics"""
    sums: Tensor
    """terms and metrics; summed over ranks they are those of the minibatch   [terms + metrics]"""
    ratios: tuple[float, float]
    """the smallest and the largest ρ"""

    def over_ranks(self, groups: Iterable[FlatParameters | Optimizer] = ()) -> tuple[dict[str, float], dict[str, float]]:
        """Terms and metrics over all ranks. The same exchange sums the gradients of ``groups`` over them."""
        all_sum_together([self.sums, *(gradient for group in groups for gradient in group.own_gradients())])
        terms, metrics = by_name(self.sums.tolist(), self.terms, self.metrics)
        return terms, metrics


def by_name(numbers: Iterable[float], *groups: Iterable[str]) -> list[dict[str, float]]:
    """Consecutive numbers by name, one dictionary per group of names; an iterator keeps the numbers after them."""
    left = iter(numbers)
    return [dict(zip(names, left, strict=False)) for names in groups]  # zip takes the name first, so it loses no number
