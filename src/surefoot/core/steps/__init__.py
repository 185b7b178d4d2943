"""The interface through which the learner moves θ, and the eager implementation: autograd, then Adam.

The learner gets one ``PendingStep`` per minibatch from a ``Stepper``, checks its KL, checks that it is finite, and takes it.
``EagerStepper`` is here, ``CompiledStepper`` in ``compiled.py``, ``NaturalStepper`` (TRPO) in ``trpo.py``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from surefoot.core.algorithms import Objective
from surefoot.core.minibatches import (
    Minibatch,
    advantage_moments,
    micro_batches,
    normalised,
    row_range,
    shuffled,
    with_global_numbers,
)
from surefoot.core.objective import Batch, loss, ratio_range
from surefoot.core.optimizer import FlatOptimizer, FlatParameters
from surefoot.core.rollout import AuxiliaryLoss, LearnerState, Metrics, Policy
from surefoot.core.traces import Recording
from surefoot.functional import Moments
from surefoot.ranks.collectives import all_max, all_sum_together, exchanging
from surefoot.sharding import gathered, is_sharded
from surefoot.sharding.optimizer import ShardedOptimizer


@dataclass(frozen=True)
class UpdateContext:
    """What stays the same for all steps on one rollout."""

    state: LearnerState
    rates: Callable[[int], float]
    """the factor of the learning rate at a step, which are counted from 0; at −1: before the first"""
    clip_scale: float
    """multiplies the bounds of the clip"""
    beta: float
    """weight of the KL penalty; 0 without one"""
    recording: Recording | None
    auxiliary_loss: AuxiliaryLoss | None
    first: int
    """``state.updates`` before the first of the steps"""

    def rate_scale(self, ahead: int = 0) -> float:
        """The factor of the learning rate at the next step, at one that many steps ahead, or (−1) at the last one taken."""
        return self.rates(self.state.updates - self.first + ahead)

    def normalised(self, batch: Batch, moments: Moments | None = None) -> Batch:
        """The batch with advantages of mean 0 and variance 1; a trace records the moments, which are computed if not given."""
        moments = advantage_moments(batch) if moments is None else moments
        if self.recording is not None:
            self.recording.normalised_by(moments)
        return normalised(batch, moments)


@dataclass(kw_only=True)
class PendingStep(ABC):
    """A step that is computed but not yet taken."""

    terms: dict[str, float]
    """of the loss, over all ranks; a step with one that is not finite is not taken"""
    metrics: dict[str, float]
    """of the loss, over all ranks; they may be anything"""
    ratios: tuple[float, float]
    """the smallest and the largest ρ of this rank's samples"""
    norms: dict[str, float]
    """norm of the gradient of each optimizer's parameters, over all ranks"""
    outcome: Metrics = field(default_factory=dict)
    """metrics of the step, set when it is taken"""

    @abstractmethod
    def take(self) -> bool:
        """Move θ. Return False if θ stays where it was."""


class Stepper(Protocol):
    """A way to move θ."""

    def minibatches(self, batch: Batch, count: int, context: UpdateContext) -> Iterable[Any]:
        """One pass over a batch in ``count`` minibatches, in the form that ``prepare`` takes."""
        ...

    def prepare(self, minibatch: Any, context: UpdateContext) -> PendingStep:
        """Compute a step from the present θ. The step before it must have been taken."""
        ...


class Gradients(Protocol):
    """A way to compute the gradient of a minibatch."""

    @property
    def objective(self) -> Objective:
        """What the loss is."""
        ...

    def add(
        self, rows: Batch, denominator: Tensor, context: UpdateContext, parameters: Sequence[nn.Parameter] | None
    ) -> "LossSums":
        """Add it to ``.grad`` of ``parameters``, or of all parameters if None. ``denominator`` is that of all ranks."""
        ...


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


def sum_over_ranks(
    loss_sums: LossSums, optimizers: Iterable[FlatParameters | ShardedOptimizer]
) -> tuple[dict[str, float], dict[str, float]]:
    """Sum the gradients over ranks, together with the loss's terms and metrics, which are returned."""
    all_sum_together([loss_sums.sums, *(gradient for optimizer in optimizers for gradient in optimizer.own_gradients())])
    terms, metrics = by_name(loss_sums.sums.tolist(), loss_sums.terms, loss_sums.metrics)
    return terms, metrics


