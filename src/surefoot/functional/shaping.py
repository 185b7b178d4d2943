"""Turning a score and a reference into per-token rewards."""

import torch
from torch import Tensor

from surefoot.functional.kl import kl_k1
from surefoot.functional.masking import keep_only, last_kept


def place_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """A score per response, put on its last kept token; 0 elsewhere.   [B], [B, T] -> [B, T]

    A response with no kept token gets no score.

    >>> place_scores(torch.tensor([5.0]), torch.tensor([[True, True, False]]))
    tensor([[0., 5., 0.]])
    """
    return torch.where(last_kept(mask), scores.unsqueeze(-1), torch.zeros((), dtype=scores.dtype, device=scores.device))


def overlong_penalty(lengths: Tensor, longest: int, buffer: float) -> Tensor:
    """0 up to longest − buffer tokens, from there down in a straight line to −1 at ``longest``, and no further.   [B]

    lengths   tokens of each response
    longest   L_max, the longest response allowed
    buffer    L_cache, the last tokens below it, over which the penalty grows

    Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13.
    """
    counted = lengths if lengths.is_floating_point() else lengths.to(torch.get_default_dtype())
    return -((counted - (longest - buffer)) / buffer).clamp(0, 1)


def kl_shaped_rewards(rewards: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, beta: float | Tensor) -> Tensor:
    """r − β (log π − log π_ref), detached, on every kept token; 0 elsewhere.   [B, T]

    Ziegler et al. 2019 (arXiv 1909.08593), equation 2.
    """
    penalty = kl_k1(keep_only(log_probs, mask), keep_only(ref_log_probs, mask)).detach()
    return keep_only(rewards, mask) - beta * penalty
