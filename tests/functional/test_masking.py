"""Masked statistics and the reducer."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot import functional as F

from .strategies import CONSTANTS, masks, random, seeds

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
MODES: list[F.Aggregation] = ["token-mean", "sequence-mean", "sequence-sum", "constant"]


def kept(x: Tensor, mask: Tensor) -> list[float]:
    return [v for v, keep in zip(x.flatten().tolist(), mask.flatten().tolist(), strict=True) if keep]


# Statistics.


@given(seeds, masks(3, 4))
def test_masked_statistics_are_those_of_the_kept_entries(seed: int, mask: Tensor) -> None:
    x = random(seed, 3, 4)
    entries = kept(x, mask)
    mean, var = (statistics.fmean(entries), statistics.pvariance(entries)) if entries else (0.0, 0.0)
    assert F.masked_mean(x, mask).item() == pytest.approx(mean, abs=1e-12)
    assert F.masked_var(x, mask).item() == pytest.approx(var, abs=1e-11)
    assert [m.item() for m in F.masked_moments(x, mask)] == pytest.approx([len(entries), mean, var], abs=1e-11)


@given(seeds)
def test_a_full_mask_equals_no_mask(seed: int) -> None:
    x = random(seed, 3, 4)
    everything = torch.ones(3, 4)
    torch.testing.assert_close(F.masked_mean(x, None), F.masked_mean(x, everything), **CLOSE)
    torch.testing.assert_close(tuple(F.masked_moments(x, None)), tuple(F.masked_moments(x, everything)), **CLOSE)
    torch.testing.assert_close(F.whiten(x, None, eps=1e-2), F.whiten(x, everything, eps=1e-2), **CLOSE)
    for mode in MODES:
        torch.testing.assert_close(F.aggregate(x, None, mode), F.aggregate(x, everything, mode), **CLOSE)


@given(seeds, masks(3, 4))
def test_features_have_their_own_moments_under_a_mask_without_their_axis(seed: int, mask: Tensor) -> None:
    x = random(seed, 3, 4, 2)
    count, mean, var = F.masked_moments(x, mask)
    assert count.item() == int(mask.sum())
    assert mean.shape == var.shape == (2,)
    for feature in range(2):
        entries = kept(x[..., feature], mask) or [0.0]
        assert mean[feature].item() == pytest.approx(statistics.fmean(entries), abs=1e-12)
        assert var[feature].item() == pytest.approx(statistics.pvariance(entries), abs=1e-11)


def test_a_mask_of_one_row_counts_every_row_that_it_serves() -> None:
    x = random(3, 3, 4)
    mask = torch.tensor([[1, 1, 0, 1]])
    wide = mask.expand(3, 4)
    assert F.masked_mean(x, mask).item() == pytest.approx(statistics.fmean(kept(x, wide)))
    assert F.masked_var(x, mask).item() == pytest.approx(statistics.pvariance(kept(x, wide)))
    assert F.masked_moments(x, mask).n.item() == 9


def test_variance_survives_a_mean_that_is_large() -> None:
    """Two passes: E[x²] − E[x]² would leave nothing of it in float32."""
    x = 10_000 + torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert F.masked_var(x, None).item() == 1.25
    padded, mask = torch.cat([x, -x]), torch.arange(8) < 4
    assert F.masked_var(padded, mask).item() == 1.25
    assert F.masked_moments(padded, mask).var.item() == 1.25
    parts = [F.masked_moments(part, None) for part in x.split(2)]
    assert F.merge_moments(*parts).var.item() == 1.25


# Moments of a union.


@given(seeds, masks(12), st.integers(0, 12), st.integers(0, 12))
def test_merged_moments_are_those_of_the_union_whatever_the_split(seed: int, mask: Tensor, i: int, j: int) -> None:
    x = random(seed, 12)
    cuts = sorted((i, j))
    a, b, c = (F.masked_moments(part, keep) for part, keep in zip(x.tensor_split(cuts), mask.tensor_split(cuts), strict=True))
    entries = kept(x, mask)
    mean, var = (statistics.fmean(entries), statistics.pvariance(entries)) if entries else (0.0, 0.0)
    expected = [float(len(entries)), mean, var]
    for merged in (
        F.merge_moments(F.merge_moments(a, b), c),
        F.merge_moments(a, F.merge_moments(b, c)),
        F.merge_moments(F.merge_moments(c, a), b),
    ):
        assert [m.item() for m in merged] == pytest.approx(expected, abs=1e-10)


@given(seeds, masks(2, 3), masks(2, 3))
def test_moments_of_features_merge_feature_by_feature(seed: int, left: Tensor, right: Tensor) -> None:
    x, y = random(seed, 2, 2, 3, 2)
    merged = F.merge_moments(F.masked_moments(x, left), F.masked_moments(y, right))
    for f in range(2):
        entries = kept(x[..., f], left) + kept(y[..., f], right) or [0.0]
        assert merged.mean[f].item() == pytest.approx(statistics.fmean(entries), abs=1e-11)
        assert merged.var[f].item() == pytest.approx(statistics.pvariance(entries), abs=1e-11)


# Whitening.


@given(seeds, masks(3, 4), st.booleans(), st.sampled_from([1e-8, 1e-2]))
def test_whiten_subtracts_the_mean_and_divides_by_the_root_of_the_biased_variance_plus_eps(
    seed: int, mask: Tensor, shift: bool, eps: float
) -> None:
    x = random(seed, 3, 4)
    entries = kept(x, mask) or [0.0]
    mean, scale = statistics.fmean(entries), math.sqrt(statistics.pvariance(entries) + eps)
    expected = torch.where(mask, (x - mean) / scale + (0.0 if shift else mean), 0)
    torch.testing.assert_close(F.whiten(x, mask, shift_mean=shift, eps=eps), expected, rtol=1e-9, atol=1e-7)


@CONSTANTS
def test_a_constant_batch_whitens_to_exactly_zero(constant: float, count: int, dtype: torch.dtype) -> None:
    """Rounding of the mean, divided by √eps, would otherwise pass for a signal."""
    x = torch.full((count,), constant, dtype=dtype)
    assert (F.whiten(x, None) == 0).all()
    assert torch.equal(F.whiten(x, None, shift_mean=False), x)
    assert F.masked_var(x, None).item() == 0
    padded, mask = torch.cat([x, x + 1]), torch.arange(2 * count) < count
    assert (F.whiten(padded, mask) == 0).all()
    assert F.masked_var(padded, mask).item() == 0


@given(seeds, masks(4, 3))
def test_parts_whitened_by_the_merged_moments_are_parts_of_the_whole(seed: int, mask: Tensor) -> None:
    """What ranks do."""
    x = random(seed, 4, 3)
    merged = F.merge_moments(F.masked_moments(x[:1], mask[:1]), F.masked_moments(x[1:], mask[1:]))
    parts = [F.whiten(x[s], mask[s], moments=merged) for s in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(torch.cat(parts), F.whiten(x, mask), rtol=1e-9, atol=1e-7)


# The reducer.


def reduced(loss: Tensor, mask: Tensor, mode: str, max_length: int | None = None) -> float:
    """By its definition, in loops."""
    rows = [
        [v for v, keep in zip(row, keeps, strict=True) if keep] for row, keeps in zip(loss.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "sequence-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if mode == "sequence-sum":
        return sum(map(sum, rows)) / len(rows)
    return sum(map(sum, rows)) / (len(rows) * (max_length or loss.shape[-1]))


@pytest.mark.parametrize("mode", MODES)
@given(seeds, masks(3, 4))
def test_each_mode_is_its_definition(mode: F.Aggregation, seed: int, mask: Tensor) -> None:
    loss = random(seed, 3, 4)
    assert F.aggregate(loss, mask, mode).item() == pytest.approx(reduced(loss, mask, mode), abs=1e-11)
    long = F.aggregate(loss, mask, mode, max_length=9).item()
    assert long == pytest.approx(reduced(loss, mask, mode, 9), abs=1e-11)
    everything = torch.ones(3, 4, dtype=torch.bool)
    assert F.aggregate(loss, None, mode).item() == pytest.approx(reduced(loss, everything, mode), abs=1e-11)


@pytest.mark.parametrize("mode", MODES)
@given(seeds, masks(4, 3), st.sampled_from([[1, 1, 1, 1], [1, 3], [2, 2], [4], [3, 1]]), st.booleans())
def test_micro_batches_with_the_global_count_add_up_to_the_whole(
    mode: F.Aggregation, seed: int, mask: Tensor, sizes: list[int], as_float: bool
) -> None:
    """In value and in gradient, however the batch is split."""
    loss = random(seed, 4, 3).requires_grad_()
    count: Tensor | float = (mask if mode == "token-mean" else mask.any(-1)).sum().clamp(min=1)
    if as_float:
        count = float(count)
    parts = [
        F.aggregate(part, keep, mode, denominator=count, max_length=5)
        for part, keep in zip(loss.split(sizes), mask.split(sizes), strict=True)
    ]
    whole = F.aggregate(loss, mask, mode, max_length=5)
    assert sum(p.item() for p in parts) == pytest.approx(reduced(loss, mask, mode, 5), abs=1e-11)
    (by_parts,) = torch.autograd.grad(torch.stack(parts).sum(), loss)
    (at_once,) = torch.autograd.grad(whole, loss)
    torch.testing.assert_close(by_parts, at_once, **CLOSE)


def test_an_unknown_mode_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*token-mean, sequence-mean, sequence-sum, constant"):
        F.aggregate(torch.zeros(1, 1), None, "mean")  # type: ignore[arg-type]