class GradientSum:
    """Loss and gradient of a minibatch, summed over its micro-batches.

    micro_batch         rows per micro-batch
    micro_batch_tokens  tokens per micro-batch, padding included
    """

    def __init__(self, policy: Policy, objective: Objective, micro_batch: int | None, micro_batch_tokens: int | None) -> None:
        self.policy, self.objective = policy, objective
        self.micro_batch, self.micro_batch_tokens = micro_batch, micro_batch_tokens

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """The micro-batches."""
        costs = shared = None
        if self.micro_batch_tokens is not None and batch.mask is not None:
            costs, shared = self.policy.costs(batch.inputs, batch.mask), self.policy.shared(batch.inputs, batch.mask)
        return micro_batches(batch, self.micro_batch, self.micro_batch_tokens, costs, shared)

    def _evened(self, parts: Iterable[Batch], minibatch: Batch) -> Iterator[tuple[Batch, bool]]:
        """The micro-batches, and whether each counts. The passes of a sharded model are exchanges, so a rank with fewer
        micro-batches than another repeats a row that does not count.
        """
        if not is_sharded(self.policy):
            for part in parts:
                yield part, True
            return
        own = list(parts)
        most = int(all_max(torch.tensor(len(own))))
        for part in own:
            yield part, True
        for _ in range(most - len(own)):
            yield row_range(minibatch, 0, 1), False

    def add(
        self, rows: Batch, denominator: Tensor, context: UpdateContext, parameters: Sequence[nn.Parameter] | None
    ) -> LossSums:
        """Add the gradient to ``.grad`` of ``parameters``, or of all parameters if None."""
        timer = context.state.timer
        sums: list[Tensor] = []
        extremes: list[Tensor] = []
        parts: Iterable[Batch] = self.parts(rows)
        if self.objective.router_coefficient:
            parts = list(parts)
            with gathered(self.policy):
                self.policy.prepare([(part.inputs, part.actions, part.mask) for part in parts])
        for part, counts in self._evened(parts, rows):
            with exchanging():
                with timer.detail("forward"):
                    evaluation = self.policy(part.inputs, part.actions, part.mask)
                    total, terms, metrics, ratio = loss(
                        evaluation,
                        part,
                        self.objective,
                        denominator=denominator,
                        clip_scale=context.clip_scale,
                        beta=context.beta,
                    )
                if context.recording is not None and counts:
                    context.recording.visit(part, evaluation, context.state.updates)
                with timer.detail("backward"):
                    (total if counts else 0 * total).backward(inputs=parameters)  # type: ignore[no-untyped-call]
            if counts:
                sums.append(torch.stack([*terms.values(), *metrics.values()]))
                extremes.append(torch.stack(ratio.aminmax()))
        total = torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]
        return LossSums(list(terms), list(metrics), total, ratio_range(extremes))


def by_name(numbers: Iterable[float], *groups: Iterable[str]) -> list[dict[str, float]]:
    """Consecutive numbers by name, one dictionary per group of names; an iterator keeps the numbers after them."""
    left = iter(numbers)
    return [dict(zip(names, left, strict=False)) for names in groups]  # zip takes the name first, so it loses no number


@dataclass(kw_only=True)
class EagerStep(PendingStep):
    """One step per optimizer; each optimizer holds its gradient."""

    optimizers: Mapping[str, FlatOptimizer | ShardedOptimizer]
    rate_scale: float

    def take(self) -> bool:
        for name, optimizer in self.optimizers.items():
            optimizer.step(self.norms[name], self.rate_scale)
        return True


class EagerStepper:
    """Steps of Adam along the gradient of autograd.

    optimizers   the optimizers to step
    parameters   the parameters that get a gradient; None: all
    """

    def __init__(
        self,
        gradients: Gradients,
        optimizers: Mapping[str, FlatOptimizer | ShardedOptimizer],
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.gradients, self.optimizers, self.parameters = gradients, optimizers, parameters

    def minibatches(self, batch: Batch, count: int, context: UpdateContext) -> list[Minibatch]:
        """The rows in a new random order, in ``count`` parts."""
        return with_global_numbers(shuffled(batch, count, context.state.generators["shuffle"]), self.gradients.objective)

    def prepare(self, minibatch: Minibatch, context: UpdateContext) -> EagerStep:
        """Sum the gradients of the micro-batches and of the auxiliary loss."""
        rows = minibatch.rows if minibatch.moments is None else context.normalised(minibatch.rows, minibatch.moments)
        for optimizer in self.optimizers.values():
            optimizer.zero()
        sums = self.gradients.add(rows, minibatch.denominator, context, self.parameters)
        extra = None
        if context.auxiliary_loss is not None and "policy" in self.optimizers:  # it does not train the critic
            with context.state.timer.detail("auxiliary loss"):
                extra = context.auxiliary_loss.add_gradient()
        with context.state.timer.detail("sums over ranks"):
            terms, metrics = sum_over_ranks(sums, self.optimizers.values())
        terms |= extra or {}
        with context.state.timer.detail("optimizer"):
            norms = {name: optimizer.gradient_norm() for name, optimizer in self.optimizers.items()}
        return EagerStep(
            terms=terms,
            metrics=metrics,
            ratios=sums.ratios,
            norms=norms,
            optimizers=self.optimizers,
            rate_scale=context.rate_scale(),
        )
