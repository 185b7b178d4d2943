"""Your own network, and action masks, on Taxi. Its observation is one number from 0 to 499; its mask marks the useful moves.

python examples/own_network.py --steps 100000
"""

import argparse
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

import surefoot


class Places(nn.Module):
    """Splits the number into its parts (row, column, passenger, destination), each with its own embedding.

    Any callable that takes the observation space and returns a module will do. The space here is one leaf, so ``forward`` gets
    its tensor [N]; for a Dict it gets a dict of tensors. It returns features [N, k]; k is up to you.
    """

    def __init__(self, observation_space: Any) -> None:
        super().__init__()
        assert observation_space.n == 500
        self.tables = nn.ModuleList(nn.Embedding(count, 16) for count in (5, 5, 5, 4))
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def forward(self, number: Tensor) -> Tensor:
        parts = [number // 100, number // 20 % 5, number // 4 % 5, number % 4]
        rows = [table(part) for table, part in zip(self.tables, parts, strict=True)]
        return self.layers(torch.cat(rows, -1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()

    task = next(name for name in ("Taxi-v4", "Taxi-v3") if name in gymnasium.registry)  # whichever this Gymnasium has
    agent = surefoot.train(
        task,
        surefoot.PPO_CLIP,
        steps=args.steps,
        seed=1,
        network={"custom": "own_network:Places"},  # module:factory, importable from where the script is run
        objective={"reuse": {"epochs": 10, "minibatches": 8}, "normalise_advantages": "minibatch", "entropy_coefficient": 0.02},
        rollout={"environments": 8, "steps": 128},
        optimizer={"learning_rate": 1e-3, "schedule": "linear"},
        normalise={"rewards": True},
        evaluation={"episodes": 0},
    )
    result = surefoot.evaluate(agent, episodes=20, seed=1)
    print(f"mean return of 20 greedy episodes: {result.mean_return:.1f} (the maximum is about 8)")
    mask = np.array([0, 0, 1, 1, 0, 0], np.int8)  # only east and west
    action, _ = agent.predict(314, action_mask=mask)
    print(f"with only east (2) and west (3) allowed, the action is {action}")


if __name__ == "__main__":
    main()
