"""A token world learns with the same loop, credit and learner as control; only its collector differs.

``token_world.py`` is that collector. Here are the conventions that it must keep (SPEC section 5), and learning against bars.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from surefoot import A2C, PPO_CLIP, PPO_PENALTY, PPO_PENALTY_ADAPTIVE, REINFORCE_BASELINE, Objective, Reuse
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.loop import run_loop
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState, Metrics, Rollout

from .token_world import EOS, LIMIT, PAD, PROMPT, TokenCollector, Transformer

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


def test_responses_are_of_unequal_length_and_end_with_eos_or_at_the_limit() -> None:
    mask, actions = rollout().mask, rollout().actions
    lengths = mask.sum(-1)
    assert lengths.min() == 1
    assert lengths.max() == LIMIT
    last = actions.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
    assert ((last == EOS) | (lengths == LIMIT)).all()
    assert (actions[~mask] == PAD).all()
    assert ((actions == EOS) & mask).sum(-1).max() == 1
    assert (mask.int().diff(dim=-1) <= 0).all(), "a response is kept from its first token to its last"


def test_each_response_ends_once_terminated_at_eos_or_truncated_at_the_limit() -> None:
    r = rollout()
    ended = r.terminated | r.truncated
    assert (ended.sum(-1) == 1).all()
    assert (r.actions[r.terminated] == EOS).all()
    assert (r.actions[r.truncated] != EOS).all()
    assert r.terminated.any()
    assert r.truncated[:, -1].any()


def test_values_are_those_of_the_prefix_before_each_token() -> None:
    """Scored one prefix at a time, without the tokens to come."""
    policy, r = Transformer(0), rollout()
    with torch.no_grad():
        torch.nn.init.normal_(policy.value.weight, generator=torch.Generator().manual_seed(3))
        values = policy(r.inputs, r.actions, r.mask).values
        for t in range(LIMIT):
            alone = policy.outputs(r.inputs[:, : PROMPT + t])[1][:, -1]
            torch.testing.assert_close(values[:, t], alone)


def test_score_sits_on_the_last_token_and_the_kl_on_every_token() -> None:
    """With β·k1 added back, all that is left is one number at the end of each response."""
    r = rollout()
    assert r.ref_log_probs is not None
    without_kl = torch.where(r.mask, r.rewards + 0.1 * (r.old_log_probs - r.ref_log_probs), 0.0)
    ended = r.terminated | r.truncated
    torch.testing.assert_close(without_kl[~ended], torch.zeros_like(without_kl[~ended]))
    assert without_kl[ended].abs().max() > 0.5


def test_credit_after_the_end_is_zero_and_a_cut_response_is_bootstrapped() -> None:
    r, objective = rollout(), replace(LANGUAGE, gae_lambda=0.0)
    shifted = replace(r, next_values=r.next_values + 5.0)
    credit, moved = assign_credit(r, objective), assign_credit(shifted, objective)
    gap = moved.advantages - credit.advantages
    torch.testing.assert_close(gap[r.terminated], torch.zeros_like(gap[r.terminated]))
    torch.testing.assert_close(gap[r.truncated], torch.full_like(gap[r.truncated], 5.0))
    assert (credit.advantages[~r.mask] == 0).all()
    assert (credit.returns[~r.mask] == 0).all()


def test_padding_tokens_are_not_read() -> None:
    policy, r = Transformer(0), rollout()
    other = r.inputs.clone()
    other[:, PROMPT:][~r.mask] = 7
    with torch.no_grad():
        here, there = policy(r.inputs, r.actions), policy(other, r.actions)
    torch.testing.assert_close(here.log_probs[r.mask], there.log_probs[r.mask])


# ---- learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "seed", "iterations", "learning_rate"),
    [
        pytest.param(LANGUAGE, 1, 40, 3e-3, id="PPO_CLIP-1"),
        pytest.param(LANGUAGE, 3, 40, 3e-3, id="PPO_CLIP-3", marks=pytest.mark.release),
        pytest.param(
            replace(LANGUAGE, trust_region=PPO_PENALTY.trust_region), 1, 40, 3e-3, id="PPO_PENALTY", marks=pytest.mark.release
        ),
        pytest.param(
            replace(LANGUAGE, trust_region=PPO_PENALTY_ADAPTIVE.trust_region),
            1,
            40,
            3e-3,
            id="PPO_PENALTY_ADAPTIVE",
            marks=pytest.mark.release,
        ),
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


def test_a_larger_beta_keeps_the_policy_closer_to_the_reference() -> None:
    loose, tight = (learn(LANGUAGE, 1, 15, 3e-3, beta) for beta in (0.0, 0.3))
    assert mean(loose[-5:], "kl_reference") > 3 * mean(tight[-5:], "kl_reference") > 0
