"""Masks and means: the only place where a loss or a statistic is reduced.

A mask is True (or 1) where an entry is kept. What is not kept may hold anything, NaN included: it is replaced before any
arithmetic, because ``0 * nan`` is NaN in the value and in the gradient.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "constant"]


class Moments(NamedTuple):
    """Number n, mean and biased variance of some entries; what ranks exchange and running normalisers accumulate."""

    n: Tensor
    mean: Tensor
    var: Tensor


def keep_only(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` with zeros where the mask is False; gradient does not flow there either.   [..., T]"""
    return x if mask is None else torch.where(mask.bool(), x, torch.zeros_like(x))


def last_kept(mask: Tensor) -> Tensor:
    """True at the last kept entry of each row that has one.   [..., T] -> [..., T] bool"""
    keep = mask.bool()
    return keep & (keep.flip(-1).cumsum(-1).flip(-1) == 1)


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of the kept entries; 0 where none is kept.   [...] -> []

    >>> masked_mean(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    count = x.new_tensor(x.numel()) if mask is None else mask.bool().expand_as(x).sum().to(x.dtype)
    return keep_only(x, mask).sum() / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor | None) -> Tensor:
    """Biased variance (divide by n) of the kept entries; exactly 0 where they are all the same, or none.   [...] -> []"""
    return masked_moments(x, None if mask is None else mask.expand_as(x)).var


def masked_moments(x: Tensor, mask: Tensor | None) -> Moments:
    """Count, mean and biased variance over the axes that the mask has.

    ``x`` [..., T] with ``mask`` [..., T] gives scalars; ``x`` [B, T, F] with ``mask`` [B, T] gives one value per feature [F].
    With no mask every entry counts and scalars come out. An empty selection has count, mean and variance 0.
    """
    if mask is None:
        var, mean = torch.var_mean(x, correction=0)
        return Moments(x.new_tensor(x.numel()), mean, var)
    keep = mask.bool().expand(x.shape[: mask.dim()])
    axes = tuple(range(keep.dim()))
    keep = keep.reshape(keep.shape + (1,) * (x.dim() - keep.dim()))
    count = keep.sum().to(x.dtype)
    safe = count.clamp(min=1)
    kept = torch.where(keep, x, torch.zeros_like(x))
    if not axes:
        return Moments(count, kept, torch.zeros_like(kept))
    mean = kept.sum(axes) / safe
    # A second pass removes the rounding of the first: a constant then has exactly itself as mean and variance 0.
    mean = mean + torch.where(keep, kept - mean, torch.zeros_like(x)).sum(axes) / safe
    var = torch.where(keep, kept - mean, torch.zeros_like(x)).square().sum(axes) / safe
    return Moments(count, mean, var)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Moments of the union of two disjoint selections (Chan, Golub and LeVeque 1979). Either may be empty."""
    n = a.n + b.n
    safe = n.clamp(min=1)
    gap = b.mean - a.mean
    mean = a.mean + gap * (b.n / safe)
    var = (a.n * a.var + b.n * b.var + gap.square() * (a.n * b.n / safe)) / safe
    return Moments(n, mean, var)


def whiten(
    x: Tensor, mask: Tensor | None, shift_mean: bool = True, eps: float = 1e-8, moments: Moments | None = None
) -> Tensor:
    """(x − μ) / √(var + eps) over the kept entries, with biased variance; 0 at the others.   [...]

    A constant batch gives zeros, never NaN. ``shift_mean=False`` keeps the mean: only the scale changes.
    ``moments`` replaces the batch's own μ and var: those of a larger batch, or of all ranks.

    >>> whiten(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([True, True, False]))
    tensor([-1.,  1.,  0.])
    """
    _, mean, var = masked_moments(x, mask) if moments is None else moments
    scaled = (keep_only(x, mask) - mean) * (var + eps).rsqrt()
    return keep_only(scaled if shift_mean else scaled + mean, mask)


def aggregate(
    loss: Tensor,
    mask: Tensor | None,
    mode: Aggregation,
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Reduce an elementwise loss [..., T] to the scalar that is differentiated.

    ``token-mean``     Σ loss / kept entries
    ``sequence-mean``  mean over sequences of each sequence's mean over its kept entries
    ``sequence-sum``   mean over sequences of each sequence's sum
    ``constant``       Σ loss / (sequences · max_length), max_length defaulting to T (Dr. GRPO, arXiv 2503.20783)

    ``denominator`` is the *global* count, over all micro-batches and ranks: kept entries for ``token-mean``, sequences with
    a kept entry for the others. With it, the parts of a batch add up to the whole, whatever the split.

    Raises ValueError for an unknown mode.

    >>> loss = torch.tensor([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]])
    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> {mode: float(aggregate(loss, mask, mode)) for mode in ("token-mean", "sequence-mean", "sequence-sum")}
    {'token-mean': 1.75, 'sequence-mean': 2.5, 'sequence-sum': 3.5}
    """
    if mode not in ("token-mean", "sequence-mean", "sequence-sum", "constant"):
        raise ValueError(f"mode={mode!r}: unknown aggregation; use one of token-mean, sequence-mean, sequence-sum, constant")
    loss = torch.where(mask.bool(), loss, torch.zeros_like(loss)) if mask is not None else loss
    keep = torch.ones_like(loss, dtype=torch.bool) if mask is None else mask.bool().expand_as(loss)
    if mode == "token-mean":
        count = keep.sum().to(loss.dtype).clamp(min=1) if denominator is None else denominator
        return loss.sum() / count
    lengths = keep.sum(-1)
    per_sequence = loss.sum(-1)
    if mode == "sequence-mean":
        per_sequence = per_sequence / lengths.clamp(min=1)
    if mode == "constant":
        per_sequence = per_sequence / (loss.shape[-1] if max_length is None else max_length)
    count = (lengths > 0).sum().to(loss.dtype).clamp(min=1) if denominator is None else denominator
    return per_sequence.sum() / count
