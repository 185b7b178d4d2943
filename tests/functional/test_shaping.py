"""Token rewards: the position of the score, and the KL penalty against the reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot import functional as F

from .strategies import DOUBLE, masks, random, seeds


@given(seeds, masks(3, 5))
def test_a_score_is_on_the_last_kept_token_only(seed: int, mask: Tensor) -> None:
    scores = random(3 * seed, 3)
    expected = torch.zeros(3, 5, dtype=DOUBLE)
    for b in range(3):
        kept = [t for t in range(5) if mask[b, t]]
        if kept:
            expected[b, kept[-1]] = scores[b]
    assert torch.equal(F.place_scores(scores, mask), expected)


def test_scores_of_ragged_responses() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    placed = F.place_scores(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 0, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 4]]


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


def test_a_token_that_the_policy_prefers_over_the_reference_costs() -> None:
    mask = torch.ones(1, 2)
    log_probs, ref = torch.log(torch.tensor([[0.8, 0.1]])), torch.log(torch.tensor([[0.4, 0.2]]))
    shaped = F.kl_shaped_rewards(torch.zeros(1, 2), log_probs, ref, mask, 0.1)
    assert shaped[0].tolist() == pytest.approx([-0.1 * math.log(2), 0.1 * math.log(2)])


def test_the_penalty_is_on_every_kept_token_and_its_sum_is_beta_times_the_sequence_kl() -> None:
    mask = torch.tensor([[1, 1, 1, 0]])
    log_probs = torch.tensor([[-1.0, -0.5, -0.2, math.nan]])
    ref = torch.tensor([[-1.2, -0.4, -0.3, math.nan]])
    scores = F.place_scores(torch.tensor([0.8]), mask)
    shaped = F.kl_shaped_rewards(scores, log_probs, ref, mask, 0.1)
    assert shaped[0].tolist() == pytest.approx([-0.02, 0.01, 0.79, 0.0])
    assert shaped.sum().item() == pytest.approx(0.8 - 0.1 * 0.2)


def test_no_gradient_flows_through_the_penalty() -> None:
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.5]], requires_grad=True)
    shaped = F.kl_shaped_rewards(torch.zeros(1, 2), log_probs, ref, torch.ones(1, 2), 0.1)
    assert not shaped.requires_grad


def test_the_penalty_on_length_grows_in_a_straight_line_over_the_buffer() -> None:
    """DAPO's own numbers: 16,384 tokens are free, 20,480 cost 1, and so does more."""
    lengths = torch.tensor([1, 16_384, 18_432, 20_480, 30_000])
    assert F.overlong_penalty(lengths, longest=20_480, buffer=4_096).tolist() == [0, 0, -0.5, -1, -1]
