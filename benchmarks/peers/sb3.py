"""Train one cell of Stable-Baselines3, sb3-contrib or SBX and write its result as JSON.

Run with the Python of an environment with these libraries, not Surefoot's:

    python benchmarks/peers/sb3.py --task HalfCheetah-v5 --seed 1 --steps 1000000 --out cell.json
    python benchmarks/peers/sb3.py --cell CELL cell.json          a cell of benchmarks/speed.py: two trainings, both timed

Hyperparameters are those of `src/surefoot/recipes/presets/mujoco.toml`, in SB3's names; VecNormalize is SB3's own.
`--setting cartpole` uses those of `cartpole.toml` instead, and no normaliser.
"""

import argparse
import json
import sys
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
    "atari": {
        "batch_size": 256,
        "n_epochs": 4,
        "learning_rate": falling(2.5e-4),
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_range": falling(0.1),
        "ent_coef": 0.01,
    },
    "memory": {
        "batch_size": 256,
        "n_epochs": 10,
        "learning_rate": falling(1e-3),
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_range": falling(0.2),
        # Surefoot has the layer of 32 below each LSTM of 32, sb3-contrib above it
        "policy_kwargs": {"lstm_hidden_size": 32, "net_arch": [32]},
    },
    "trpo": {
        "batch_size": 64,
        "n_critic_updates": 10,
        "learning_rate": falling(3e-4),
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "cg_max_steps": 10,
        "target_kl": 0.01,
    },
}
PPO_ONLY: dict[str, Any] = {"ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}


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


def algorithm(library: str, setting: str) -> tuple[Any, str]:
    """The class of the algorithm, and its policy's name."""
    if library == "sbx":
        import sbx

        return sbx.PPO, "MlpPolicy"
    if library == "sb3-contrib":
        import sb3_contrib

        return (sb3_contrib.TRPO, "MlpPolicy") if setting == "trpo" else (sb3_contrib.RecurrentPPO, "MlpLstmPolicy")
    return PPO, "CnnPolicy" if setting == "atari" else "MlpPolicy"


def positions() -> gymnasium.Env[Any, Any]:
    """CartPole's position and angle, without its velocities."""
    inner = gymnasium.make("CartPole-v1")
    space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return gymnasium.wrappers.TransformObservation(inner, lambda seen: seen[[0, 2]], space)


def make_environments(task: str, count: int, setting: str) -> VecEnv:
    """The environments in one process, with the setting's normalisers."""
    if setting == "atari":
        import ale_py
        from stable_baselines3.common.env_util import make_atari_env
        from stable_baselines3.common.vec_env import VecFrameStack

        gymnasium.register_envs(ale_py)
        fixed = {"frameskip": 1, "repeat_action_probability": 0.0}
        return VecFrameStack(make_atari_env(task, count, env_kwargs=fixed), 4)
    make = positions if task == "positions" else lambda: gymnasium.make(task)
    environments: VecEnv = DummyVecEnv([lambda: Monitor(make()) for _ in range(count)])
    return VecNormalize(environments, gamma=0.99) if setting in ("paper", "trpo") else environments


def train(contestant: str, work: dict[str, Any], seed: int) -> tuple[float, Episodes, Any]:
    """Train once; its seconds, its episodes and the model. "sbx, learning on": after a first iteration, which compiles."""
    setting, (library, _, learning_on) = work["setting"], contestant.partition(", ")
    kind, policy = algorithm(library, setting)
    model = kind(
        policy,
        make_environments(work["task"], work["environments"], setting),
        seed=seed,
        n_steps=work["horizon"],
        device="cpu",
        **(({} if setting == "trpo" else PPO_ONLY) | SETTINGS[setting]),
    )
    episodes = Episodes()
    if learning_on:
        model.learn(work["environments"] * work["horizon"])
    start = time.perf_counter()
    model.learn(work["steps"], callback=episodes)
    return time.perf_counter() - start, episodes, model


def last_100(episodes: Episodes) -> float | None:
    """The mean return of the last 100 episodes; None without one."""
    last = [row[1] for row in episodes.rows[-100:]]
    return float(np.mean(last)) if last else None


def train_twice(cell: dict[str, Any], out: Path) -> None:
    """The seconds of two trainings: the first from the start of the process."""
    train(cell["contestant"], cell["work"], cell["seed"])
    first = time.time() - cell["started"]
    seconds, episodes, _ = train(cell["contestant"], cell["work"], cell["seed"])
    out.write_text(json.dumps({"first_seconds": first, "seconds": seconds, "last_100_mean": last_100(episodes)}))


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--cell"]:
        train_twice(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--environments", type=int, default=1)
    parser.add_argument("--horizon", type=int, default=2048)
    parser.add_argument("--setting", choices=["paper", "cartpole"], default="paper")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    work = {name: getattr(args, name) for name in ("task", "environments", "horizon", "setting", "steps")}
    seconds, episodes, model = train("stable-baselines3", work, args.seed)
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
                "last_100_mean": last_100(episodes),
                "seconds": seconds,
                "steps_per_second": model.num_timesteps / seconds,
                "curve": episodes.rows[:: max(1, len(episodes.rows) // 200)],
            }
        )
    )
    partial.rename(args.out)


if __name__ == "__main__":
    main()
