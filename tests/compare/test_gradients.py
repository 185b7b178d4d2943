"""Gradient noise at a frozen θ: the estimated quantities, and that only the estimators differ."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import surefoot
from surefoot import LADDER, SurefootError
from surefoot.compare.ladder import sample_gradients
from surefoot.compare.statistics import _mean_over_pairs, noise_of


class Corridor(gymnasium.Env):
    """Walk left or right from the middle of seven places; the right end pays 2, the left end 1.

    Episodes end by themselves, so every estimator of the first three rungs has the same expectation.
    """

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def look(self):
        return np.float32([self.place / 3, 1.0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self.look(), {}

    def step(self, action):
        self.place += 1 if action else -1
        over = abs(self.place) == 3
        return self.look(), {3: 2.0, -3: 1.0}.get(self.place, 0.0), over, False, {}


def corridor() -> gymnasium.Env:
    return Corridor()


RUNGS = [replace(rung, gamma=0.95) for rung in LADDER[:4]]
OTHER = replace(LADDER[0], gamma=0.3)
"""another objective, whose expected gradient is another"""
TINY = {"evaluation": {"episodes": 0}, "network": {"hidden": [8]}, "normalise": {"observations": True, "rewards": True}}


@pytest.fixture(scope="module")
def agent():
    """A policy that has hardly moved, and a critic that has."""
    fields = {"rollout": {"environments": 4, "steps": 64}, "steps": 1024, "seed": 3}
    fields["optimizer"] = {"learning_rate": 1e-4, "critic_learning_rate": 1e-2}
    return surefoot.train(corridor, replace(LADDER[5], gamma=0.95, reuse=surefoot.Reuse(6, 4)), **TINY, **fields)


@pytest.fixture(scope="module")
def samples(agent):
    return sample_gradients(agent, [*RUNGS, OTHER], batches=50, at_least=150, seed=1, task=corridor)


def test_batches_are_whole_episodes_of_nearly_one_size(samples):
    assert samples.gradients.shape[:2] == (5, 50)
    assert all(150 <= steps < 250 for steps in samples.steps)
    assert samples.truncated == 0
    assert samples.episodes > 250


def test_the_first_three_rungs_have_the_same_expected_gradient(samples):
    """The mean of the paired differences is within what their spread allows; the measure does tell another objective apart.

    ``surprise`` is 1 on average where expectations are equal, and rarely above 10 however few directions the noise has.
    """

    def surprise(a, b):
        apart = samples.gradients[a] - samples.gradients[b]
        return float((apart.mean(0) ** 2).sum() / (apart.var(0, ddof=1).sum() / len(apart)))

    assert surprise(0, 1) < 10
    assert surprise(0, 2) < 10
    assert surprise(1, 2) < 10
    assert surprise(2, 4) > 30


def test_a_fitted_critic_leaves_less_noise_than_the_mean_return_and_that_less_than_nothing(samples):
    shares = [noise.relative for noise in noise_of(samples.gradients)]
    assert shares[0] == 1
    assert shares[3] < shares[2] < shares[1] < 1


def test_variance_and_signal_are_the_trace_of_the_covariance_and_the_unbiased_squared_mean():
    gradients = np.random.default_rng(5).normal(size=(2, 40, 7)) + 0.3
    for rows, noise in zip(gradients, noise_of(gradients), strict=True):
        trace = float(np.trace(np.cov(rows.T)))
        assert noise.variance == pytest.approx(trace, rel=1e-10)
        assert noise.signal == pytest.approx(float((rows.mean(0) ** 2).sum() - trace / 40), rel=1e-10)
        assert noise.noise_to_signal == pytest.approx(trace / noise.signal)
        assert noise.variance_interval[0] < trace < noise.variance_interval[1]


def test_a_resample_is_the_mean_over_pairs_of_different_batches_as_often_as_both_were_drawn():
    matrix, drawn = np.random.default_rng(0).normal(size=(5, 5)), [0, 0, 2, 3, 3, 3]
    pairs = [matrix[a, b] for a in drawn for b in drawn if a != b]
    weights = np.array([[drawn.count(batch) for batch in range(5)]], float)
    assert _mean_over_pairs(matrix, weights) == pytest.approx(np.mean(pairs))


def test_the_interval_of_the_signal_covers_zero_without_a_signal():
    """Pure noise: a naive squared mean would be far above 0, and so would its interval."""
    hits = 0
    for seed in range(40):
        (noise,) = noise_of(np.random.default_rng(seed).normal(size=(1, 30, 50)))
        hits += noise.signal_interval[0] <= 0 <= noise.signal_interval[1]
    assert hits >= 34


def test_large_gradients_are_multiplied_in_parts(monkeypatch):
    gradients = np.random.default_rng(1).normal(size=(2, 5, 17)).astype(np.float32)
    whole = noise_of(gradients)
    monkeypatch.setattr("surefoot.compare.statistics.PRODUCT_COLUMNS", 5)
    for parts, noise in zip(noise_of(gradients), whole, strict=True):
        assert parts.variance == pytest.approx(noise.variance, rel=1e-12)


def test_a_zero_gradient_has_no_share():
    nothing, something = np.zeros((2, 10, 4))
    something[3] = 1
    noise = noise_of(np.stack([nothing, nothing, something]))
    assert [n.relative for n in noise] == [n.relative_interval for n in noise] == [None] * 3
    assert (noise[0].variance, noise[0].noise_to_signal) == (0, None)
    assert noise[2].variance > 0
    rare = noise_of(np.stack([something, something]))  # some resamples never draw the one batch that has a gradient
    assert rare[1].relative_interval == (1, 1)


def test_frozen_parts_of_a_network_have_no_gradient_to_measure(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n\n\ndef made(space):\n    first = nn.Linear(space.shape[0], 8).requires_grad_(False)\n"
        "    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 4))\n"
    )
    fields = {**TINY, "network": {"custom": f"{file}:made"}}
    agent = surefoot.train("CartPole-v1", "PPO_CLIP", steps=256, seed=1, rollout={"environments": 2, "steps": 128}, **fields)
    assert np.isfinite(sample_gradients(agent, RUNGS, batches=2, at_least=50, seed=1).gradients).all()


def test_measuring_changes_nothing_about_the_agent(agent):
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    sample_gradients(agent, RUNGS[:1], batches=2, at_least=20, seed=9, task=corridor)
    for name, tensor in agent.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_same_seed_gives_the_same_batches_and_another_seed_others(agent, samples):
    again, other = (sample_gradients(agent, RUNGS[:2], batches=3, at_least=150, seed=s, task=corridor) for s in (1, 2))
    scale = np.mean(again.steps) / np.mean(samples.steps)
    np.testing.assert_allclose(again.gradients * scale, samples.gradients[:2, :3], rtol=1e-6, atol=1e-9)
    assert not np.allclose(other.gradients, again.gradients)


def test_the_gradient_is_that_of_training(agent):
    """A batch's gradient under rung 2 is what the learner's own loss gives the actor, but for the common divisor."""
    from surefoot.control.collect import ControlCollector
    from surefoot.control.environments import make_environments
    from surefoot.core.credit import assign_credit
    from surefoot.core.rollout import LearnerState
    from surefoot.core.seeding import derived_seed

    (measured,) = sample_gradients(agent, RUNGS[2:3], batches=1, at_least=50, seed=4, task=corridor).gradients[:, 0]
    own = derived_seed(4, "gradient variance")
    saved = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    environments = make_environments(corridor, {}, 1, own)
    rollout = ControlCollector(environments, agent, None, at_least=50).collect(LearnerState.seeded(own, 50))
    agent.load_state_dict(saved)
    advantages = assign_credit(rollout, RUNGS[2]).advantages
    log_probs = agent.policy(rollout.inputs, rollout.actions).log_probs
    actor = [p for name, p in agent.policy.named_parameters() if not name.startswith("critic")]
    written_out = torch.autograd.grad(-(log_probs * advantages).sum() / rollout.steps, actor)
    np.testing.assert_allclose(measured, torch.cat([g.flatten() for g in written_out]).numpy(), rtol=1e-4, atol=1e-6)


def test_an_agent_without_a_critic_is_rejected_for_rungs_that_need_one():
    agent = surefoot.train(corridor, "REINFORCE", steps=20, rollout={"environments": 1}, **TINY)
    with pytest.raises(SurefootError, match="REINFORCE has no critic"):
        sample_gradients(agent, RUNGS, batches=2, at_least=10, seed=1, task=corridor)
    assert sample_gradients(agent, RUNGS[:2], batches=2, at_least=10, seed=1, task=corridor).gradients.shape[0] == 2
