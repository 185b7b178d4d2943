"""The loss of an objective: L = −J + β·KL(π_old‖π_θ) + c_v·L_V − c_e·H + β_ref·KL(π_θ‖π_ref) + c_r·L_R.

L_R is the load-balancing loss of a mixture of experts. The loss is a pure function of an evaluation and a batch: no state, no
randomness, no data-dependent shape. Every term is elementwise until ``aggregate`` reduces it with the global count, so the
losses of micro-batches and ranks add up to that of the whole batch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.core.algorithms import Objective
from surefoot.core.rollout import Evaluation, map_tensors, tensors_in
from surefoot.functional import (
    Aggregation,
    aggregate,
    clip_active,
    clipped_surrogate,
    importance_ratio,
    importance_weights,
    kl_k1,
    kl_k2,
    kl_k3,
    ratio_outside,
    sampler_ratio,
    sequence_ratio,
    unclipped_surrogate,
    value_loss,
    weighted_surrogate,
)
from surefoot.functional.masking import keep_only


@dataclass(frozen=True)
class Batch:
    """What the loss reads: rows of a rollout with their credit. Single steps are [N], whole rows are [N, T]."""

    inputs: Any
    actions: Tensor
    mask: Tensor | None
    """None if every entry is kept"""
    old_log_probs: Tensor | None
    """None if θ is θ_old, so that ρ is 1"""
    advantages: Tensor
    """normalised if ``normalise_advantages`` is set"""
    returns: Tensor
    old_values: Tensor
    old_distribution: Any = None
    ref_log_probs: Tensor | None = None
    behaviour_log_probs: Tensor | None = None
    """None if the sampler's policy is θ_old"""
    penalised: Tensor | None = None
    """True at the samples that a KL penalty applies to; None if it applies to all"""
    flat_index: Tensor | None = None
    """b·T + t of each entry in its rollout [B, T]; None if no trace is recorded"""


class Loss(NamedTuple):
    """The loss of a batch and its parts, all detached but ``total``."""

    total: Tensor
    """the scalar to minimise   []"""
    terms: dict[str, Tensor]
    """what the total is made of; not finite if one of them is not   each []"""
    metrics: dict[str, Tensor]
    """what the total does not depend on   each []"""
    ratio: Tensor
    """ρ; 1 where not kept"""


def ratio_of(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None, objective: Objective) -> Tensor:
    """ρ of each action, or of each whole row if ``objective.ratio`` is "sequence".   [...]"""
    if objective.ratio == "sequence":
        return sequence_ratio(log_probs, old_log_probs, mask)
    return importance_ratio(log_probs, old_log_probs)


def surrogate(log_probs: Tensor, ratio: Tensor, advantages: Tensor, objective: Objective, clip_scale: float = 1.0) -> Tensor:
    """The maximised term, elementwise.   [...]

    With one update per batch θ is θ_old and ρ is 1; log π·Â then has the same gradient, as in REINFORCE.
    ``clip_scale`` multiplies the clip's bounds, for schedules. ``left_out`` responses are not part of it.
    """
    if not objective.leaves_old_policy:
        return log_probs * advantages
    if objective.max_weight is not None:
        return weighted_surrogate(log_probs, ratio, advantages, objective.max_weight)
    if objective.clip is None:
        return unclipped_surrogate(ratio, advantages)
    return clipped_surrogate(ratio, advantages, *clip_bounds(objective, clip_scale))


def left_out(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor | None, objective: Objective) -> Tensor:
    """True at the responses with a negative advantage from which θ has moved further than ``drop_above_kl``.   [..., T] bool"""
    moved = sequence_ratio(old_log_probs, log_probs, mask).detach().log()  # the mean of log π_old − log π_θ
    return (advantages < 0) & (moved > (torch.inf if objective.drop_above_kl is None else objective.drop_above_kl))


def sampler_weights(batch: Batch, objective: Objective) -> Tensor | None:
    """The importance weights of ``objective.importance_cap``; None without a cap, and for samples of π_old.   [..., T]"""
    if objective.importance_cap is None or batch.behaviour_log_probs is None:
        return None
    assert batch.old_log_probs is not None, "weights against the sampler need a rollout with old_log_probs"
    both = (batch.old_log_probs, batch.behaviour_log_probs)
    return importance_weights(*both, objective.importance_cap, objective.importance_mode, batch.mask)


def clip_bounds(objective: Objective, scale: float = 1.0) -> tuple[float, float, float | None]:
    """(ε below 1, ε above 1, dual clip). Without a clip, ε is 0.2: only the metric ``ratio_outside`` uses it."""
    if objective.clip is None:
        return 0.2, 0.2, None
    high = objective.clip.clip if objective.clip.clip_high is None else objective.clip.clip_high
    return objective.clip.clip * scale, high * scale, objective.clip.dual_clip


