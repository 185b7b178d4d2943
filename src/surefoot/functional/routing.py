"""The load of experts in a mixture: how evenly a router spreads tokens over them (Fedus et al. 2021, arXiv 2101.03961)."""

import torch
from torch import Tensor


def expert_load(router_logits: Tensor, chosen: int, mask: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the kept tokens each expert gets, and the sum of the router's probabilities for it.   -> [E], [E]

    router_logits  [N, E]; float32 or better, because counts are exact only there
    chosen         experts per token
    mask           [N] True at real tokens

    The counts have no gradient.
    """
    kept = mask.bool().unsqueeze(-1)
    probabilities = router_logits.where(kept, 0).softmax(-1).where(kept, 0)
    selected = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(chosen, dim=-1).indices, 1.0)
    return selected.where(kept, 0).sum(0), probabilities.sum(0)


def load_balance(counts: Tensor, probabilities: Tensor, tokens: Tensor) -> Tensor:
    """E · Σ_e f_e·P_e, with f_e = counts / tokens and P_e = probabilities / tokens.   [E], [E], [] -> []

    It equals ``chosen`` if all experts get the same share of tokens, and grows with the imbalance. Linear in the
    probabilities, so micro-batches with the counts of all tokens add up. (Fedus et al., equations 4 to 6.)
    """
    return len(counts) * (counts / tokens * probabilities / tokens).sum()
