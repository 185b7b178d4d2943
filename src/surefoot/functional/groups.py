"""Advantages from a group of answers to one prompt: what GRPO, RLOO and online DPO use in place of a critic."""

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


def pair_advantages(rewards: Tensor, log_ratios: Tensor, beta: float, mask: Tensor | None = None) -> Tensor:
    """nβσ(−β(h_c − h_r)) at the best of n samples, minus that at the worst, 0 at the others.   [prompts, samples]

    log_ratios  h = log π − log π_ref of whole responses
    mask        True where a sample counts. A group without two different rewards gets 0

    The gradient of the mean of Â log π is then minus that of the mean ``dpo_loss`` of the best against the worst.
    Guo et al. 2024 (online DPO, arXiv 2402.04792); Rafailov et al. 2023 (arXiv 2305.18290), section 4.

    >>> pair_advantages(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([[-1.0, 2.0], [0.5, 0.0]]), beta=0.5)
    tensor([[-0.1824,  0.1824],
            [ 0.0000,  0.0000]])
    """
    keep = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    kept, ratios = keep_only(rewards, keep), keep_only(log_ratios, keep)
    best, worst = (kept.masked_fill(~keep, bound) for bound in (-torch.inf, torch.inf))
    chosen, rejected = best.argmax(-1, keepdim=True), worst.argmin(-1, keepdim=True)
    differ = best.gather(-1, chosen) > worst.gather(-1, rejected)
    wrong = torch.sigmoid(-beta * (ratios.gather(-1, chosen) - ratios.gather(-1, rejected)))
    weight = torch.where(differ, keep.sum(-1, keepdim=True).to(wrong.dtype) * beta * wrong, torch.zeros_like(wrong))
    return torch.zeros_like(ratios).scatter_add(-1, chosen, weight).scatter_add(-1, rejected, -weight)