def reference_kl(log_probs: Tensor, ratio: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """KL(π_θ‖π_ref) as a loss, elementwise, by the named estimator; ``ratio`` is per token.   [...]"""
    if estimator == "ratio_k3":  # ρ differentiable: the gradient is that of KL(π_θ‖π_ref), also off-policy
        return ratio * kl_k3(log_probs, ref_log_probs)
    return {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[estimator](log_probs, ref_log_probs)


def old_kl(evaluation: Evaluation, batch: Batch) -> Tensor:
    """KL(π_old‖π_θ), elementwise: exact if both distributions are known, else ρ − 1 − log ρ on the samples of π_old.   [...]

    The sampled form is k3: unbiased, never negative, and with the gradient of the KL in expectation, also away from θ_old.
    """
    if evaluation.distribution is None or batch.old_distribution is None:
        assert batch.old_log_probs is not None, "a KL to θ_old needs a rollout with old_log_probs"
        return kl_k3(keep_only(batch.old_log_probs, batch.mask), keep_only(evaluation.log_probs, batch.mask))
    return keep_only(_old_distribution(evaluation, batch).kl(evaluation.distribution), batch.mask)


def _old_distribution(evaluation: Evaluation, batch: Batch) -> Any:
    """π_old where kept, and π_θ elsewhere, because the parameters of π_old may be NaN there."""
    if batch.mask is None:
        return batch.old_distribution
    mask, new = batch.mask.bool(), iter(tensors_in(evaluation.distribution))

    def kept(x: Tensor) -> Tensor:
        return torch.where(mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim())), x, next(new).detach())

    return map_tensors(kept, batch.old_distribution)


def mean_old_kl(evaluation: Evaluation, batch: Batch, objective: Objective, denominator: Tensor | float) -> Tensor:
    """``old_kl`` of the penalised samples, aggregated as the loss is: the KL of a penalty or a constraint.   []"""
    mode, length = objective.aggregation, objective.aggregation_length
    kl = keep_only(old_kl(evaluation, batch), batch.penalised)
    return aggregate(kl, batch.mask, mode, denominator, length)


def further_sums(evaluation: Evaluation, batch: Batch, objective: Objective, denominator: Tensor) -> dict[str, Tensor]:
    """What a line search reads besides the loss: mean KL(π_old‖π_θ), and the entropy bonus if there is one.   each []"""
    further = {"kl_after": mean_old_kl(evaluation, batch, objective, denominator)}
    if objective.entropy_coefficient:
        mode, length = objective.aggregation, objective.aggregation_length
        further["bonus"] = aggregate(keep_only(evaluation.entropy, batch.mask), batch.mask, mode, denominator, length)
    return further


def loss(
    evaluation: Evaluation,
    batch: Batch,
    objective: Objective,
    *,
    denominator: Tensor | float,
    clip_scale: float = 1.0,
    beta: float = 0.0,
) -> Loss:
    """The loss of a batch, with its terms and metrics.

    denominator   the global count that ``aggregate`` divides by
    clip_scale    multiplies the clip's bounds
    beta          the present weight of the KL penalty

    Terms of the loss are reduced as the objective says. Entropy, KL and shares are always means, over tokens or over means of
    responses, so that they can be compared.
    """

    # long because every term of the sum is a paragraph, in the order of docs/math.md
    def kept(x: Tensor) -> Tensor:  # before any arithmetic: what is not kept may be NaN, in the gradient too
        return keep_only(x, batch.mask)

    def reduced(x: Tensor) -> Tensor:
        return aggregate(x, batch.mask, objective.aggregation, denominator, objective.aggregation_length)

    log_probs = kept(evaluation.log_probs)
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else kept(batch.old_log_probs)
    ratio = ratio_of(log_probs, old_log_probs, batch.mask, objective)
    advantages, entropy = kept(batch.advantages), kept(evaluation.entropy)
    gain = surrogate(log_probs, ratio, advantages, objective, clip_scale)
    if objective.drop_above_kl is not None:
        gain = gain.masked_fill(left_out(log_probs, old_log_probs, advantages, batch.mask, objective), 0)
    weights = sampler_weights(batch, objective)
    total = -reduced(gain if weights is None else gain * weights)
    terms, metrics = {"policy_loss": total}, dict[str, Tensor]()
    if objective.penalty is not None:
        terms["penalty_kl"] = mean_old_kl(evaluation, batch, objective, denominator)
        total = total + beta * terms["penalty_kl"]
    (terms if objective.entropy_coefficient else metrics)["entropy"] = _mean(entropy, batch, objective, denominator)
    if objective.entropy_coefficient:
        total = total - objective.entropy_coefficient * reduced(entropy)
    if objective.baseline == "critic":
        assert evaluation.values is not None, "a critic's objective needs a policy with values"
        error = value_loss(kept(evaluation.values), kept(batch.returns), kept(batch.old_values), objective.value_clip)
        terms["value_loss"] = reduced(error)
        total = total + objective.value_coefficient * terms["value_loss"]
    if objective.reference_coefficient:
        assert batch.ref_log_probs is not None, "reference_coefficient needs a rollout with ref_log_probs"
        of_token = ratio if objective.ratio == "token" else importance_ratio(log_probs, old_log_probs)
        kl = reference_kl(log_probs, of_token, kept(batch.ref_log_probs), objective.reference_estimator)
        terms["reference_loss"] = reduced(kl)
        total = total + objective.reference_coefficient * terms["reference_loss"]
    if objective.router_coefficient:
        assert evaluation.router_loss is not None, "router_coefficient needs a policy that returns router_loss"
        terms["router_loss"] = evaluation.router_loss
        total = total + objective.router_coefficient * terms["router_loss"]
    with torch.no_grad():
        if batch.old_log_probs is not None or objective.reuse is not None:
            metrics |= _old_policy_metrics(
                evaluation, batch, objective, denominator, log_probs, old_log_probs, ratio, clip_scale
            )
        if weights is not None:
            metrics |= _sampler_metrics(weights, batch, objective, denominator)
    terms, metrics = ({name: x.detach() for name, x in of.items()} for of in (terms, metrics))
    return Loss(total, terms, metrics, ratio.detach())


