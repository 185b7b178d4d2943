"""Numbers that tell how a language model's training goes; each says what is healthy."""

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from surefoot.functional.masking import masked_mean


def distinct_n(responses: Iterable[Sequence[Hashable]], n: int) -> float | None:
    """Different n-grams / all n-grams over a batch of responses (token ids, or text for characters). None without any.

    Li et al. 2016 (arXiv 1510.03055). It falls as a batch grows and as responses lengthen, so compare it with the start of the
    same run: steady or slowly falling is healthy; a fall to half is a policy that has found a few phrases. Raise β or entropy.
    """
    if n < 1:
        raise ValueError(f"n={n}: must be at least 1")
    grams = list(chain.from_iterable(_grams(response, n) for response in responses))
    return len(set(grams)) / len(grams) if grams else None


def repeated_share(responses: Sequence[Sequence[Hashable]]) -> float:
    """Share of responses that another one of the batch is equal to, beyond the first: 0 all differ, (N − 1)/N all alike.

    Near 0 is healthy where answers are free; a rise towards 1 is mode collapse. Answers with one truth repeat rightly.
    """
    return 1 - len({tuple(response) for response in responses}) / len(responses) if responses else 0.0


def mean_length(mask: Tensor) -> float:
    """Mean tokens per response, EOS included.   mask [N, T]

    A steady rise without a rise of gold or of a held-out score is a reward that likes length; a fall to a few tokens is a
    policy that flees a penalty, or a supervised model that was trained too little.
    """
    return float(mask.sum(-1).to(torch.float64).mean()) if len(mask) else 0.0


def eos_rate(ended: Tensor) -> float:
    """Share of responses that ended by themselves, and were not cut by the length limit.   [N] of bool

    Above 0.9 is healthy. Low from the start: the limit is too short, or EOS was not learned; falling: the reward does not mind
    a missing end, see ``reward.missing_eos``.
    """
    return float(ended.to(torch.float64).mean()) if len(ended) else 0.0


def mean_log_likelihood(batches: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """Mean log-probability of a demonstrated token, in nats: Σ log π / Σ tokens over all batches. None without any.

    batches   pairs of log-probabilities [B, T] and mask [B, T], as a policy's forward gives them

    On held-out rows: what the model still knows of the text it was supervised on. A fall of some tenths of a nat is what a new
    taste costs; a fall by several is a model that has forgotten the language.
    """
    total, count = 0.0, 0
    for log_probs, mask in batches:
        kept = int(mask.sum())
        total += kept * float(masked_mean(log_probs.to(torch.float64), mask))
        count += kept
    return total / count if count else None


def win_rate(ours: Tensor, theirs: Tensor) -> float:
    """Share of prompts on which our score is the higher, a draw counting half.   [N], [N]

    Against the model that training started from, 0.5 is no change, above it is better. By a score that was trained on it says
    little: look at it by gold, or by a score that was not.
    """
    if ours.shape != theirs.shape or not len(ours):
        raise ValueError(f"scores of shapes {list(ours.shape)} and {list(theirs.shape)}: need one each for at least one prompt")
    return float(((ours > theirs).to(torch.float64) + 0.5 * (ours == theirs).to(torch.float64)).mean())


def pass_at_k(right: Tensor, samples: int, k: int) -> Tensor:
    """1 − C(n−c, k) / C(n, k), the unbiased estimate of P(one of k samples is right), float64.   [N] -> [N]

    right     c, how many of the samples are right, problem by problem
    samples   n ≥ k

    Chen et al. 2021 (arXiv 2107.03374), equation 1. As a product of k factors in [0, 1], which neither overflows nor takes the
    difference of large numbers. 1 − (1 − c/n)^k would be biased downwards.
    Raises ValueError unless 1 ≤ k ≤ n and every 0 ≤ c ≤ n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}: must be from 1 to samples={samples}")
    if bool(((right < 0) | (right > samples)).any()):
        raise ValueError(f"right: must be from 0 to samples={samples}")
    drawn = torch.arange(k, dtype=torch.float64, device=right.device)
    wrong = (samples - right).to(torch.float64).unsqueeze(-1)
    return 1 - ((wrong - drawn).clamp(min=0) / (samples - drawn)).prod(-1)


def best_of_n_kl(n: int) -> float:
    """log n − (n − 1)/n, in nats: at most so far is the best of n samples from the policy that they were drawn from.

    KL(best of n ‖ policy) of a response, exact where no two responses earn the same and none is likely, and an upper bound
    otherwise (Stiennon et al. 2020, arXiv 2009.01325, appendix G.3; the bound: Beirami et al. 2024, arXiv 2401.01879).
    """
    if n < 1:
        raise ValueError(f"n={n}: must be at least 1")
    return math.log(n) - (n - 1) / n


def _grams(response: Sequence[Hashable], n: int) -> Iterable[tuple[Hashable, ...]]:
    return (tuple(response[start : start + n]) for start in range(len(response) - n + 1))
