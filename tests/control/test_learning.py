"""Returns after short trainings on fixed seeds pass a bar. The full comparisons are in benchmarks/."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import surefoot
from surefoot import LADDER, PPO_CLIP, PPO_PENALTY, PPO_PENALTY_ADAPTIVE, TRPO
from surefoot.core.algorithms import algorithm_name
from surefoot.demos.control import SOLVED

from .tiny import Endless


def test_the_cartpole_preset_learns_within_25000_steps() -> None:
    agent = surefoot.train("CartPole-v1", PPO_CLIP, steps=25_000, seed=2, evaluation={"episodes": 0})
    assert surefoot.evaluate(agent, episodes=20).mean_return > 150


@pytest.mark.release
@pytest.mark.parametrize("algorithm", [PPO_PENALTY, PPO_PENALTY_ADAPTIVE, TRPO], ids=algorithm_name)
def test_the_cartpole_preset_with_another_trust_region_learns_within_25000_steps(algorithm: Any) -> None:
    returns = []
    for seed in (1, 2, 3):  # one alone says little: how a processor rounds makes it another run
        agent = surefoot.train("CartPole-v1", algorithm, steps=25_000, seed=seed, evaluation={"episodes": 0})
        returns.append(surefoot.evaluate(agent, episodes=20).mean_return)
    assert sum(returns) / 3 > 150


@pytest.mark.release
def test_the_cartpole_preset_solves_it_within_100000_steps() -> None:
    agent = surefoot.train("CartPole-v1", PPO_CLIP, seed=1, evaluation={"episodes": 0})
    assert agent.recipe.steps == 100_000
    assert surefoot.evaluate(agent, episodes=100).mean_return >= SOLVED == 475


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(algorithm, marks=() if algorithm in (LADDER[0], TRPO) else pytest.mark.slow)  # PPO_CLIP is above
        for algorithm in [*LADDER, PPO_PENALTY, PPO_PENALTY_ADAPTIVE, TRPO]
    ],
    ids=algorithm_name,
)
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


def test_box_actions_find_the_target_of_each_observation() -> None:
    agent = surefoot.train(
        Aim,
        PPO_CLIP,
        steps=6_000,
        objective={"reuse": {"epochs": 5, "minibatches": 2}, "normalise_advantages": "minibatch"},
        rollout={"environments": 8, "steps": 16},
        optimizer={"learning_rate": 1e-2, "schedule": "linear"},
        normalise={"observations": True, "rewards": True},
        evaluation={"episodes": 0},
    )
    actual, _ = agent.predict(np.float32([[-1], [1]]), deterministic=True)
    np.testing.assert_allclose(actual, [[-0.5, 1.0], [0.5, 1.0]], atol=0.1)


class Once(gymnasium.Env[Any, Any]):
    """One question per episode: what is seen, the right answer, and the info. Paid by the share of the answer that is right."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.observation, self.right, info = self.observe(self.np_random)
        return self.observation, info

    def step(self, action: Any) -> Any:
        return self.observation, float(np.mean(np.asarray(action) == self.right)), True, False, {}

    def observe(self, draw: np.random.Generator) -> tuple[Any, Any, dict[str, Any]]:
        raise NotImplementedError


class Highest(Once):
    """The highest action that is allowed: without the mask nobody could know."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(8)

    def observe(self, draw: np.random.Generator) -> Any:
        allowed = draw.random(8) < 0.4
        allowed[draw.integers(8)] = True
        return np.zeros(1, np.float32), np.flatnonzero(allowed)[-1], {"action_mask": allowed}


class Signed(Once):
    """Where to go is said in one leaf, and whether to turn in another, by the sign of a number."""

    observation_space = spaces.Dict({"where": spaces.Discrete(3), "how": spaces.Tuple([spaces.Box(-1, 1, (1,))])})
    action_space = spaces.MultiDiscrete([3, 2])

    def observe(self, draw: np.random.Generator) -> Any:
        where, turn = int(draw.integers(3)), float(draw.choice([-1.0, 1.0]))
        return {"where": where, "how": (np.float32([turn]),)}, [where, turn > 0], {}


class Half(Once):
    """Which half of a noisy image is the brighter one."""

    observation_space, action_space = spaces.Box(0, 255, (36, 36), np.uint8), spaces.Discrete(2)

    def observe(self, draw: np.random.Generator) -> Any:
        image, side = draw.integers(0, 100, (36, 36), np.uint8), int(draw.integers(2))
        image[:, 18 * side : 18 * side + 18] += 60
        return image, side, {}


@pytest.mark.parametrize(("task", "steps"), [(Highest, 1_500), (Signed, 1_500), (Half, 600)])
def test_tasks_that_need_masks_choices_leaves_or_images_are_solved(task: Any, steps: int) -> None:
    """Chance is 0.3 to 0.5. Three seeds of three answer all of 100 questions."""
    agent = surefoot.train(
        task,
        PPO_CLIP,
        steps=steps,
        seed=1,
        objective={"reuse": {"epochs": 4, "minibatches": 2}, "normalise_advantages": "minibatch"},
        rollout={"environments": 8, "steps": 16},
        optimizer={"learning_rate": 1e-3 if task is Half else 1e-2, "schedule": "linear"},
        network={"hidden": [] if task is Half else [32]},
        normalise={"observations": False, "rewards": False},
        evaluation={"episodes": 0},
    )
    assert surefoot.evaluate(agent, task, episodes=50).mean_return == 1.0
