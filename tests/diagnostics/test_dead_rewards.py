"""A reward that is constant is reported during the run, once."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import surefoot
from surefoot.store.events import Message


class Nothing(gymnasium.Env[np.ndarray, int]):
    """Episodes of three steps without any reward."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.full(1, self.steps / 3, np.float32), 0.0, self.steps == 3, False, {}


def messages(task: Any, **fields: Any) -> list[str]:
    heard: list[str] = []
    surefoot.train(task, display=lambda event: heard.append(event.text) if isinstance(event, Message) else None, **fields)
    return heard


def test_an_environment_without_rewards_is_reported_once() -> None:
    few = {"rollout": {"environments": 4, "steps": 16}, "objective": {"reuse": {"epochs": 1, "minibatches": 2}}}
    heard = messages(Nothing, steps=5_120, evaluation={"episodes": 0}, **few)
    (line,) = [line for line in heard if line.startswith("! step ")]
    assert "return has been 0 throughout" in line
    assert int(line.split()[2].rstrip(",").replace(",", "")) <= 1_280, "at a quarter of the budget, not at its end"
