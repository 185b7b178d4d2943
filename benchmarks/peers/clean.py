"""Run a script of CleanRL twice for one cell of ``benchmarks/speed.py``, and write the seconds of both as JSON.

    PEER/bin/python benchmarks/peers/clean.py CELL cell.json

CleanRL is written for Gymnasium 0.29. Its scripts run unchanged in the Gymnasium of the other cells, with the argument that
``TransformObservation`` requires now; they print returns only with the old one, so none is kept.
"""

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import torch

FLAGS: dict[str, list[str]] = {
    "paper": ["--update-epochs", "10", "--num-minibatches", "32", "--learning-rate", "3e-4", "--gamma", "0.99"],
    "cartpole": ["--update-epochs", "20", "--num-minibatches", "1", "--learning-rate", "1e-3", "--gamma", "0.98"],
}
SCRIPTS = {"paper": "ppo_continuous_action.py", "cartpole": "ppo.py"}


def train(cell: dict[str, Any]) -> None:
    """Run the script as its command line does."""
    work = cell["work"]
    sizes = {"num-envs": work["environments"], "num-steps": work["horizon"], "total-timesteps": work["steps"]}
    named = {"env-id": work["task"], "seed": cell["seed"], **sizes}
    flags = [part for name, value in named.items() for part in (f"--{name}", str(value))]
    setting = work["setting"]
    script = str(Path(cell["cleanrl"]) / SCRIPTS[setting])
    sys.argv = [script, *flags, *FLAGS[setting], "--no-cuda", "--no-clip-vloss", "--ent-coef", "0"]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    transform = gymnasium.wrappers.TransformObservation
    gymnasium.wrappers.TransformObservation = lambda env, function: transform(env, function, env.observation_space)
    cell, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    train(cell)
    first = time.time() - cell["started"]
    start = time.perf_counter()
    train(cell)
    out.write_text(json.dumps({"first_seconds": first, "seconds": time.perf_counter() - start, "last_100_mean": None}))


if __name__ == "__main__":
    main()
