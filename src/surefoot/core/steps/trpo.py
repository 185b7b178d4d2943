"""TRPO's step: along the natural gradient, as far as a bound on the KL and a line search allow.

Schulman et al. 2015 (arXiv 1502.05477), section 6 and appendix C. The formulas are in ``functional.natural_gradient``.
Everything is a sum over micro-batches and ranks divided by the global count, so the split doesn't change the step, and every
rank takes the same one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.core.algorithms import Constraint, Objective
from surefoot.core.minibatches import Minibatch, with_global_numbers
from surefoot.core.objective import Batch, loss, mean_old_kl, ratio_range
from surefoot.core.optimizer import FlatParameters
from surefoot.core.rollout import Evaluation, Policy, map_tensors
from surefoot.core.steps import Gradients, GradientSum, LossSums, PendingStep, UpdateContext, by_name, sum_over_ranks
from surefoot.errors import SurefootError
from surefoot.functional import aggregate, conjugate_gradient, fisher_vector_product, line_search
from surefoot.functional.masking import keep_only
from surefoot.ranks.collectives import all_sum


@dataclass(frozen=True)
class Surrogate:
    """The surrogate objective of a policy on a batch, over all ranks."""

    gain: float
    """the maximised sum: J plus the entropy bonus, minus the KL to a reference"""
    kl: float
    """mean KL(π_old‖π_θ), exact if the distributions are known"""
    terms: dict[str, float]
    """of the loss"""
    metrics: dict[str, float]
    """of the loss"""
    ratios: tuple[float, float]
    """the smallest and the largest ρ of this rank's samples"""


class NaturalPasses(Gradients, Protocol):
    """What a natural step computes of a batch: gradient, surrogate and curvature, in sums over the rows of this rank."""

    def evaluate(self, rows: Batch, denominator: Tensor) -> LossSums:
        """The loss at the present θ. Its metrics end with those of ``further_sums``."""
        ...

    def curvature(self, rows: Batch, denominator: Tensor) -> Callable[[Tensor], Tensor]:
        """v -> H v, with H the Hessian at θ_old of the rows' part of the mean KL(π_old‖π_θ).   [n] -> [n]"""
        ...


class EagerPasses:
    """The passes of a natural step by autograd, in micro-batches.

    optimizer    the policy's parameters
    """

    def __init__(self, gradients: GradientSum, optimizer: FlatParameters) -> None:
        self.gradients, self.optimizer, self.objective = gradients, optimizer, gradients.objective

    def add(
        self, rows: Batch, denominator: Tensor, context: UpdateContext, parameters: Sequence[nn.Parameter] | None
    ) -> LossSums:
        """Add the gradient to ``.grad`` of ``parameters``, or of all parameters if None."""
        return self.gradients.add(rows, denominator, context, parameters)

    @torch.no_grad()
    def evaluate(self, rows: Batch, denominator: Tensor) -> LossSums:
        """The loss at the present θ."""
        sums: list[Tensor] = []
        extremes: list[Tensor] = []
        for part in self.gradients.parts(rows):
            evaluation = self.gradients.policy(part.inputs, part.actions, part.mask)
            _, terms, metrics, ratio = loss(evaluation, part, self.objective, denominator=denominator)
            metrics = metrics | further_sums(evaluation, part, self.objective, denominator)
            sums.append(torch.stack([*terms.values(), *metrics.values()]))
            extremes.append(torch.stack(ratio.aminmax()))
        return LossSums(list(terms), list(metrics), torch.stack(sums).sum(0), ratio_range(extremes))

    def curvature(self, rows: Batch, denominator: Tensor) -> Callable[[Tensor], Tensor]:
        """v -> H v. A batch in one part keeps the graph of the gradient. With several parts each product builds the graphs
        again, one at a time, to bound memory.
        """
        parts, parameters = list(self.gradients.parts(rows)), self.optimizer.parameters

        def product(part: Batch) -> Callable[[Tensor], Tensor]:
            # Neither fused attention nor cuDNN's LSTM can be differentiated twice.
            with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
                evaluation = self.gradients.policy(part.inputs, part.actions, part.mask)
            return fisher_vector_product(mean_old_kl(evaluation, part, self.objective, denominator), parameters, damping=0.0)

        kept = product(parts[0]) if len(parts) == 1 else None

        def matvec(v: Tensor) -> Tensor:
            return kept(v) if kept else torch.stack([product(part)(v) for part in parts]).sum(0)

        return matvec


def further_sums(evaluation: Evaluation, batch: Batch, objective: Objective, denominator: Tensor) -> dict[str, Tensor]:
    """What a line search reads besides the loss: mean KL(π_old‖π_θ), and the entropy bonus if there is one.   each []"""
    further = {"kl_after": mean_old_kl(evaluation, batch, objective, denominator)}
    if objective.entropy_coefficient:
        mode, length = objective.aggregation, objective.aggregation_length
        further["bonus"] = aggregate(keep_only(evaluation.entropy, batch.mask), batch.mask, mode, denominator, length)
    return further


