"""Kullback-Leibler divergence: estimates from samples, exact values from parameters, two rules that adapt its weight, and the
choice of the samples that it is limited to.
"""

from typing import TypeVar

import torch
from torch import Tensor

from surefoot.functional.masking import keep_only, masked_mean

Number = TypeVar("Number", float, Tensor)


def kl_k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log p − log q: unbiased estimate of KL(p‖q) from samples of p, of either sign.   [...]

    As a loss on p's own samples its expected gradient is zero; in a reward it is right.
    Names and properties of k1, k2 and k3: J. Schulman, "Approximating KL Divergence" (2020).

    >>> kl_k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
    tensor([ 0.5000, -1.0000])
    """
    return log_p - log_q


def kl_k2(log_p: Tensor, log_q: Tensor) -> Tensor:
    """½ (log p − log q)²: biased but never negative; as a loss on samples of p its gradient is that of KL(p‖q).   [...]"""
    return (log_p - log_q).square() / 2


def kl_k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """eˣ − 1 − x with x = log q − log p: unbiased and never negative as a metric.   [...]

    As a loss on p's own samples it gives the gradient of KL(q‖p), the other direction.

    >>> kl_k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]))
    tensor([0.0000, 0.7183])
    """
    x = log_q - log_p
    return torch.expm1(x) - x


def categorical_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p‖q) of categorical distributions from logits.   [..., n] -> [...]

    A logit of −inf means probability zero; where p is zero the term is zero.

    >>> categorical_kl(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log())
    tensor(0.1438)
    """
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    possible = log_p > -torch.inf
    # Both factors are made finite before they meet: inf − inf and 0 · inf would be NaN, in the gradient too.
    gap = torch.where(possible, log_p, torch.zeros_like(log_p)) - torch.where(possible, log_q, torch.zeros_like(log_q))
    return (log_p.exp() * gap).sum(-1)


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> Tensor:
    """KL(p‖q) of diagonal Gaussians, summed over the last axis.   [..., d] -> [...]"""
    ratio = (2 * (log_std_p - log_std_q)).exp()
    distance = ((mean_p - mean_q) * (-log_std_q).exp()).square()
    return (log_std_q - log_std_p + (ratio + distance - 1) / 2).sum(-1)


def covariance_terms(log_probs: Tensor, advantages: Tensor, mask: Tensor | None = None) -> Tensor:
    """(log π − mean log π)(Â − mean Â) of each sample; their mean is the covariance. 0 where not kept.   [...]

    Samples with large terms are those that make the policy less random: likely actions with a high advantage.
    Cui et al. 2025 (arXiv 2505.22617), equation 10.

    >>> covariance_terms(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 0.0, -1.0]))
    tensor([1., 0., 1.])
    """
    centred = [keep_only(x, mask) - masked_mean(x, mask) for x in (log_probs, advantages)]
    return keep_only(centred[0] * centred[1], mask)


def largest_share(x: Tensor, fraction: float) -> Tensor:
    """True at the entries whose rank is at most ``fraction`` · their number.   [...] bool

    The rank of an entry is the number of entries that are at least as large, so equal entries are chosen together or not at
    all, and their order does not matter. Cui et al. 2025 (KL-Cov, arXiv 2505.22617), equation 12.

    >>> largest_share(torch.tensor([3.0, 1.0, 2.0, 2.0]), fraction=0.5)
    tensor([ True, False, False, False])
    """
    rank = x.numel() - torch.searchsorted(x.flatten().sort().values, x.contiguous())
    return rank <= int(fraction * x.numel() + 1e-6)  # 0.29 · 100 is 28.999999999999996


def adapt_kl_penalty(beta: Number, kl: Number, target: float) -> Number:
    """β/2 where kl < target/1.5, 2β where kl > 1.5·target, else β. Once per batch, with kl measured over the whole batch.

    Schulman et al. 2017 (arXiv 1707.06347), section 4.

    >>> [adapt_kl_penalty(1.0, kl, target=0.01) for kl in (0.001, 0.01, 0.1)]
    [0.5, 1.0, 2.0]
    """
    if isinstance(kl, Tensor):
        factor = torch.where(kl < target / 1.5, 0.5, torch.where(kl > target * 1.5, 2.0, 1.0))
        return beta * factor.to(kl.dtype)
    return beta / 2 if kl < target / 1.5 else beta * 2 if kl > target * 1.5 else beta


def adapt_learning_rate(rate: float, kl: float, target: float) -> float:
    """rate/1.5 where kl > 2·target, 1.5·rate where 0 < kl < target/2, else rate; from 1e-5 to 1e-2. Once per minibatch.

    kl   KL(π_old‖π_θ) before the step

    The rule of rsl_rl (Schwarke et al. 2025, arXiv 2509.10771).

    >>> [adapt_learning_rate(1e-3, kl, target=0.01) for kl in (0.0, 0.01, 0.03)]
    [0.001, 0.001, 0.0006666666666666666]
    """
    if kl > 2 * target:
        return max(1e-5, rate / 1.5)
    return min(1e-2, rate * 1.5) if 0 < kl < target / 2 else rate


def proportional_kl_control(beta: Number, kl: Number, target: float, n: int, horizon: int) -> Number:
    """β (1 + clip(kl/target − 1, ±0.2) · n / horizon), for n samples seen since the last call.

    ``kl`` is the mean over responses of the sum over tokens of k1. Ziegler et al. 2019 (arXiv 1909.08593), section 2.2,
    as in the authors' code (gain 1 and a horizon where the paper has 0.1).
    """
    if isinstance(kl, Tensor):
        error = (kl / target - 1).clamp(-0.2, 0.2)
        return beta * (1 + error * (n / horizon))
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * (n / horizon))
