"""What a policy gradient maximises, elementwise: ρÂ and its clipped, pessimistic form."""

from typing import Literal

import torch
from torch import Tensor

from surefoot.functional.masking import keep_only

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """ρ = π_θ(a|s) / π_old(a|s), formed as exp(log π_θ − log π_old).   [...]

    >>> importance_ratio(torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log())
    tensor([2.0000, 0.5000])
    """
    return (log_probs - old_log_probs).exp()


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """ρ = (π_θ(y|x) / π_old(y|x))^(1/|y|), the geometric mean of a response's ratios, at each of its tokens.   [..., T]

    mask   True at the tokens of the response; 1 elsewhere

    A mean of ρÂ over the tokens of a response is then ρÂ itself, and pushes all of them alike.
    Zheng et al. 2025 (GSPO, arXiv 2507.18071), equation 7.

    >>> sequence_ratio(torch.tensor([0.8, 0.5]).log(), torch.tensor([0.2, 0.5]).log())
    tensor([2., 2.])
    """
    log_ratio = keep_only(log_probs, mask) - keep_only(old_log_probs, mask)
    length = log_ratio.shape[-1] if mask is None else mask.bool().sum(-1, keepdim=True).to(log_ratio.dtype).clamp(min=1)
    return keep_only((log_ratio.sum(-1, keepdim=True) / length).expand_as(log_ratio), mask).exp()


def sampler_ratio(
    old_log_probs: Tensor, behaviour_log_probs: Tensor, mask: Tensor | None = None, *, sequence: bool = False
) -> Tensor:
    """π_old / π_b of each token, where π_b is the sampler's policy; or of the whole response, the product over its tokens.

    mask   True at the tokens of the response; 1 elsewhere   [..., T]

    >>> sampler_ratio(torch.tensor([0.4, 0.3]).log(), torch.tensor([0.2, 0.6]).log(), sequence=True)
    tensor([1., 1.])
    """
    log_ratio = keep_only(old_log_probs, mask) - keep_only(behaviour_log_probs, mask)
    if sequence:
        log_ratio = keep_only(log_ratio.sum(-1, keepdim=True).expand_as(log_ratio), mask)
    return log_ratio.exp()


def importance_weights(
    old_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    cap: float,
    mode: ImportanceMode = "token_truncate",
    mask: Tensor | None = None,
) -> Tensor:
    """Weights w that correct for samples of π_b instead of π_old: π_old / π_b, bounded by ``cap``.   [..., T]

    mode   of each token, or of the whole response: the product over its tokens; "truncate": at most the cap, "mask": 0 above

    A finite cap bounds the variance, and biases the mean towards π_b.
    Ionides 2008 (truncated importance sampling); masks as in TRL and verl.

    >>> old, sampler = torch.tensor([0.4, 0.3]).log(), torch.tensor([0.1, 0.6]).log()
    >>> importance_weights(old, sampler, cap=2.0)
    tensor([2.0000, 0.5000])
    >>> importance_weights(old, sampler, cap=2.0, mode="token_mask")
    tensor([0.0000, 0.5000])
    """
    ratio = sampler_ratio(old_log_probs, behaviour_log_probs, mask, sequence=mode.startswith("sequence"))
    return ratio.clamp(max=cap) if mode.endswith("truncate") else ratio.masked_fill(ratio > cap, 0)


def unclipped_surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    """ρÂ: the advantage under the new policy, estimated from the old one's samples.   [...]

    Schulman et al. 2015 (arXiv 1502.05477), equation 14.
    """
    return ratio * advantages


def weighted_surrogate(log_probs: Tensor, ratio: Tensor, advantages: Tensor, max_weight: float) -> Tensor:
    """sg(min(ρ, max_weight)) Â log π, where sg stops the gradient of the weight.   [...]

    The gradient is that of ρÂ where ρ is below ``max_weight``, and bounded, but never 0, above it.
    MiniMax 2025 (CISPO, arXiv 2506.13585), equations 4 and 5, without a lower bound of the weight, as there.

    >>> log_probs, ratio = torch.tensor([-1.0, -1.0]), torch.tensor([0.5, 8.0])
    >>> weighted_surrogate(log_probs, ratio, torch.tensor([1.0, 1.0]), max_weight=5.0)
    tensor([-0.5000, -5.0000])
    """
    return ratio.detach().clamp(max=max_weight) * advantages * log_probs


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip: float, clip_high: float | None = None, dual_clip: float | None = None
) -> Tensor:
    """min(ρÂ, clip(ρ, 1−ε, 1+ε_high) Â).   [...]

    clip       ε below 1, and above it too unless ``clip_high`` is given (clip-higher, arXiv 2503.14476)
    dual_clip  c > 1: where Â < 0 the result is at least cÂ (arXiv 1912.09729), which bounds the gradient of a ratio far above 1

    Schulman et al. 2017 (arXiv 1707.06347), equation 7.

    >>> ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> clipped_surrogate(ratio, advantages, clip=0.2)
    tensor([ 1.2000, -1.5000,  0.5000, -0.8000])
    """
    high = clip if clip_high is None else clip_high
    result = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + high) * advantages)
    if dual_clip is not None:
        result = torch.where(advantages < 0, torch.maximum(result, dual_clip * advantages), result)
    return result


def clip_active(
    ratio: Tensor, advantages: Tensor, clip: float, clip_high: float | None = None, dual_clip: float | None = None
) -> Tensor:
    """True where the clipped branch is used, so that no gradient flows.   [...] bool

    Not the same as :func:`ratio_outside`: a ratio outside the band on the *wrong* side keeps its gradient.

    >>> ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> clip_active(ratio, advantages, clip=0.2)
    tensor([ True, False, False,  True])
    """
    high = clip if clip_high is None else clip_high
    active = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - clip))
    if dual_clip is not None:
        active = active | ((advantages < 0) & (ratio > dual_clip))
    return active


def ratio_outside(ratio: Tensor, clip: float, clip_high: float | None = None) -> Tensor:
    """True where ρ is outside [1−ε, 1+ε_high], with or without a gradient.   [...] bool

    >>> ratio_outside(torch.tensor([0.5, 1.0, 1.5]), clip=0.2)
    tensor([ True, False,  True])
    """
    high = clip if clip_high is None else clip_high
    return (ratio < 1 - clip) | (ratio > 1 + high)
