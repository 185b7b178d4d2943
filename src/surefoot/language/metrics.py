"""Metrics of language models; each docstring says which values are healthy."""

import math
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from surefoot.functional.masking import masked_mean
from surefoot.ranks.collectives import in_float64


def distinct_n(responses: Iterable[Sequence[Hashable]], n: int) -> float | None:
    """Distinct n-grams / all n-grams over a batch of responses (token ids, or text for characters). None without any.

    Li et al. 2016 (arXiv 1510.03055). It falls as a batch grows and as responses lengthen, so compare it with the start of the
    same run: constant or slowly falling is healthy. After a fall to half, the policy repeats a few phrases: raise β or entropy.
    """
    if n < 1:
        raise ValueError(f"n={n}: is too small; set at least 1")
    grams = [tuple(response[start : start + n]) for response in responses for start in range(len(response) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def repeated_share(responses: Sequence[Sequence[Hashable]]) -> float:
    """Share of responses that repeat an earlier one of the batch: 0 if all differ, (N − 1)/N if all are equal.

    Near 0 is healthy for open-ended responses; a rise towards 1 is mode collapse. If one answer is right, repeats are fine.
    """
    return 1 - len({tuple(response) for response in responses}) / len(responses) if responses else 0.0


def mean_length(mask: Tensor) -> float:
    """Mean tokens per response, EOS included.   mask [N, T]

    A steady rise without a rise of gold or of a held-out score means that the reward favours length. A fall to a few tokens
    means that the policy avoids a penalty, or that the supervised model was trained too little.
    """
    return float(in_float64(mask.sum(-1)).mean()) if len(mask) else 0.0


def eos_rate(ended: Tensor) -> float:
    """Share of responses that ended by themselves, and were not truncated by the length limit.   [N] of bool

    Above 0.9 is healthy. Low from the start: the limit is too short, or EOS was not learned. Falling: the reward does not
    penalise a missing EOS; see ``reward.missing_eos``.
    """
    return float(in_float64(ended).mean()) if len(ended) else 0.0


def mean_log_likelihood(batches: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """Mean log-probability of a demonstrated token, in nats: Σ log π / Σ tokens over all batches. None without any.

    batches   pairs of log-probabilities [B, T] and mask [B, T], of a policy's forward pass

    On held-out rows: how much the model still knows of its supervised data. A fall of a few tenths of a nat is normal when
    preferences change; a fall of several nats means that the model has forgotten the language.
    """
    total, count = 0.0, 0
    for log_probs, mask in batches:
        kept = int(mask.sum())
        exact = in_float64(log_probs)
        total += kept * float(masked_mean(exact, mask.to(exact.device)))
        count += kept
    return total / count if count else None


def win_rate(ours: Tensor, theirs: Tensor) -> float:
    """Share of prompts on which our score is the higher; a tie counts half.   [N], [N]

    Against the model that training started from, 0.5 is no change, above it is better. Use gold or another score that was not
    trained on: the trained score proves little.
    """
    if ours.shape != theirs.shape or not len(ours):
        raise ValueError(f"scores of shapes {list(ours.shape)} and {list(theirs.shape)}: pass one of each for every prompt")
    return float((in_float64(ours > theirs) + 0.5 * in_float64(ours == theirs)).mean())


def loses_chosen(moved: float, gained: float) -> bool:
    """Whether chosen answers lose likelihood faster than the margin grows, and by more than one nat; both in nats.

    moved    mean log π − log π_ref of the chosen answers
    gained   the same less that of the rejected answers
    """
    return -moved > max(1.0, gained)


def pass_at_k(right: Tensor, samples: int, k: int) -> Tensor:
    """1 − C(n−c, k) / C(n, k), the unbiased estimate of P(one of k samples is right), float64.   [N] -> [N]

    right     c, how many of the samples are right, for each problem
    samples   n ≥ k

    Chen et al. 2021 (arXiv 2107.03374), equation 1. A product of k factors in [0, 1], which neither overflows nor subtracts
    large numbers. 1 − (1 − c/n)^k would be biased downwards.
    Raises ValueError unless 1 ≤ k ≤ n and every 0 ≤ c ≤ n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}: must be from 1 to samples={samples}")
    if bool(((right < 0) | (right > samples)).any()):
        raise ValueError(f"right: must be from 0 to samples={samples}")
    wrong = in_float64(samples - right).unsqueeze(-1)
    drawn = torch.arange(k, dtype=torch.float64, device=wrong.device)
    return 1 - ((wrong - drawn).clamp(min=0) / (samples - drawn)).prod(-1)


def best_of_n_kl(n: int) -> float:
    """log n − (n − 1)/n, in nats: an upper bound on KL(best of n ‖ policy) of a response.

    Exact if no two responses have the same reward and none is likely (Stiennon et al. 2020, arXiv 2009.01325,
    appendix G.3; the bound: Beirami et al. 2024, arXiv 2401.01879).
    """
    if n < 1:
        raise ValueError(f"n={n}: is too small; set at least 1")
    return math.log(n) - (n - 1) / n
