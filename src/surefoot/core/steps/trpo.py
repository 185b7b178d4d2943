"""TRPO's step, the other way to move θ: along the natural gradient, as far as a bound on the KL and a line search allow.

Schulman et al. 2015 (arXiv 1502.05477), section 6 and appendix C. The pieces are ``functional.natural_gradient``; here they
meet a policy and a batch. Everything is a sum over micro-batches and ranks divided by the global count, so neither changes
the step, and every rank takes the same one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.core.algorithms import Constraint, Objective
from surefoot.core.distributed import all_sum
from surefoot.core.objective import Batch, loss, mean_old_kl, outermost
from surefoot.core.optimizer import flattened
from surefoot.core.rollout import Metrics, Policy, map_tensors
from surefoot.errors import SurefootError
from surefoot.functional import aggregate, conjugate_gradient, fisher_vector_product, line_search
from surefoot.functional.masking import keep_only


@dataclass(frozen=True)
class SurrogateReport:
    """What the policy is worth on a batch at this moment, over all ranks."""

    gain: float
    """what is maximised: J, and the entropy bonus where there is one, less the KL to a reference"""
    kl: float
    """mean KL(π_old‖π_θ), exact where the distributions are known"""
    terms: dict[str, float]
    """of the loss"""
    ratios: tuple[float, float]
    """the smallest and the largest ρ of this rank's samples"""


class NaturalStep:
    """The policy's parameters and their gradients, each in one flat tensor, and the step that moves them."""

    def __init__(self, parameters: Iterable[nn.Parameter], constraint: Constraint) -> None:
        self.parameters: Sequence[nn.Parameter] = list(parameters)
        self.constraint = constraint
        self.values, self.gradients = flattened(self.parameters)

    def zero(self) -> None:
        """Forget the gradients; backward then adds into the flat tensor."""
        self.gradients.zero_()

    def gradient_norm(self) -> float:
        """The norm of the gradient summed over all ranks; may be NaN or infinite, and then no step must be taken."""
        return float(torch.linalg.vector_norm(all_sum(self.gradients)))

    def step(
        self, policy: Policy, parts: Sequence[Batch], objective: Objective, denominator: Tensor
    ) -> tuple[Metrics, SurrogateReport]:
        """Move θ within the constraint, or leave it as it was, bit for bit; what happened, and how θ stands then.

        parts        the whole batch, in micro-batches
        denominator  its count over all ranks

        ``gradients`` must hold the gradient of the loss at θ_old, summed over ranks. No step is taken where it is 0, where the
        KL has no curvature along the direction found (xᵀHx ≤ 0), or where no length that the line search tries will do.
        """
        if objective.baseline == "critic":
            _refuse_shared(policy, parts[0], self.parameters)
        constraint, old = self.constraint, self.values.clone()
        start = judged(policy, parts, objective, denominator)
        tried: list[SurrogateReport] = []

        def evaluate(step: Tensor) -> tuple[float, float]:
            torch.add(old, step, out=self.values)
            tried.append(judged(policy, parts, objective, denominator))
            return tried[-1].gain - start.gain, tried[-1].kl

        taken = None
        try:
            full = self._full_step(policy, parts, objective, denominator)
            if full is not None:
                taken = line_search(evaluate, full, constraint.delta, constraint.shrink, constraint.tries)
        finally:
            if taken is None:
                self.values.copy_(old)
        end = start if taken is None else tried[-1]
        metrics: Metrics = {
            "step_taken": float(taken is not None),
            "line_search_tries": float(len(tried)),
            "surrogate_improvement": end.gain - start.gain,
            "kl_after": end.kl,
        }
        return metrics, end

    def _full_step(self, policy: Policy, parts: Sequence[Batch], objective: Objective, denominator: Tensor) -> Tensor | None:
        """√(2δ / xᵀHx) x with x = H⁻¹g: the longest step within δ if the KL were quadratic. None where there is none.   [n]"""
        constraint = self.constraint
        norm = torch.linalg.vector_norm(self.gradients)
        if norm == 0:
            return None
        matvec = damped_fisher(policy, parts, self.parameters, objective, denominator, constraint.damping)
        # The length of g has no say in that of the step; at length 1 a small one is not lost in the solver's tolerance.
        direction = conjugate_gradient(matvec, -self.gradients / norm, constraint.cg_iterations)
        curvature = direction @ matvec(direction)
        if not curvature > 0:
            return None
        return (2 * constraint.delta / curvature).sqrt() * direction

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a step does not depend on those before it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to continue."""


def _refuse_shared(policy: Policy, part: Batch, parameters: Sequence[nn.Parameter]) -> None:
    """Raise SurefootError where V depends on the policy's parameters: their gradient would be that of two losses."""
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


@torch.no_grad()
def judged(policy: Policy, parts: Sequence[Batch], objective: Objective, denominator: Tensor) -> SurrogateReport:
    """The policy on a whole batch as it is now, over all ranks."""
    sums: list[Tensor] = []
    extremes: list[Tensor] = []
    for part in parts:
        evaluation = policy(part.inputs, part.actions, part.mask)
        _, terms, ratio = loss(evaluation, part, objective, denominator=denominator)
        terms["kl_after"] = mean_old_kl(evaluation, part, objective, denominator)
        if objective.entropy_coefficient:
            mode, length = objective.aggregation, objective.aggregation_length
            terms["bonus"] = aggregate(keep_only(evaluation.entropy, part.mask), part.mask, mode, denominator, length)
        sums.append(torch.stack(list(terms.values())))
        extremes.append(torch.stack(ratio.aminmax()))
    found: dict[str, float] = dict(zip(terms, all_sum(torch.stack(sums).sum(0)).tolist(), strict=True))
    kl = found.pop("kl_after")
    gain = -found["policy_loss"] + objective.entropy_coefficient * found.pop("bonus", 0.0)
    if objective.reference_coefficient:
        gain -= objective.reference_coefficient * found["reference_loss"]
    return SurrogateReport(gain, kl, found, outermost(extremes))


def damped_fisher(
    policy: Policy,
    parts: Sequence[Batch],
    parameters: Sequence[nn.Parameter],
    objective: Objective,
    denominator: Tensor,
    damping: float,
) -> Callable[[Tensor], Tensor]:
    """v -> (H + damping·I) v, with H the Hessian at θ_old of the mean KL(π_old‖π_θ) over all parts and ranks.   [n] -> [n]

    Of a batch in one part the graph of the gradient is kept; that of several is made anew for each product, because bounded
    memory is what the parts are for.
    """

    def product(part: Batch) -> Callable[[Tensor], Tensor]:
        # Neither fused attention nor cuDNN's LSTM can be differentiated twice.
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            evaluation = policy(part.inputs, part.actions, part.mask)
        return fisher_vector_product(mean_old_kl(evaluation, part, objective, denominator), parameters, damping=0.0)

    kept = product(parts[0]) if len(parts) == 1 else None

    def matvec(v: Tensor) -> Tensor:
        products = [kept(v)] if kept else [product(part)(v) for part in parts]
        return all_sum(torch.stack(products).sum(0)) + damping * v

    return matvec
