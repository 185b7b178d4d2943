"""The loss that the switches add up to: L = −J + c_v·L_V − c_e·H + β_ref·KL(π_θ‖π_ref), with −β·KL(π_old‖π_θ) in J if asked,
and c_r·L_R for the routers of a mixture of experts.

A pure function of an evaluation and a batch: no state, no randomness, no data-dependent shape. Every term is elementwise
until ``aggregate`` reduces it with the global count, so that the parts of a split batch add up to the whole.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.core.algorithms import Objective
from surefoot.core.rollout import Evaluation, map_tensors
from surefoot.functional import (
    aggregate,
    clip_active,
    clipped_surrogate,
    importance_ratio,
    kl_k1,
    kl_k2,
    kl_k3,
    ratio_outside,
    sequence_ratio,
    unclipped_surrogate,
    value_loss,
)
from surefoot.functional.masking import keep_only


@dataclass(frozen=True)
class Batch:
    """What one loss reads: rows of a rollout with their credit. Single steps are [N], whole rows are [N, T]."""

    inputs: Any
    actions: Tensor
    mask: Tensor | None
    """None where every entry is kept"""
    old_log_probs: Tensor | None
    """None where θ is θ_old, so that ρ is 1"""
    advantages: Tensor
    """normalised as the objective says"""
    returns: Tensor
    old_values: Tensor
    old_distribution: Any = None
    ref_log_probs: Tensor | None = None
    flat_index: Tensor | None = None
    """b·T + t of each entry in its rollout [B, T]; None if no trace is recorded"""


def ratio_of(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None, objective: Objective) -> Tensor:
    """ρ, of each action or of each whole row, as the objective says.   [...]"""
    if objective.ratio == "sequence":
        return sequence_ratio(log_probs, old_log_probs, mask)
    return importance_ratio(log_probs, old_log_probs)


def surrogate(log_probs: Tensor, ratio: Tensor, advantages: Tensor, objective: Objective, clip_scale: float = 1.0) -> Tensor:
    """What is maximised, elementwise.   [...]

    Where θ is θ_old throughout, ρ is 1 and log π·Â has the same gradient; that is how REINFORCE is written.
    ``clip_scale`` shrinks the clip's bounds, for schedules.
    """
    if not objective.leaves_old_policy:
        return log_probs * advantages
    if objective.clip is None:
        return unclipped_surrogate(ratio, advantages)
    return clipped_surrogate(ratio, advantages, *clip_bounds(objective, clip_scale))


def clip_bounds(objective: Objective, scale: float = 1.0) -> tuple[float, float, float | None]:
    """(ε below, ε above, dual clip); 0.2 both ways where nothing clips, so that ``ratio_outside`` still means something."""
    if objective.clip is None:
        return 0.2, 0.2, None
    high = objective.clip.clip if objective.clip.clip_high is None else objective.clip.clip_high
    return objective.clip.clip * scale, high * scale, objective.clip.dual_clip


def reference_kl(log_probs: Tensor, ratio: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """KL(π_θ‖π_ref) as a loss, elementwise, by the named estimator; ``ratio`` is that of each token.   [...]"""
    if estimator == "ratio_k3":  # ρ differentiable: the gradient is that of KL(π_θ‖π_ref), also off-policy
        return ratio * kl_k3(log_probs, ref_log_probs)
    return {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[estimator](log_probs, ref_log_probs)


def old_kl(evaluation: Evaluation, batch: Batch) -> Tensor:
    """KL(π_old‖π_θ), elementwise: exact where both distributions are known, else ρ − 1 − log ρ on the samples of π_old.   [...]

    The sampled form is k3: unbiased, never negative, and with the gradient of the KL in expectation, also away from θ_old.
    """
    if evaluation.distribution is None or batch.old_distribution is None:
        assert batch.old_log_probs is not None, "a KL to θ_old needs a rollout with old_log_probs"
        return kl_k3(keep_only(batch.old_log_probs, batch.mask), keep_only(evaluation.log_probs, batch.mask))
    return keep_only(_old_distribution(evaluation, batch).kl(evaluation.distribution), batch.mask)


def _old_distribution(evaluation: Evaluation, batch: Batch) -> Any:
    """π_old where kept. Elsewhere its parameters may be NaN, so there it is π_θ itself, which is in any case a distribution."""
    if batch.mask is None:
        return batch.old_distribution
    new: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        new.append(x.detach())
        return x

    def overlaid(x: Tensor) -> Tensor:
        return torch.where(mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim())), x, new.pop(0))

    mask = batch.mask.bool()
    map_tensors(note, evaluation.distribution)
    return map_tensors(overlaid, batch.old_distribution)


def mean_old_kl(evaluation: Evaluation, batch: Batch, objective: Objective, denominator: Tensor | float) -> Tensor:
    """The mean of ``old_kl`` as the objective aggregates: what a penalty weighs and a constraint bounds.   []"""
    mode, length = objective.aggregation, objective.aggregation_length
    return aggregate(old_kl(evaluation, batch), batch.mask, mode, denominator, length)


def loss(
    evaluation: Evaluation,
    batch: Batch,
    objective: Objective,
    *,
    denominator: Tensor | float,
    clip_scale: float = 1.0,
    beta: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The scalar to minimise, its parts and companions as metrics (detached), and ρ (detached; 1 where not kept).

    ``denominator`` is the global count that ``aggregate`` divides by. Loss and metrics alike are sums over it, so those of
    micro-batches and ranks add up to the whole batch's. ``beta`` is the weight of a KL penalty at this moment.

    Terms of the loss are reduced as the loss is. Entropy, KL and the shares beside them are means whatever the aggregation,
    over tokens or over responses' own means, so that they can be read and compared.
    """

    def kept(x: Tensor) -> Tensor:  # before any arithmetic: what is not kept may be NaN, in the gradient too
        return keep_only(x, batch.mask)

    def mean(x: Tensor) -> Tensor:
        return aggregate(x, batch.mask, objective.aggregation, denominator, objective.aggregation_length)

    def averaged(x: Tensor) -> Tensor:  # sums of responses have the same denominator as means of responses' means
        mode = "token-mean" if objective.aggregation == "token-mean" else "sequence-mean"
        return aggregate(x, batch.mask, mode, denominator)  # type: ignore[arg-type]

    log_probs = kept(evaluation.log_probs)
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else kept(batch.old_log_probs)
    ratio = ratio_of(log_probs, old_log_probs, batch.mask, objective)
    gain = surrogate(log_probs, ratio, kept(batch.advantages), objective, clip_scale)
    entropy = kept(evaluation.entropy)
    terms = {"policy_loss": -mean(gain), "entropy": averaged(entropy)}
    total = terms["policy_loss"]
    if objective.penalty is not None:
        terms["penalty_kl"] = mean_old_kl(evaluation, batch, objective, denominator)
        total = total + beta * terms["penalty_kl"]
    if objective.entropy_coefficient:
        total = total - objective.entropy_coefficient * mean(entropy)
    if objective.baseline == "critic":
        assert evaluation.values is not None, "a critic's objective needs a policy with values"
        error = value_loss(kept(evaluation.values), kept(batch.returns), kept(batch.old_values), objective.value_clip)
        terms["value_loss"] = mean(error)
        total = total + objective.value_coefficient * terms["value_loss"]
    if objective.reference_coefficient:
        assert batch.ref_log_probs is not None, "reference_coefficient needs a rollout with ref_log_probs"
        of_token = ratio if objective.ratio == "token" else importance_ratio(log_probs, old_log_probs)
        kl = reference_kl(log_probs, of_token, kept(batch.ref_log_probs), objective.reference_estimator)
        terms["reference_loss"] = mean(kl)
        total = total + objective.reference_coefficient * terms["reference_loss"]
    if objective.router_coefficient:
        assert evaluation.router_loss is not None, "router_coefficient needs a policy that tells its routers' loss"
        terms["router_loss"] = evaluation.router_loss
        total = total + objective.router_coefficient * terms["router_loss"]
    with torch.no_grad():
        if batch.old_log_probs is None:
            return total, {name: term.detach() for name, term in terms.items()}, ratio.detach()
        low, high, dual_clip = clip_bounds(objective, clip_scale)
        terms["kl"] = averaged(kl_k3(old_log_probs, log_probs))
        terms["ratio_outside"] = averaged(ratio_outside(ratio, low, high).to(ratio.dtype))
        if objective.clip is not None:
            terms["clip_active"] = averaged(clip_active(ratio, batch.advantages, low, high, dual_clip).to(ratio.dtype))
        known = evaluation.distribution is not None and batch.old_distribution is not None
        if objective.kl_estimator == "exact" and known:
            terms["kl_exact"] = averaged(batch.old_distribution.kl(evaluation.distribution))
    return total, {name: term.detach() for name, term in terms.items()}, ratio.detach()


def ratio_range(extremes: list[Tensor]) -> tuple[float, float]:
    """The smallest and the largest ratio of several parts.   each [2]: smallest, largest"""
    if len(extremes) == 1:
        smallest, largest = extremes[0].tolist()
    else:
        both = torch.stack(extremes)
        smallest, largest = torch.stack([both[:, 0].amin(), both[:, 1].amax()]).tolist()
    return smallest, largest
