"""Log-probability and entropy of a choice among n, from logits. Temperature divides logits, everywhere alike."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log π(token) with π = softmax(logits / temperature).   [..., n], [...] integer -> [...]

    >>> token_log_probs(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([1])).exp()
    tensor([0.7500])
    """
    return _of_tokens((logits / temperature).log_softmax(-1), tokens)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """−Σ π log π in nats, with π = softmax(logits / temperature); a logit of −inf counts nothing.   [..., n] -> [...]"""
    return _entropy((logits / temperature).log_softmax(-1))


def chunked_likelihood(
    hidden: Tensor, tokens: Tensor, head: Callable[[Tensor], Tensor], temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """``token_log_probs`` and ``token_entropy`` of ``head(hidden)``, with the logits of ``chunk`` rows at a time.

    hidden  what the head reads   [N, width]
    tokens  [N] integer
    head    [rows, width] -> logits [rows, n], each row by itself; gradient reaches whatever it uses

    Returns two [N]. The logits of a chunk are dropped after the forward pass and computed again in the backward pass, so
    that neither holds more than one chunk. Half-precision logits are converted to float32 first.
    """

    def of(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        log_probs = (logits / temperature).log_softmax(-1)
        return _of_tokens(log_probs, tokens), _entropy(log_probs)

    if len(hidden) <= chunk:  # one chunk is what may be held: nothing to gain from computing it again
        return of(hidden, tokens)
    parts = [
        checkpoint(of, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(torch.split(hidden, chunk), torch.split(tokens, chunk), strict=True)
    ]
    log_probs, entropy = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)


def _of_tokens(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)


def _entropy(log_probs: Tensor) -> Tensor:
    possible = log_probs > -torch.inf
    return -(log_probs.exp() * torch.where(possible, log_probs, torch.zeros_like(log_probs))).sum(-1)