def _old_policy_metrics(
    evaluation: Evaluation,
    batch: Batch,
    objective: Objective,
    denominator: Tensor | float,
    log_probs: Tensor,
    old_log_probs: Tensor,
    ratio: Tensor,
    clip_scale: float,
) -> dict[str, Tensor]:
    """How far θ is from θ_old: KL and shares of ratios, as means.   each []"""

    def mean(x: Tensor) -> Tensor:
        return _mean(x, batch, objective, denominator)

    low, high, dual_clip = clip_bounds(objective, clip_scale)
    metrics = {"kl": mean(kl_k3(old_log_probs, log_probs))}
    metrics["ratio_outside"] = mean(ratio_outside(ratio, low, high).to(ratio.dtype))
    if objective.clip is not None:
        metrics["clip_active"] = mean(clip_active(ratio, batch.advantages, low, high, dual_clip).to(ratio.dtype))
    if objective.max_weight is not None:
        metrics["weight_clipped"] = mean((ratio > objective.max_weight).to(ratio.dtype))
    if objective.drop_above_kl is not None:
        dropped = left_out(log_probs, old_log_probs, keep_only(batch.advantages, batch.mask), batch.mask, objective)
        metrics["left_out"] = mean(dropped.to(ratio.dtype))
    exact = evaluation.distribution is not None and batch.old_distribution is not None
    if objective.kl_estimator == "exact" and exact:
        metrics["kl_exact"] = mean(batch.old_distribution.kl(evaluation.distribution))
    return metrics


def _sampler_metrics(weights: Tensor, batch: Batch, objective: Objective, denominator: Tensor | float) -> dict[str, Tensor]:
    """Mean importance weight, and the share of samples that the cap changes.   each []"""
    assert batch.old_log_probs is not None
    assert batch.behaviour_log_probs is not None
    assert objective.importance_cap is not None
    sequence = objective.importance_mode.startswith("sequence")
    ratio = sampler_ratio(batch.old_log_probs, batch.behaviour_log_probs, batch.mask, sequence=sequence)
    capped = (ratio > objective.importance_cap).to(weights.dtype)
    means = {"importance_weight": weights, "importance_capped": capped}
    return {name: _mean(x, batch, objective, denominator) for name, x in means.items()}


def _mean(x: Tensor, batch: Batch, objective: Objective, denominator: Tensor | float) -> Tensor:
    """A mean whatever the aggregation.   []

    Every aggregation but token-mean divides by the number of responses, so report sequence-mean.
    """
    mode: Aggregation = "token-mean" if objective.aggregation == "token-mean" else "sequence-mean"
    return aggregate(x, batch.mask, mode, denominator)


def ratio_range(extremes: list[Tensor]) -> tuple[float, float]:
    """The smallest and the largest ratio of several parts.   each [2]: smallest, largest"""
    both = torch.stack(extremes)
    smallest, largest = torch.stack([both[:, 0].amin(), both[:, 1].amax()]).tolist()
    return smallest, largest
