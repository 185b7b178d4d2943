"""Rewards: the position of the score, the KL penalty against the reference, and baselines of answers to the same prompt."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot import functional as F

from .strategies import CONSTANTS, DOUBLE, masks, random, seeds


@given(seeds, masks(3, 5))
def test_a_score_is_on_the_last_kept_token_only(seed: int, mask: Tensor) -> None:
    scores = random(3 * seed, 3)
    expected = torch.zeros(3, 5, dtype=DOUBLE)
    for b in range(3):
        kept = [t for t in range(5) if mask[b, t]]
        if kept:
            expected[b, kept[-1]] = scores[b]
    assert torch.equal(F.place_scores(scores, mask), expected)


@given(seeds, masks(3, 5), st.sampled_from([0.0, 0.05, 0.5]), st.booleans())
def test_shaped_rewards_pay_beta_per_nat_by_which_the_policy_prefers_the_token(
    seed: int, mask: Tensor, beta: float, as_tensor: bool
) -> None:
    rewards, log_probs, ref = random(seed, 3, 3, 5)
    coefficient = torch.tensor(beta, dtype=DOUBLE) if as_tensor else beta
    ours = F.kl_shaped_rewards(rewards, log_probs, ref, mask, coefficient)
    for b in range(3):
        for t in range(5):
            r, p, q = (x[b, t].item() for x in (rewards, log_probs, ref))
            assert ours[b, t].item() == pytest.approx(r - beta * (p - q) if mask[b, t] else 0.0, abs=1e-12)


def test_no_gradient_flows_through_the_penalty() -> None:
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.5]], requires_grad=True)
    shaped = F.kl_shaped_rewards(torch.zeros(1, 2), log_probs, ref, torch.ones(1, 2), 0.1)
    assert not shaped.requires_grad


def test_the_penalty_on_length_grows_in_a_straight_line_over_the_buffer() -> None:
    """DAPO's own numbers: 16,384 tokens are free, 20,480 cost 1, and so does more."""
    lengths = torch.tensor([1, 16_384, 18_432, 20_480, 30_000])
    assert F.overlong_penalty(lengths, longest=20_480, buffer=4_096).tolist() == [0, 0, -0.5, -1, -1]


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
