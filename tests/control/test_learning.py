"""It learns: returns against bars, on fixed seeds; small and few. The full comparisons are in benchmarks/."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import surefoot
from surefoot import LADDER, PPO_CLIP, PPO_PENALTY, PPO_PENALTY_ADAPTIVE, TRPO
from surefoot.algorithms import algorithm_name
from surefoot.demo import SOLVED

from .tiny import Endless


def test_cartpole_with_its_tuned_recipe_is_well_on_its_way_after_25000_steps() -> None:
    agent = surefoot.train("CartPole-v1", PPO_CLIP, steps=25_000, seed=2, evaluation={"episodes": 0})
    assert surefoot.evaluate(agent, episodes=20).mean_return > 150


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [PPO_PENALTY, PPO_PENALTY_ADAPTIVE, TRPO], ids=algorithm_name)
def test_cartpole_with_its_tuned_recipe_and_another_trust_region_is_well_on_its_way_after_25000_steps(algorithm: Any) -> None:
    agent = surefoot.train("CartPole-v1", algorithm, steps=25_000, seed=2, evaluation={"episodes": 0})
    assert surefoot.evaluate(agent, episodes=20).mean_return > 150


@pytest.mark.slow
def test_cartpole_with_its_tuned_recipe_is_solved_after_100000_steps() -> None:
    agent = surefoot.train("CartPole-v1", PPO_CLIP, seed=1, evaluation={"episodes": 0})
    assert agent.recipe.steps == 100_000
    assert surefoot.evaluate(agent, episodes=100).mean_return >= SOLVED == 475


@pytest.mark.parametrize("algorithm", [*LADDER, PPO_PENALTY, PPO_PENALTY_ADAPTIVE, TRPO], ids=algorithm_name)
def test_every_rung_and_every_trust_region_improves_over_its_start_in_a_few_thousand_steps(algorithm: Any) -> None:
    """Sampled returns, because at the start the likeliest action says little. Measured: 2 to 10 times the start."""
    once = {"learning_rate": 3e-3, "schedule": "constant"}
    again = {"learning_rate": 1e-3, "schedule": "constant"}
    fields: dict[str, Any] = {
        "objective": {"reuse": {"epochs": 4, "minibatches": 4}} if algorithm.reuse else {},
        "rollout": {"environments": 4, "steps": 64},
        "evaluation": {"episodes": 0},
        "seed": 2,
    }
    still = surefoot.train("CartPole-v1", algorithm, steps=1, optimizer={"learning_rate": 1e-12}, **fields)
    agent = surefoot.train("CartPole-v1", algorithm, steps=6_000, optimizer=again if algorithm.reuse else once, **fields)
    before, after = (surefoot.evaluate(each, episodes=30, deterministic=False).mean_return for each in (still, agent))
    assert 15 < before < 35  # a random policy's return
    assert after > 1.6 * before


class Aim(Endless):
    """One step per episode: the reward is −(distance to the target)², and the target depends on what is seen."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-3, 3, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super(Endless, self).reset(seed=seed)
        self.side = float(self.np_random.choice([-1.0, 1.0]))
        return np.float32([self.side]), {}

    def step(self, action: Any) -> Any:
        distance = np.square(action - self.target()).sum()
        return np.float32([self.side]), -float(distance), True, False, {}

    def target(self) -> np.ndarray:
        return np.array([0.5 * self.side, 1.0])


@pytest.mark.parametrize("normalise", [False, True], ids=["plain", "normalised"])
def test_box_actions_find_the_target_that_goes_with_what_is_seen(normalise: bool) -> None:
    agent = surefoot.train(
        Aim,
        PPO_CLIP,
        steps=6_000,
        objective={"reuse": {"epochs": 5, "minibatches": 2}, "normalise_advantages": "minibatch"},
        rollout={"environments": 8, "steps": 16},
        optimizer={"learning_rate": 1e-2, "schedule": "linear"},
        normalise={"observations": normalise, "rewards": normalise},
        evaluation={"episodes": 0},
    )
    found, _ = agent.predict(np.float32([[-1], [1]]), deterministic=True)
    np.testing.assert_allclose(found, [[-0.5, 1.0], [0.5, 1.0]], atol=0.1)
