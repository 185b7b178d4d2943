"""Environments that go wrong in another process, where nothing but the standard library, NumPy and Gymnasium is imported."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.held = lambda: None


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def throw(error: BaseException) -> Callable[[], None]:
    def now() -> None:
        raise error

    return now


def spin() -> None:
    while True:
        pass


WAYS: dict[str, Callable[[], Any]] = {
    "raises": throw(RuntimeError("the wheels\ncame off")),
    "unpicklable": throw(Unpicklable()),
    "speechless": throw(Speechless()),
    "exits": throw(SystemExit(3)),
    "interrupts": throw(KeyboardInterrupt()),
    "leaves": lambda: os._exit(7),
    "segfaults": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "dawdles": lambda: time.sleep(0.6),
    "sleeps": lambda: time.sleep(600),
    "spins": spin,
}


class Misbehaving(gymnasium.Env[np.ndarray, Any]):
    """Episodes of three steps. In the one that is reset with ``doom``, something happens at step ``at``, 0 being the reset.

    With ``doom`` None it happens in all of them, and with ``fuse`` only while that file exists.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, how: str = "raises", doom: int | None = -1, at: int = 2, fuse: str | None = None) -> None:
        self.how, self.doom, self.at, self.fuse = how, doom, at, fuse
        if how == "while made":
            throw(SystemExit(5))()

    def look(self) -> np.ndarray:
        if self.doomed and self.t == self.at and (self.fuse is None or Path(self.fuse).exists()):
            WAYS[self.how]()
        return np.array([self.t, self.total], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.doomed = self.doom is None or seed == self.doom
        self.t, self.total = 0, float(self.np_random.random())
        return self.look(), {}

    def step(self, action: Any) -> Any:
        self.t, self.total = self.t + 1, self.total + float(action)
        return self.look(), self.total, self.t == 3, False, {}


class Odd(Misbehaving):
    """Nobody supports this observation space."""

    observation_space = spaces.Text(5)  # type: ignore[assignment]


def vector() -> Any:
    return gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")


class Parts(gymnasium.Env[dict[str, np.ndarray], Any]):
    """Well-behaved: observations of several kinds, one of them with the name of a field of a step, and an action mask."""

    observation_space = spaces.Dict(
        {"picture": spaces.Box(0, 255, (2, 3), np.uint8), "rewards": spaces.Box(-9, 9, (2,)), "kind": spaces.Discrete(300)}
    )
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def seen(self) -> tuple[dict[str, Any], dict[str, Any]]:
        picture = np.full((2, 3), self.steps % 250, np.uint8)
        parts = {
            "picture": picture,
            "rewards": self.np_random.normal(size=2).clip(-9, 9).astype(np.float32),
            "kind": self.steps,
        }
        return parts, {"action_mask": np.array([True, self.steps % 2 == 0])}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.seen()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        observation, info = self.seen()
        return observation, 1.0, False, self.steps % 4 == 0, info
