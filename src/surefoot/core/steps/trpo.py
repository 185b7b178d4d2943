"""TRPO's step: along the natural gradient, as far as a bound on the KL and a line search allow.

Schulman et al. 2015 (arXiv 1502.05477), section 6 and appendix C. The formulas are in ``functional.natural_gradient``.
Everything is a sum over micro-batches and ranks divided by the global count, so the split doesn't change the step, and every
rank takes the same one.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from surefoot.core.algorithms import Constraint
from surefoot.core.minibatches import with_global_numbers
from surefoot.core.objective import Batch
from surefoot.core.optimizer import FlatParameters
from surefoot.core.rollout import Policy, map_tensors
from surefoot.core.steps import Passes, PendingStep, Stepper, UpdateContext
from surefoot.errors import SurefootError
from surefoot.functional import conjugate_gradient, line_search
from surefoot.ranks.collectives import all_sum


class Surrogate(NamedTuple):
    """The surrogate objective of a policy on a batch, over all ranks; what else the loss has is as in ``PendingStep``."""

    gain: float
    """the maximised sum: J plus the entropy bonus, minus the KL to a reference"""
    kl: float
    """mean KL(π_old‖π_θ), exact if the distributions are known"""
    terms: dict[str, float]
    metrics: dict[str, float]
    ratios: tuple[float, float]


class NaturalStepper(Stepper):
    """One step of the policy on the whole batch, then the steps of the critic.

    own          the policy's parameters
    critic       None without one
    parameters   the parameters that get a gradient; None: all
    """

    def __init__(
        self,
        passes: Passes,
        natural: FlatParameters,
        critic: Stepper | None = None,
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> None:
        assert passes.objective.constraint is not None
        self.passes, self.natural, self.critic, self.parameters = passes, natural, critic, parameters
        self.constraint: Constraint = passes.objective.constraint

    def steps(self, batch: Batch, context: UpdateContext) -> Iterator[PendingStep]:
        """The natural step, with the gradient of the loss at θ_old; the line search runs when it is taken."""
        (minibatch,) = with_global_numbers([batch], self.passes.objective)
        rows = minibatch.rows if minibatch.moments is None else context.normalised(minibatch.rows, minibatch.moments)
        self.natural.zero()
        sums = self.passes.add(rows, minibatch.denominator, context, self.parameters)
        terms, metrics = sums.over_ranks([self.natural])
        norms, move = {"policy": self.natural.gradient_norm()}, partial(self._move, rows, minibatch.denominator)
        yield PendingStep(terms, metrics, sums.ratios, norms, -1, move, gradients_of=[self.natural])
        if self.critic is not None:
            yield from self.critic.steps(batch, context)

    def _move(self, rows: Batch, denominator: Tensor, step: PendingStep) -> bool:
        """Move θ within the constraint, or leave it as it was, bit for bit. Terms, metrics and ratios are those at the end.

        θ stays if the gradient is 0, if the KL has no curvature along the direction (xᵀHx ≤ 0), or if the line search accepts
        no length.
        """
        if self.passes.objective.baseline == "critic":
            _reject_shared_trunk(self.passes.policy, rows, self.natural.parameters)
        constraint, values, old = self.constraint, self.natural.values, self.natural.values.clone()
        start = self._surrogate(rows, denominator)
        tried: list[Surrogate] = []

        def evaluate(length: Tensor) -> tuple[float, float]:
            torch.add(old, length, out=values)
            tried.append(self._surrogate(rows, denominator))
            return tried[-1].gain - start.gain, tried[-1].kl

        accepted = None
        try:
            full = self._full_step(rows, denominator)
            if full is not None:
                accepted = line_search(evaluate, full, constraint.delta, constraint.shrink, constraint.tries)
        finally:
            if accepted is None:
                values.copy_(old)
        end = start if accepted is None else tried[-1]
        step.terms, step.metrics, step.ratios = end.terms, end.metrics, end.ratios
        step.outcome = {
            "step_taken": float(accepted is not None),
            "line_search_tries": float(len(tried)),
            "surrogate_improvement": end.gain - start.gain,
            "kl_after": end.kl,
        }
        return accepted is not None

    def _full_step(self, rows: Batch, denominator: Tensor) -> Tensor | None:
        """√(2δ / xᵀHx) x with x = H⁻¹g: the longest step within δ if the KL were quadratic; None if there is none.   [n]"""
        constraint, gradients = self.constraint, self.natural.gradients
        norm = torch.linalg.vector_norm(gradients)
        if norm == 0:
            return None
        matvec = damped_fisher(self.passes.curvature(rows, denominator, self.natural.parameters), constraint.damping)
        # The step's length does not depend on that of g; at length 1 a small g is not lost in the solver's tolerance.
        direction = conjugate_gradient(matvec, -gradients / norm, constraint.cg_iterations)
        curvature = direction @ matvec(direction)
        if not curvature > 0:
            return None
        return (2 * constraint.delta / curvature).sqrt() * direction

    def _surrogate(self, rows: Batch, denominator: Tensor) -> Surrogate:
        """Evaluate the policy on the whole batch, over all ranks."""
        objective, sums = self.passes.objective, self.passes.evaluate(rows, denominator)
        terms, metrics = sums.over_ranks()
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
