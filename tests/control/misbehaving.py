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
