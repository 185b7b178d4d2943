"""Train one Stable-Baselines3 PPO cell, by default with the PPO paper's MuJoCo settings, and write its result as JSON.

Run with the Python of an environment with stable-baselines3, not Surefoot's:

    python benchmarks/peers/sb3.py --task HalfCheetah-v5 --seed 1 --steps 1000000 --out cell.json

Hyperparameters are those of `src/surefoot/recipes/presets/mujoco.toml`, in SB3's names; VecNormalize is SB3's own.
`--setting cartpole` uses those of `cartpole.toml` instead, and no normaliser.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize


def falling(start: float) -> Callable[[float], float]:
    """A linear schedule to zero, in SB3's form."""
    return lambda remaining: start * remaining


SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {
        "batch_size": 64,
        "n_epochs": 10,
        "learning_rate": falling(3e-4),
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_range": 0.2,
    },
    "cartpole": {
        "batch_size": 256,
        "n_epochs": 20,
        "learning_rate": falling(1e-3),
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "clip_range": falling(0.2),
    },
}


class Episodes(BaseCallback):
    """Record every finished training episode as (step, return, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, float, int]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.rows.append((self.num_timesteps, float(info["episode"]["r"]), int(info["episode"]["l"])))
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--environments", type=int, default=1)
    parser.add_argument("--horizon", type=int, default=2048)
    parser.add_argument("--setting", choices=list(SETTINGS), default="paper")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    environments: VecEnv = DummyVecEnv([lambda: Monitor(gymnasium.make(args.task)) for _ in range(args.environments)])
    if args.setting == "paper":
        environments = VecNormalize(environments, gamma=0.99)
    model = PPO(
        "MlpPolicy",
        environments,
        seed=args.seed,
        n_steps=args.horizon,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        device="cpu",
        **SETTINGS[args.setting],
    )
    episodes = Episodes()
    start = time.perf_counter()
    model.learn(args.steps, callback=episodes)
    seconds = time.perf_counter() - start
    last = [row[1] for row in episodes.rows[-100:]]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".partial")
    partial.write_text(
        json.dumps(
            {
                "library": "stable-baselines3",
                "version": stable_baselines3.__version__,
                "task": args.task,
                "seed": args.seed,
                "steps": args.steps,
                "environments": args.environments,
                "horizon": args.horizon,
                "last_100_mean": float(np.mean(last)) if last else None,
                "seconds": seconds,
                "steps_per_second": model.num_timesteps / seconds,
                "curve": episodes.rows[:: max(1, len(episodes.rows) // 200)],
            }
        )
    )
    partial.rename(args.out)


if __name__ == "__main__":
    main()
