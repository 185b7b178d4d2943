"""Pull one lever of 24 to a shown strength: a choice and a number at once, as a Dict, or flattened into a Box.

python examples/mixed_actions.py --seeds 1 2 3 4 5
python examples/mixed_actions.py --seeds 1 2 3 4 5 --flat
"""

import argparse
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import surefoot

LEVERS, STEPS = 24, 16


class Levers(gymnasium.Env[Any, Any]):
    """The right lever earns 1 less the error of its strength, any other nothing."""

    def __init__(self, flat: bool = False) -> None:
        self.flat = flat
        self.observation_space = spaces.Box(-1, 1, (LEVERS + 1,), np.float32)
        strength = spaces.Box(-1, 1, (1,), np.float32)
        apart = spaces.Dict({"lever": spaces.Discrete(LEVERS), "strength": strength})
        self.action_space: Any = spaces.Box(-1, 1, (LEVERS + 1,), np.float32) if flat else apart

    def look(self) -> np.ndarray:
        self.lever, self.strength = int(self.np_random.integers(LEVERS)), self.np_random.uniform(-1, 1)
        seen = np.zeros(LEVERS + 1, np.float32)
        seen[self.lever], seen[-1] = 1, self.strength
        return seen

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.flat:  # the largest of 24 numbers is the choice
            action = {"lever": int(np.argmax(action[:-1])), "strength": action[-1:]}
        error = abs(float(action["strength"][0]) - self.strength)
        reward = 1 - error if action["lever"] == self.lever else 0.0
        self.time += 1
        return self.look(), reward, False, self.time == STEPS, {}


def flattened() -> Levers:
    """The same task, its action one Box."""
    return Levers(flat=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40_960)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--flat", action="store_true", help="the action as a Box")
    args = parser.parse_args()

    task = flattened if args.flat else Levers
    for seed in args.seeds:
        agent = surefoot.train(task, steps=args.steps, seed=seed, evaluation={"episodes": 0})
        result = surefoot.evaluate(agent, task, episodes=100, seed=seed)
        print(f"seed {seed}: greedy return {result.mean_return:.1f} of {STEPS}")


if __name__ == "__main__":
    main()
