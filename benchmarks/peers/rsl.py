"""Train rsl_rl's PPO on Surefoot's batched Pendulum for one cell of ``benchmarks/tensor.py``, and write the result as JSON.

    PEER/bin/python benchmarks/peers/rsl.py '{"environments": 4096, "steps": 32, "iterations": 5}' cell.json

The Python needs rsl-rl-lib, gymnasium, pydantic, tomli_w and safetensors. The environment is Surefoot's own file, the network
and the settings are those of ``benchmarks/tensor.py``.
"""

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

from surefoot.control.environments.classic import Pendulum


class PendulumRows(VecEnv):
    """The batched Pendulum in rsl_rl's form."""

    def __init__(self, count: int, seed: int) -> None:
        self.inner = Pendulum(count)
        self.num_envs, self.num_actions, self.max_episode_length = count, 1, 200
        self.device: Any = "cpu"
        self.cfg: dict[str, Any] = {}
        self.observations, _ = self.inner.reset(seed=seed)
        self.sums = torch.zeros(count)
        self.returns: deque[float] = deque(maxlen=100)

    @property
    def episode_length_buf(self) -> torch.Tensor:  # type: ignore[override]
        """Steps of the current episodes."""
        return self.inner.elapsed

    def get_observations(self) -> TensorDict:
        """The present observations."""
        return TensorDict({"policy": self.observations}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Act in every row."""
        self.observations, rewards, terminated, truncated, _ = self.inner.step(actions)
        ended = terminated | truncated
        self.sums += rewards
        if ended.any():
            self.returns.extend(self.sums[ended].tolist())
            self.sums[ended] = 0
        return self.get_observations(), rewards, ended.long(), {"time_outs": truncated}


def settings(cell: dict[str, Any]) -> dict[str, Any]:
    """rsl_rl's names for the settings of ``benchmarks/tensor.py``."""
    network = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh"}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    return {
        "num_steps_per_env": cell["steps"],
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "check_for_nan": False,
        "torch_compile_mode": cell.get("compile"),
        "actor": network | {"distribution_cfg": gaussian},
        "critic": dict(network),
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": 4,
            "num_mini_batches": 4,
            "clip_param": 0.2,
            "gamma": 0.9,
            "lam": 0.95,
            "value_loss_coef": 0.5,
            "entropy_coef": 0.0,
            "learning_rate": 1e-3,
            "max_grad_norm": 0.5,
            "use_clipped_value_loss": False,
            "schedule": "fixed",
        },
    }


def main() -> None:
    cell, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(cell["seed"])
    environment = PendulumRows(cell["environments"], cell["seed"])
    runner = OnPolicyRunner(environment, settings(cell), log_dir=None, device="cpu")
    marks: list[tuple[float, float]] = []
    returns: list[float | None] = []

    def log(**_: Any) -> None:
        marks.append((time.perf_counter(), time.process_time()))
        returns.append(sum(environment.returns) / 100 if environment.returns else None)

    runner.logger.log = log
    begin = (time.perf_counter(), time.process_time())
    runner.learn(cell["warm"] + cell["iterations"])
    out.write_text(json.dumps({"begin": begin, "marks": marks, "returns": returns}))


if __name__ == "__main__":
    main()
