"""Group baselines: answers to the same prompt."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot import functional as F

from .strategies import CONSTANTS, masks, random, seeds


def kept(rewards: Tensor, mask: Tensor) -> list[list[float]]:
    return [row[keep].tolist() for row, keep in zip(rewards, mask, strict=True)]


@given(seeds, masks(2, 5), st.booleans(), st.integers(0, 1), st.sampled_from([1e-4, 1e-6]))
def test_group_advantage_is_the_centred_reward_over_the_groups_deviation(
    seed: int, mask: Tensor, scale: bool, ddof: int, eps: float
) -> None:
    rewards = random(3 * seed, 2, 5)
    ours = F.group_advantages(rewards, mask, scale=scale, ddof=ddof, eps=eps)
    assert (ours[~mask] == 0).all()
    for row, (group, advantages) in enumerate(zip(kept(rewards, mask), kept(ours, mask), strict=True)):
        if len(group) < 2:
            assert (ours[row] == 0).all()
            continue
        mean = statistics.fmean(group)
        deviation = (statistics.stdev if ddof else statistics.pstdev)(group)
        over = deviation + eps if scale else 1
        assert advantages == pytest.approx([(r - mean) / over for r in group], rel=1e-9, abs=1e-10)


@given(seeds, masks(2, 5))
def test_leave_one_out_advantage_is_the_reward_minus_the_mean_of_the_others(seed: int, mask: Tensor) -> None:
    rewards = random(seed, 2, 5)
    ours = F.leave_one_out_advantages(rewards, mask)
    assert (ours[~mask] == 0).all()
    for group, advantages in zip(kept(rewards, mask), kept(ours, mask), strict=True):
        for i, advantage in enumerate(advantages):
            others = group[:i] + group[i + 1 :]
            expected = group[i] - statistics.fmean(others) if others else 0.0
            assert advantage == pytest.approx(expected, abs=1e-11)


@CONSTANTS
def test_equal_rewards_give_zero_advantages(constant: float, count: int, dtype: torch.dtype) -> None:
    """Exactly: rounding error over eps would be a small lesson."""
    rewards = torch.full((2, count), constant, dtype=dtype)
    assert (F.group_advantages(rewards) == 0).all()
    assert (F.group_advantages(rewards, ddof=0, eps=1e-8) == 0).all()
