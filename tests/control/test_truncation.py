"""Truncation: a truncated endless task has the value of the endless task.

A reward of 1 per step for ever is worth 1/(1 − γ). The episode is cut every 50 steps and the observation does not tell the
time, so an agent that takes the cut for an end learns clearly less.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

import surefoot
from surefoot import A2C, PPO_CLIP, Objective

from .tiny import Endless

GAMMA = 0.95
WORTH = 1 / (1 - GAMMA)
LENGTH = 50

algorithms = pytest.mark.parametrize("algorithm", [A2C, PPO_CLIP], ids=["A2C", "PPO_CLIP"])


class Cut(Endless):
    """Reward 1 for ever; every 50 steps it is said to be truncated, or (wrongly) terminated.

    With a toll, the observation of a reset is another one, and the first step from there costs so much.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, terminated: bool = False, toll: float = 0.0) -> None:
        self.terminated, self.toll = terminated, toll

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t = 0
        return np.float32([-1.0 if self.toll else 1.0]), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t == LENGTH
        reward = 1.0 - self.toll if self.t == 1 else 1.0
        return np.float32([1.0]), reward, over and self.terminated, over and not self.terminated, {}


def value_of(make: Callable[[], Cut], algorithm: Objective) -> float:
    """V within an episode, after a few thousand steps; rollouts of 64 steps, so that most cuts fall inside one."""
    reuse = {"reuse": {"epochs": 4, "minibatches": 2}} if algorithm.reuse else {}
    agent = surefoot.train(
        make,
        algorithm,
        steps=7_680,
        objective={"gamma": GAMMA, **reuse},
        rollout={"environments": 4, "steps": 64},
        optimizer={"learning_rate": 3e-2, "schedule": "linear"},
        normalise={"observations": False, "rewards": False},
        evaluation={"episodes": 0},
    )
    return agent.value(np.float32([1.0]))


@algorithms
def test_an_endless_task_cut_every_50_steps_is_worth_one_over_one_minus_gamma(algorithm: Objective) -> None:
    assert value_of(Cut, algorithm) == pytest.approx(WORTH, rel=0.1)


@algorithms
def test_without_bootstrapping_at_truncation_the_value_would_be_clearly_lower(algorithm: Objective) -> None:
    assert value_of(lambda: Cut(terminated=True), algorithm) < 0.8 * WORTH


@algorithms
def test_truncation_bootstraps_from_the_final_observation_not_the_reset_one(algorithm: Objective) -> None:
    """With a toll of 30 a reset is worth 30 less, which must not be felt before the cut: nothing is paid there."""
    assert value_of(lambda: Cut(toll=30.0), algorithm) == pytest.approx(WORTH, rel=0.1)