class NaturalStepper:
    """One step of the policy on the whole batch; the critic does not move.

    optimizer    the policy's parameters
    parameters   the parameters that get a gradient; None: all
    """

    def __init__(
        self,
        policy: Policy,
        passes: NaturalPasses,
        optimizer: FlatParameters,
        constraint: Constraint,
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.policy, self.passes, self.optimizer, self.constraint = policy, passes, optimizer, constraint
        self.parameters = parameters

    def minibatches(self, batch: Batch, count: int, context: UpdateContext) -> list[Minibatch]:
        """The whole batch, in its own order."""
        return with_global_numbers([batch], self.passes.objective)

    def prepare(self, minibatch: Minibatch, context: UpdateContext) -> "NaturalStep":
        """The gradient of the loss at θ_old; the line search runs when the step is taken."""
        rows = minibatch.rows if minibatch.moments is None else context.normalised(minibatch.rows, minibatch.moments)
        self.optimizer.zero()
        sums = self.passes.add(rows, minibatch.denominator, context, self.parameters)
        terms, metrics = sum_over_ranks(sums, [self.optimizer])
        return NaturalStep(
            terms=terms,
            metrics=metrics,
            ratios=sums.ratios,
            norms={"policy": self.optimizer.gradient_norm()},
            policy=self.policy,
            passes=self.passes,
            constraint=self.constraint,
            optimizer=self.optimizer,
            rows=rows,
            denominator=minibatch.denominator,
        )


@dataclass(kw_only=True)
class NaturalStep(PendingStep):
    """A step whose gradient, summed over ranks, is in ``optimizer.gradients``."""

    policy: Policy
    passes: NaturalPasses
    constraint: Constraint
    optimizer: FlatParameters
    rows: Batch
    """the whole batch"""
    denominator: Tensor
    """the batch's count over all ranks"""

    def take(self) -> bool:
        """Move θ within the constraint, or leave it as it was, bit for bit. Terms, metrics and ratios are those at the end.

        θ stays if the gradient is 0, if the KL has no curvature along the direction (xᵀHx ≤ 0), or if the line search accepts
        no length.
        """
        if self.passes.objective.baseline == "critic":
            _reject_shared_trunk(self.policy, self.rows, self.optimizer.parameters)
        constraint, values, old = self.constraint, self.optimizer.values, self.optimizer.values.clone()
        start = self._surrogate()
        tried: list[Surrogate] = []

        def evaluate(step: Tensor) -> tuple[float, float]:
            torch.add(old, step, out=values)
            tried.append(self._surrogate())
            return tried[-1].gain - start.gain, tried[-1].kl

        accepted = None
        try:
            full = self._full_step()
            if full is not None:
                accepted = line_search(evaluate, full, constraint.delta, constraint.shrink, constraint.tries)
        finally:
            if accepted is None:
                values.copy_(old)
        end = start if accepted is None else tried[-1]
        self.terms, self.metrics, self.ratios = end.terms, end.metrics, end.ratios
        self.outcome = {
            "step_taken": float(accepted is not None),
            "line_search_tries": float(len(tried)),
            "surrogate_improvement": end.gain - start.gain,
            "kl_after": end.kl,
        }
        return accepted is not None

    def _full_step(self) -> Tensor | None:
        """√(2δ / xᵀHx) x with x = H⁻¹g: the longest step within δ if the KL were quadratic; None if there is none.   [n]"""
        constraint, gradients = self.constraint, self.optimizer.gradients
        norm = torch.linalg.vector_norm(gradients)
        if norm == 0:
            return None
        matvec = damped_fisher(self.passes.curvature(self.rows, self.denominator), constraint.damping)
        # The step's length does not depend on that of g; at length 1 a small g is not lost in the solver's tolerance.
        direction = conjugate_gradient(matvec, -gradients / norm, constraint.cg_iterations)
        curvature = direction @ matvec(direction)
        if not curvature > 0:
            return None
        return (2 * constraint.delta / curvature).sqrt() * direction

    def _surrogate(self) -> Surrogate:
        """Evaluate the policy on the whole batch, over all ranks."""
        objective, sums = self.passes.objective, self.passes.evaluate(self.rows, self.denominator)
        terms, metrics = by_name(all_sum(sums.sums).tolist(), sums.terms, sums.metrics)
        kl, bonus = metrics.pop("kl_after"), metrics.pop("bonus", 0.0)
        gain = -terms["policy_loss"] + objective.entropy_coefficient * bonus
        if objective.reference_coefficient:
            gain -= objective.reference_coefficient * terms["reference_loss"]
        return Surrogate(gain, kl, terms, metrics, sums.ratios)


def _reject_shared_trunk(policy: Policy, part: Batch, parameters: Sequence[nn.Parameter]) -> None:
    """Raise SurefootError if V depends on the policy's parameters, whose gradient would mix two losses."""
    first = map_tensors(lambda x: x[:1], (part.inputs, part.actions, part.mask))
    values = policy(*first).values
    if values is None or not values.requires_grad:
        return
    reached = torch.autograd.grad(values.sum(), parameters, allow_unused=True)
    if any(gradient is not None for gradient in reached):
        raise SurefootError(
            "objective.trust_region='constraint': the critic is fitted apart from the policy, and this one reads a trunk that "
            "the policy reads too; give it one of its own, and list all of it in critic_parameters()"
        )


def damped_fisher(curvature: Callable[[Tensor], Tensor], damping: float) -> Callable[[Tensor], Tensor]:
    """v -> (H + damping·I) v, with H the sum over ranks of their ``curvature``.   [n] -> [n]"""

    def matvec(v: Tensor) -> Tensor:
        return all_sum(curvature(v)) + damping * v

    return matvec
