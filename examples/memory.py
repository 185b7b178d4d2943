"""CartPole without its velocities: one observation does not show the pole's direction, so the policy needs a memory.

python examples/memory.py --seeds 1 2 3 4 5
python examples/memory.py --seeds 1 2 3 4 5 --engine compiled
python examples/memory.py --seeds 1 2 3 4 5 --lstm 0
"""

import argparse
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import surefoot


class Positions(gymnasium.ObservationWrapper):
    """The cart's position and the pole's angle, two of CartPole's four numbers."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


RECIPE: dict[str, Any] = {
    "rollout": {"environments": 8, "steps": 128},  # backpropagation through time covers 128 steps
    "objective": {
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "normalise_advantages": "minibatch",
        "reuse": {"epochs": 10, "minibatches": 4},  # each minibatch has two whole sequences
        "trust_region": {"clip": 0.2, "schedule": "linear"},
    },
    "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
    "evaluation": {"episodes": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--lstm", type=int, default=32, help="width of the LSTM; 0 for none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--engine", choices=["auto", "eager", "compiled"], default="auto")
    args = parser.parse_args()

    network = {"hidden": [32], "lstm": args.lstm or None}
    for seed in args.seeds:
        agent = surefoot.train(Positions, steps=args.steps, seed=seed, engine=args.engine, network=network, **RECIPE)
        result = surefoot.evaluate(agent, Positions, episodes=args.episodes, seed=seed)
        print(
            f"seed {seed}: greedy return {result.mean_return:.1f}, worst of {args.episodes} episodes {min(result.returns):.0f}"
        )


if __name__ == "__main__":
    main()
