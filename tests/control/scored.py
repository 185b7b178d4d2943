"""An environment with numbers in ``info``; nothing but NumPy and Gymnasium is imported, so that workers start fast."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Scored(gymnasium.Env[np.ndarray, Any]):
    """Episodes of 2 to 6 steps, by seed; a success is an episode whose last action is 1.

    ``results`` has (is_success, energy) of each finished episode. Every step's info has numbers, but only those of an episode's
    last step are right; text and arrays are no numbers.
    """

    observation_space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.results: list[tuple[bool, float]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(2, 7))
        self.truncates = bool(self.np_random.integers(2))
        self.t, self.energy = 0, 0.0
        return self._look(), {"is_success": True, "energy": -1000.0}

    def _look(self) -> np.ndarray:
        return np.float32([self.t, self.length])

    def step(self, action: Any) -> Any:
        self.t += 1
        self.energy += 0.25 + float(action)
        over, success = self.t >= self.length, bool(action == 1)
        info: dict[str, Any] = {"is_success": success, "energy": self.energy, "name": "text", "place": np.zeros(2)}
        info["count"] = np.int64(self.t)
        if over:
            self.results.append((success, self.energy))
        return self._look(), float(action), over and not self.truncates, over and self.truncates, info
