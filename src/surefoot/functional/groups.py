"""Baselines from a group of answers to one prompt: what GRPO and RLOO use in place of a critic."""

import torch
from torch import Tensor

from surefoot.functional.masking import keep_only


def group_advantages(
    rewards: Tensor, mask: Tensor | None = None, scale: bool = True, ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """(r − mean) / (std + eps) within each group.   [prompts, samples]

    scale  False only centres (Dr. GRPO, arXiv 2503.20783)
    ddof   0 divides the variance by n, 1 by n − 1 (GRPO, arXiv 2402.03300, as implemented)
    mask   True where a sample counts; the others get 0. A group of one gets 0.

    >>> group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), scale=False)
    tensor([[ 0.5000, -0.5000, -0.5000,  0.5000]])
    """
    keep = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    count = keep.sum(-1, keepdim=True).to(rewards.dtype)
    kept = keep_only(rewards, keep)
    centred = keep_only(kept - kept.sum(-1, keepdim=True) / count.clamp(min=1), keep)
    # A second pass removes the rounding of the first: a group of equal rewards is exactly 0, not rounding error over eps.
    centred = keep_only(centred - centred.sum(-1, keepdim=True) / count.clamp(min=1), keep)
    if not scale:
        return centred
    var = centred.square().sum(-1, keepdim=True) / (count - ddof).clamp(min=1)
    return centred / (var.sqrt() + eps)


def leave_one_out_advantages(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """r_i − mean of the other samples of its group.   [prompts, samples]

    RLOO (Kool et al. 2019; arXiv 2402.14740). Masked samples get 0; a group of one gets 0.

    >>> leave_one_out_advantages(torch.tensor([[3.0, 0.0, 0.0]]))
    tensor([[ 3.0000, -1.5000, -1.5000]])
    """
    keep = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    count = keep.sum(-1, keepdim=True).to(rewards.dtype)
    kept = keep_only(rewards, keep)
    others = (kept.sum(-1, keepdim=True) - kept) / (count - 1).clamp(min=1)
    return torch.where(keep & (count > 1), kept - others, torch.zeros_like(kept))
