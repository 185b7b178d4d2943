"""Your own environment: a corridor to walk along. Any callable that makes a gymnasium.Env is a task.

python examples/own_environment.py --length 12
"""

import argparse
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import surefoot


class Corridor(gymnasium.Env):
    """Start at the left. Every step costs a little. The right end earns 1 and ends the episode."""

    def __init__(self, length: int = 8, limit: int = 60) -> None:
        self.length, self.limit = length, limit
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def _observe(self) -> np.ndarray:
        return np.array([self.place / self.length], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.time = 0, 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place = max(0, self.place + (1 if action == 1 else -1))
        self.time += 1
        terminated = self.place == self.length  # the episode is over: no rewards follow
        truncated = self.time >= self.limit and not terminated  # only the time limit: the task could have continued
        return self._observe(), (1.0 if terminated else -0.01), terminated, truncated, {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--length", type=int, default=8)
    args = parser.parse_args()

    def make() -> Corridor:
        return Corridor(length=args.length)

    agent = surefoot.train(make, steps=args.steps, seed=1)
    result = surefoot.evaluate(agent, make, episodes=5)
    print(f"return {result.mean_return:.2f}; steps to the end: {result.lengths} (the minimum is {args.length})")
    for place in range(args.length):
        observation = np.array([place / args.length], np.float32)
        print(f"at {place}: V = {agent.value(observation):+.2f}")


if __name__ == "__main__":
    main()
