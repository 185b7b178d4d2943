"""A token world learns with the same loop, credit and learner as control; only its collector differs.

``token_world.py`` is that collector. Here are the conventions that it must keep (SPEC section 5), and learning against bars.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from surefoot import A2C, PPO_CLIP, REINFORCE_BASELINE, Objective, Reuse
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.loop import run_loop
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState, Metrics, Rollout

from .token_world import TokenCollector, Transformer

LANGUAGE = replace(
    PPO_CLIP, gamma=1.0, reuse=Reuse(epochs=4, minibatches=4), normalise_advantages="batch", value_coefficient=0.1
)


def learn(objective: Objective, seed: int, iterations: int, learning_rate: float, beta: float = 0.02) -> list[Metrics]:
    """The metrics of every iteration of a run in the token world."""
    policy = Transformer(seed)
    collector = TokenCollector(policy, beta)
    return loop(
        collector, Learner(policy, objective, LearnerSettings(AdamSettings(learning_rate, max_grad_norm=1.0))), seed, iterations
    )


def loop(collector: TokenCollector, learner: Learner, seed: int, iterations: int) -> list[Metrics]:
    history: list[Metrics] = []
    state = LearnerState.seeded(seed, iterations * collector.responses)
    run_loop(collector, learner, state, lambda _, metrics: history.append(metrics))
    assert len(history) == iterations
    return history


def mean(history: list[Metrics], name: str) -> float:
    return sum(metrics[name] for metrics in history) / len(history)


@cache
def rollout() -> Rollout:
    return TokenCollector(Transformer(0), beta=0.1).collect(LearnerState.seeded(0, 1))


# ---- what the collector hands over --------------------------------------------------------------------------------------


def test_credit_after_the_end_is_zero_and_a_cut_response_is_bootstrapped() -> None:
    r, objective = rollout(), replace(LANGUAGE, gae_lambda=0.0)
    shifted = replace(r, next_values=r.next_values + 5.0)
    credit, moved = assign_credit(r, objective), assign_credit(shifted, objective)
    gap = moved.advantages - credit.advantages
    torch.testing.assert_close(gap[r.terminated], torch.zeros_like(gap[r.terminated]))
    torch.testing.assert_close(gap[r.truncated], torch.full_like(gap[r.truncated], 5.0))
    assert (credit.advantages[~r.mask] == 0).all()
    assert (credit.returns[~r.mask] == 0).all()


# ---- learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "seed", "iterations", "learning_rate"),
    [
        pytest.param(LANGUAGE, 1, 40, 3e-3, id="PPO_CLIP"),
        pytest.param(replace(A2C, gamma=1.0, value_coefficient=0.1), 1, 120, 1e-2, id="A2C", marks=pytest.mark.release),
        pytest.param(replace(REINFORCE_BASELINE, gamma=1.0), 1, 120, 1e-2, id="REINFORCE_BASELINE"),
    ],
)
def test_mean_score_rises_from_chance_to_four_fifths(
    objective: Objective, seed: int, iterations: int, learning_rate: float
) -> None:
    """1 is a perfect copy; without reading the prompt at most 1/3 + 2/3 · 1/8 = 0.42 can be had."""
    history = learn(objective, seed, iterations, learning_rate)
    assert mean(history[:3], "score") < 0.25
    assert mean(history[-5:], "score") > 0.8


def test_kl_to_the_reference_falls_when_beta_is_large() -> None:
    """The policy starts far from the reference (which prefers three letters) and comes to it, whatever the score says."""
    policy = Transformer(1)
    collector = TokenCollector(policy, beta=5.0)
    with torch.no_grad():
        collector.reference.next_token.bias[[4, 5, 6]] += 3.0
    objective = replace(LANGUAGE, normalise_advantages=None)
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(3e-3, max_grad_norm=1.0), schedule="linear"))
    history = loop(collector, learner, 1, 20)
    assert mean(history[:2], "kl_reference") > 0.8
    assert mean(history[-5:], "kl_reference") < 0.1
