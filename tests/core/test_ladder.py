"""PPO is REINFORCE plus five fixes: each rung differs from the one below by one switch, and with it off, the gradient is equal.

A fix does not only vanish when its switch is off; it also does nothing where there is nothing to fix. Those are the stronger
laws here: a critic that says 0 is no baseline, one that says the mean is the mean, λ = 1 is no GAE, a ratio of 1 needs no
weight and no clip. The bottom of the ladder, and A2C, are checked against gradients written out by hand.
"""

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from surefoot import (
    A2C,
    ACTOR_CRITIC,
    ALGORITHMS,
    LADDER,
    PPO_CLIP,
    PPO_UNCLIPPED,
    REINFORCE,
    REINFORCE_BASELINE,
    Clip,
    Objective,
    Reuse,
)
from surefoot.core.algorithms import algorithm_name, switches_between
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import Rollout

from .worlds import TinyPolicy, gradient, gradient_of, moved, random_rollout

NAMES = ["REINFORCE", "REINFORCE_BASELINE", "ACTOR_CRITIC", "A2C", "PPO_UNCLIPPED", "PPO_CLIP"]
SWITCHES = ["baseline", "baseline", "gae_lambda", "reuse", "trust_region"]
SEEDS = [0, 1]


def same(a: Tensor, b: Tensor) -> None:
    assert a.abs().max() > 1e-3, "a gradient of zero would prove nothing"
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def different(a: Tensor, b: Tensor) -> None:
    assert (a - b).abs().max() > 1e-3


# ---- values -------------------------------------------------------------------------------------------------------------


def test_the_ladder_is_six_rungs_in_order() -> None:
    assert list(LADDER) == [ALGORITHMS[name] for name in NAMES]
    assert len(set(LADDER)) == 6


def test_each_rung_changes_exactly_one_switch_and_with_it_off_is_the_rung_below() -> None:
    for below, here, name in zip(LADDER, LADDER[1:], SWITCHES, strict=False):
        ((switch, (off, on)),) = switches_between(below, here).items()
        assert switch == name
        assert replace(here, **{switch: off}) == below
        assert replace(below, **{switch: on}) == here


def test_reinforce_has_all_switches_off() -> None:
    assert Objective() == REINFORCE
    assert (REINFORCE.baseline, REINFORCE.reuse, REINFORCE.trust_region) == (None, None, None)


def test_only_rungs_without_a_critic_need_whole_episodes() -> None:
    assert [objective.needs_whole_episodes for objective in LADDER] == [True, True, False, False, False, False]


def test_an_algorithm_has_its_name_and_a_changed_one_has_none() -> None:
    assert [algorithm_name(objective) for objective in LADDER] == NAMES
    assert algorithm_name(replace(PPO_CLIP, gamma=0.5)) is None


def test_switches_between_shows_both_values_and_nothing_else() -> None:
    other = replace(A2C, gamma=0.5, reuse=Reuse(2, 2))
    assert switches_between(A2C, other) == {"gamma": (0.99, 0.5), "reuse": (None, Reuse(2, 2))}
    assert switches_between(other, A2C) == {"gamma": (0.5, 0.99), "reuse": (Reuse(2, 2), None)}
    assert all(switches_between(x, x) == {} for x in LADDER)
    assert all(field.default == getattr(REINFORCE, field.name) for field in fields(Objective))


# ---- gradients ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_each_switch_changes_the_gradient(seed: int) -> None:
    """Off-policy, with spread ratios, all six differ. (One update from a fresh batch can't tell the last three apart.)"""
    policy = TinyPolicy(seed)
    rollout = moved(random_rollout(policy, seed), seed)
    gradients = [gradient(policy, rollout, objective) for objective in LADDER]
    for below, here in pairwise(gradients):
        different(below, here)


def test_reinforce_weighs_log_pi_by_the_return_written_out(seed: int) -> None:
    policy = TinyPolicy(seed, critic=False)
    rollout = random_rollout(policy, seed, whole=True)
    total = torch.zeros(())
    for row in range(4):
        for t in range(6):
            to_go = sum(0.99**k * float(rollout.rewards[row, t + k]) for k in range(6 - t))
            total = total - policy(rollout.inputs[row, t], rollout.actions[row, t]).log_probs * to_go / 24
    same(gradient(policy, rollout, REINFORCE), by_autograd(policy, total))


