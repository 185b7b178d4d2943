"""The critic's loss and explained variance."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot import functional as F

from .strategies import CONSTANTS, DOUBLE, masks, random, seeds

clips = st.sampled_from([0.1, 0.2, 1.0])


@given(seeds)
def test_value_loss_is_the_squared_error_without_a_half(seed: int) -> None:
    values, returns = random(seed, 2, 2, 3)
    expected = [
        [(v - r) ** 2 for v, r in zip(*rows, strict=True)] for rows in zip(values.tolist(), returns.tolist(), strict=True)
    ]
    torch.testing.assert_close(F.value_loss(values, returns), torch.tensor(expected, dtype=DOUBLE), rtol=1e-12, atol=0)


@given(seeds, clips)
def test_clipped_value_loss_is_the_larger_of_the_two_errors(seed: int, clip: float) -> None:
    values, returns, old = random(seed, 3, 8)
    ours = F.value_loss(values, returns, old, clip)
    for i, (v, r, o) in enumerate(zip(values.tolist(), returns.tolist(), old.tolist(), strict=True)):
        held = o + max(-clip, min(clip, v - o))
        assert ours[i].item() == pytest.approx(max((v - r) ** 2, (held - r) ** 2), rel=1e-12)


def test_value_clipping_stops_the_gradient_only_of_a_value_that_overshot_towards_its_return() -> None:
    values = torch.tensor([1.0, 1.0, 0.6], dtype=DOUBLE, requires_grad=True)
    old, returns = torch.tensor([0.5, 0.5, 0.5], dtype=DOUBLE), torch.tensor([2.0, 0.0, 2.0], dtype=DOUBLE)
    (gradient,) = torch.autograd.grad(F.value_loss(values, returns, old, 0.2).sum(), values)
    # moved far towards the return: held; moved far away from it: full gradient; moved little: full gradient
    assert gradient.tolist() == pytest.approx([0.0, 2.0, -2.8])


def test_value_clipping_without_old_values_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"clip=0.2.*old_values"):
        F.value_loss(torch.zeros(1), torch.zeros(1), clip=0.2)


@given(seeds, masks(2, 4))
def test_explained_variance_is_one_minus_the_share_left_unexplained(seed: int, mask: Tensor) -> None:
    values, returns = random(3 * seed, 2, 2, 4)
    mask = mask.clone()
    mask[:, 0] = True
    v, r = values[mask].tolist(), returns[mask].tolist()
    left = statistics.pvariance([b - a for a, b in zip(v, r, strict=True)])
    expected = 1 - left / statistics.pvariance(r)
    assert F.explained_variance(values, returns, mask).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@CONSTANTS
def test_explained_variance_of_constant_returns_is_null(constant: float, count: int, dtype: torch.dtype) -> None:
    """And not minus infinity's neighbour, when the mean of a constant is rounded to something beside it."""
    returns = torch.full((count,), constant, dtype=dtype)
    assert math.isnan(F.explained_variance(torch.arange(count).to(dtype), returns).item())
    padded, mask = torch.cat([returns, returns + 1]), torch.arange(2 * count) < count
    assert math.isnan(F.explained_variance(torch.arange(2 * count).to(dtype), padded, mask).item())
