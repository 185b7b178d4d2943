"""Train PureJaxRL's PPO on gymnax's CartPole for one cell of ``benchmarks/tensor.py``, and write the result as JSON.

    JAX/bin/python benchmarks/peers/purejax.py '{"environments": 4096, "steps": 32, "iterations": 8, "seed": 1}' cell.json

The Python needs jax, flax, optax, distrax and gymnax 0.0.9; PUREJAXRL is the folder with PureJaxRL's ``ppo.py`` and
``wrappers.py``. The whole training is one program of XLA: it is compiled first, runs once uncounted and once counted.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any


def settings(cell: dict[str, Any]) -> dict[str, Any]:
    """PureJaxRL's names for the settings of ``benchmarks/tensor.py``."""
    return {
        "ENV_NAME": "CartPole-v1",
        "NUM_ENVS": cell["environments"],
        "NUM_STEPS": cell["steps"],
        "TOTAL_TIMESTEPS": cell["environments"] * cell["steps"] * cell["iterations"],
        "UPDATE_EPOCHS": 4,
        "NUM_MINIBATCHES": 4,
        "LR": 1e-3,
        "ANNEAL_LR": False,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.0,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": "tanh",
    }


def import_ppo() -> Any:
    """PureJaxRL's module, without what its wrappers import for other environments."""
    for name in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"):
        sys.modules[name] = ModuleType(name)
    stub: Any = sys.modules["brax"]
    stub.envs = None
    stub = sys.modules["brax.envs.wrappers.training"]
    stub.EpisodeWrapper = stub.AutoResetWrapper = None
    sys.path.insert(0, os.environ["PUREJAXRL"])
    return importlib.import_module("ppo")


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    cell, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    key = jax.random.PRNGKey(cell["seed"])
    program = jax.jit(import_ppo().make_train(settings(cell))).lower(key).compile()
    jax.block_until_ready(program(key))
    marks = [(time.perf_counter(), time.process_time())]
    result = jax.block_until_ready(program(key))
    marks.append((time.perf_counter(), time.process_time()))
    info = result["metrics"]
    ended = info["returned_episode"][-1]
    out.write_text(json.dumps({"marks": marks, "returns": [float(info["returned_episode_returns"][-1][ended].mean())]}))


if __name__ == "__main__":
    main()
