"""Token rewards: the position of the score, and the KL penalty against the reference."""

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
