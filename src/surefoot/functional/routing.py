"""The load of experts in a mixture: how evenly a router spreads tokens over them (Fedus et al. 2021, arXiv 2101.03961)."""

import torch
from torch import Tensor


def expert_load(router_logits: Tensor, chosen: int, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Of the kept tokens, how many are sent to each expert, and the sum of the probabilities that the router gives it.

    router_logits  [N, E]
    chosen         experts per token
    kept           [N] True at real tokens

    The counts have no gradient.   -> [E], [E]
    """
    probabilities = router_logits.float().softmax(-1) * kept.unsqueeze(-1)
    picked = router_logits.float().softmax(-1).topk(chosen, dim=-1).indices.flatten()
    counts = torch.zeros_like(probabilities[0]).scatter_add(0, picked, kept.float().repeat_interleave(chosen))
    return counts, probabilities.sum(0)


def load_balance(counts: Tensor, probabilities: Tensor, tokens: Tensor) -> Tensor:
    """E · Σ_e f_e·P_e, with f_e = counts / tokens and P_e = probabilities / tokens.   [E], [E], [] -> []

    It is ``chosen`` where all experts get alike, and more where those are likelier that get more. It is linear in the
    probabilities: those of a part of the tokens, with the counts of all of them, give that part's share of the whole. (Fedus
    et al., equations 4 to 6.)
    """
    return len(counts) * (counts / tokens * probabilities / tokens).sum()