def test_a2c_weighs_log_pi_by_gae_and_fits_the_critic_written_out(seed: int) -> None:
    """Rows with masked steps and both kinds of ends; Â is the recursion in plain Python, Â and targets are constants."""
    policy = TinyPolicy(seed)
    r = random_rollout(policy, seed)
    total, kept = torch.zeros(()), int(r.mask.sum())
    for row in range(4):
        following = 0.0
        for t in reversed(range(6)):
            if not r.mask[row, t]:
                continue
            bootstrap = 0.0 if r.terminated[row, t] else 0.99 * float(r.next_values[row, t])
            trace = 0.0 if r.terminated[row, t] or r.truncated[row, t] else 0.99 * 0.95 * following
            following = float(r.rewards[row, t]) + bootstrap - float(r.values[row, t]) + trace
            here = policy(r.inputs[row, t], r.actions[row, t])
            error = here.values - (following + float(r.values[row, t]))
            total = total + (-here.log_probs * following + 0.5 * error**2) / kept
    same(gradient(policy, r, A2C), by_autograd(policy, total))


def by_autograd(policy: TinyPolicy, total: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(policy.parameters()))])


def test_where_the_mean_return_is_zero_the_mean_baseline_changes_nothing(seed: int) -> None:
    policy = TinyPolicy(seed, critic=False)
    rollout = random_rollout(policy, seed, whole=True)
    gamma_zero = replace(REINFORCE, gamma=0.0)
    centred = replace(rollout, rewards=rollout.rewards - rollout.rewards.mean())
    same(gradient(policy, centred, gamma_zero), gradient(policy, centred, replace(gamma_zero, baseline="mean")))
    above = replace(rollout, rewards=centred.rewards + 1)
    different(gradient(policy, above, gamma_zero), gradient(policy, above, replace(gamma_zero, baseline="mean")))


def constant_critic(rollout: Rollout, value: float) -> Rollout:
    filled = torch.full_like(rollout.values, value)
    return replace(rollout, values=filled, next_values=filled)


def test_a_critic_that_predicts_zero_is_no_baseline(seed: int) -> None:
    policy = TinyPolicy(seed)
    rollout = constant_critic(random_rollout(policy, seed, whole=True), 0.0)
    same(gradient(policy, rollout, replace(ACTOR_CRITIC, value_coefficient=0.0)), gradient(policy, rollout, REINFORCE))


def test_a_critic_that_predicts_the_mean_return_is_the_mean_baseline(seed: int) -> None:
    policy = TinyPolicy(seed)
    rollout = random_rollout(policy, seed, whole=True)
    mean = float(assign_credit(rollout, REINFORCE).returns.mean())
    without_critic_loss = replace(ACTOR_CRITIC, value_coefficient=0.0)
    expected = gradient(policy, rollout, REINFORCE_BASELINE)
    same(gradient(policy, constant_critic(rollout, mean), without_critic_loss), expected)
    different(gradient(policy, constant_critic(rollout, mean + 1), without_critic_loss), expected)


@pytest.mark.parametrize("objective", [PPO_UNCLIPPED, PPO_CLIP], ids=NAMES[4:])
@pytest.mark.parametrize("unit", ["step", "row"])
def test_at_ratio_one_ppo_has_the_gradient_of_a2c(objective: Objective, unit: str, seed: int) -> None:
    policy = TinyPolicy(seed, memory=unit == "row")
    rollout = random_rollout(policy, seed, unit=unit)
    same(gradient(policy, rollout, objective), gradient(policy, rollout, A2C))


def test_inside_the_band_the_clip_changes_nothing(seed: int) -> None:
    policy = TinyPolicy(seed)
    rollout = random_rollout(policy, seed)
    near, far = moved(rollout, seed, size=0.02), moved(rollout, seed, size=0.6)
    credit = assign_credit(rollout, A2C)
    same(gradient_of(policy, near, credit, PPO_UNCLIPPED), gradient_of(policy, near, credit, PPO_CLIP))
    different(gradient_of(policy, far, credit, PPO_UNCLIPPED), gradient_of(policy, far, credit, PPO_CLIP))


def test_clip_schedule_normalisation_and_value_switches_are_off_in_all_six() -> None:
    """Subtracting the mean of the advantages would make rungs 0 and 1 the same."""
    assert PPO_CLIP.trust_region == Clip(0.2)
    for objective in LADDER:
        assert (objective.value_clip, objective.value_lambda, objective.target_kl) == (None, None, None)
        assert (objective.entropy_coefficient, objective.reference_coefficient) == (0.0, 0.0)
        assert objective.normalise_advantages is None
