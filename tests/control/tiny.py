"""Tiny environments whose every step can be told in advance, and short ways to the objects under test."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from surefoot.control.spaces import choices
from surefoot.control.world import ControlWorld
from surefoot.core.algorithms import PPO_CLIP, Objective
from surefoot.core.rollout import LearnerState
from surefoot.recipes.presets import find_recipe

QUIET = {"evaluation": {"episodes": 0}, "normalise": {"observations": False, "rewards": False}}

Ends = Sequence[tuple[int, str]]
"""(length, "terminated" | "truncated" | "both") of each episode, over and over"""


@dataclass
class Transition:
    """What really happened in one step, by the environment's own account."""

    episode: int
    observation: np.ndarray
    action: Any
    reward: float
    successor: np.ndarray
    terminated: bool
    truncated: bool


@dataclass
class Clockwork(gymnasium.Env[np.ndarray, Any]):
    """Runs like clockwork: nothing is random, and a reset does not look at its seed.

    The observation is (index, episode, t, sum of actions so far); the reward depends on all of it. ``log`` is what happened
    and ``seeds`` what it was reset with.
    """

    index: int = 0
    ends: Ends = ((5, "terminated"),)
    action_space: spaces.Space[Any] = field(default_factory=lambda: spaces.Discrete(2))
    log: list[Transition] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.episode = -1
        self.t, self.total = 0, 0.0

    def look(self) -> np.ndarray:
        return np.array([self.index, self.episode, self.t, self.total], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.seeds.append(seed)
        self.episode += 1
        self.t, self.total = 0, 0.0
        return self.look(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        before = self.look()
        self.t += 1
        self.total += float(np.sum(action))
        length, how = self.ends[self.episode % len(self.ends)]
        over = self.t >= length
        reward = float(np.float32(1 + 0.25 * self.index - 0.5 * self.episode + 0.125 * self.t + 0.5 * self.total))
        ended = over and how in ("terminated", "both"), over and how in ("truncated", "both")
        self.log.append(Transition(self.episode, before, np.array(action), reward, self.look(), *ended))
        return self.look(), reward, *ended, {}


ENDS: tuple[Ends, ...] = (
    ((3, "terminated"), (1, "truncated"), (4, "both")),
    ((5, "truncated"), (2, "both"), (1, "terminated")),
    ((1, "both"), (1, "terminated"), (1, "truncated"), (7, "truncated")),
)
"""Three environments that end in every way, also at once and several times in a row."""


def clockworks(ends: Sequence[Ends] = ENDS, **fields: Any) -> list[Clockwork]:
    return [Clockwork(index, rows, **fields) for index, rows in enumerate(ends)]


def one_by_one(environments: Sequence[gymnasium.Env[Any, Any]]) -> Callable[[], Any]:
    """A maker that hands out the given environments in order, to look at them afterwards."""
    waiting = iter(environments)

    def make() -> gymnasium.Env[Any, Any]:
        return next(waiting)

    return make


def world_of(task: Any, algorithm: Objective = PPO_CLIP, **fields: Any) -> ControlWorld:
    """A run's environments, agent and collector, just as ``surefoot.train`` wires them."""
    name = task if isinstance(task, str) else f"{task.__module__}:{getattr(task, '__qualname__', 'task')}"
    recipe = find_recipe(name, {**QUIET, "objective": small(algorithm), **fields}, algorithm)
    return ControlWorld(recipe, None if isinstance(task, str) else task)


def small(algorithm: Objective) -> dict[str, Any]:
    """Changes that keep an algorithm what it is and make its updates few."""
    return {"reuse": {"epochs": 2, "minibatches": 1}} if algorithm.reuse else {}


def bare(values: Any) -> dict[str, Any]:
    """Observations that are one leaf, as everything after the environments has them."""
    return {"observation": values}


def fresh_state(seed: int = 1) -> LearnerState:
    return LearnerState.seeded(seed, 1_000_000)


class Endless(gymnasium.Env[np.ndarray, Any]):
    """Constant observation, reward 1, never over: what is different about an environment is said by overriding."""

    observation_space: spaces.Space[Any] = spaces.Box(-1, 1, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Sampled(gymnasium.Env[Any, Any]):
    """Shows samples of its space; episodes are cut after four steps. Keeps what it showed, what it masked, what it was sent.

    A mask allows one random choice per part of an action, and sometimes all; an action it forbids is an error.
    """

    latest: "Sampled"

    def __init__(self, observation_space: Any, action_space: Any, masked: bool = False, seed: int = 0) -> None:
        # Spaces of its own: they hold the generator that samples are drawn from.
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.masked = masked
        self.observation_space.seed(seed)
        self.generator = np.random.default_rng(seed)
        self.shown: Any = None
        self.last: Any = None
        self.mask: Any = None
        self.t, self.over = 0, False
        self.taken: list[Any] = []
        Sampled.latest = self

    def show(self) -> tuple[Any, dict[str, Any]]:
        self.shown = copy.deepcopy(self.observation_space.sample())
        if not self.masked:
            return self.shown, {}
        rows = [self.generator.permutation(n) == 0 for n in choices(self.action_space) or ()]
        self.mask = np.concatenate(rows) | (self.generator.random() < 0.25)
        return self.shown, {"action_mask": self.mask}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.observation_space.seed(seed)
            self.generator = np.random.default_rng(seed)
        self.t, self.over = 0, False
        return self.show()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not of {self.action_space}"
        if self.masked:
            start = np.asarray(getattr(self.action_space, "start", 0)).reshape(-1)
            parts = np.cumsum([0, *(choices(self.action_space) or ())[:-1]]) + np.asarray(action).reshape(-1) - start
            assert self.mask[parts].all(), "a forbidden action"
        self.taken.append(np.copy(action))
        self.t += 1
        self.over = self.t == 4
        shown, info = self.show()
        self.last = shown
        return shown, float(np.sum(action)), False, self.over, {} if self.over else info
