"""Log-probability and entropy of a choice among n, from logits. Temperature divides logits, everywhere alike."""

import torch
from torch import Tensor


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log π(token) with π = softmax(logits / temperature).   [..., n], [...] integer -> [...]"""
    return (logits / temperature).log_softmax(-1).gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """−Σ π log π in nats, with π = softmax(logits / temperature); a logit of −inf counts nothing.   [..., n] -> [...]"""
    log_probs = (logits / temperature).log_softmax(-1)
    possible = log_probs > -torch.inf
    return -(log_probs.exp() * torch.where(possible, log_probs, torch.zeros_like(log_probs))).sum(-1)
