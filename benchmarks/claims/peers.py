"""Cells of benchmarks/control.py, which E8, E10, E11 and E14 share; and E14: PPO beside that of Stable-Baselines3."""

import os
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from record import read

from claims import BENCHMARKS, RESULTS, Bound, Cell, Claim, Experiment, Result, Results, difference
from claims.training import SEVEN, random_cell

PEER_PYTHON = "STABLE_BASELINES3_PYTHON"
"""variable with the Python of an environment that has Stable-Baselines3"""
SEEDS = (1, 2, 3, 4, 5)
STEPS = 1_000_000


def mujoco_file(library: str, task: str, algorithm: str, seed: int) -> Path:
    """Where benchmarks/control.py keeps such a cell."""
    folder = "-".join([task, str(STEPS), "mujoco", *([algorithm] if algorithm != "PPO_CLIP" else [])])
    return RESULTS / folder / f"{library}-{seed}"


def mujoco_cell(library: str, task: str, algorithm: str, seed: int) -> Cell:
    """A cell of benchmarks/control.py: an algorithm with the `mujoco` preset, or SB3's PPO with the same settings."""
    file = mujoco_file(library, task, algorithm, seed)

    def ours(folder: Path) -> Result:
        import control

        named = [] if algorithm == "PPO_CLIP" else [algorithm]
        fixed = {"steps": STEPS, "recipe": "mujoco", "algorithm": named, "set": [], "engine": "compiled", "greedy_episodes": 20}
        control.RESULTS, control.HERE = folder / "results", folder
        control.train_surefoot(task, seed, Namespace(task=[task], **fixed))
        return read(next((folder / "results").glob("*.jsonl")).with_suffix(""))[f"surefoot-{seed}"]

    def theirs(folder: Path) -> Result:
        import json

        if PEER_PYTHON not in os.environ:
            raise RuntimeError(f"{PEER_PYTHON}: is not set; set it to a Python that has stable-baselines3")
        script = [os.environ[PEER_PYTHON], str(BENCHMARKS / "peers" / "sb3.py"), "--task", task, "--seed", str(seed)]
        subprocess.run([*script, "--steps", str(STEPS), "--out", str(folder / "sb3.json")], check=True)
        made: Result = json.loads((folder / "sb3.json").read_text())
        return made

    name = f"{task}-{algorithm}-{seed}" if library == "surefoot" else f"{task}-SB3-{seed}"
    return Cell(name, ours if library == "surefoot" else theirs, file)


def last_returns(results: Results, task: str, who: str, seeds: Sequence[int] = SEEDS) -> list[float]:
    """Mean returns of the last 100 training episodes of the finished seeds."""
    found = (results.get(f"{task}-{who}-{seed}") for seed in seeds)
    return [result["last_100_mean"] for result in found if result is not None]


def scaled_scores(results: Results, task: str, one: str, who: Sequence[str]) -> list[list[float]]:
    """Scores of some contestants on a task: random actions 0, the mean of ``one`` 1."""
    low, high = results[f"{task}-random-1"]["last_100_mean"], float(np.mean(last_returns(results, task, one)))
    return [[(score - low) / (high - low) for score in last_returns(results, task, each)] for each in who]


MARGIN = 0.1


def not_worse(results: Results) -> list[Bound]:
    """The stratified difference over all seeds that exist; each task has at least seeds 1 to 3 on both sides."""
    scaled = [scaled_scores(results, task, "SB3", ("PPO_CLIP", "SB3")) for task in SEVEN]
    ours, theirs = ([task[side] for task in scaled] for side in (0, 1))
    return [difference("normalised score, Surefoot minus Stable-Baselines3", ours, theirs, -MARGIN)]


E14 = Experiment(
    key="E14",
    setting="task-library",
    title="Surefoot beside Stable-Baselines3",
    protocol=(
        "The PPO paper's seven MuJoCo tasks (version 5), 1,000,000 steps, seeds 1 to 5, the same hyperparameters in both "
        "libraries (docs/benchmarks/control.md). Scores per task: random 0, the mean of Stable-Baselines3 1, taken as exact. "
        f"Margin of non-inferiority: {MARGIN}. All cells but PPO_CLIP's on HalfCheetah existed when the margin was stated; it "
        "was not chosen by them."
    ),
    cells={
        cell.name: cell
        for cell in [
            *(random_cell("E14", task) for task in SEVEN),
            *(mujoco_cell("surefoot", task, "PPO_CLIP", seed) for task in SEVEN for seed in SEEDS),
            *(mujoco_cell("stable-baselines3", task, "PPO_CLIP", seed) for task in SEVEN for seed in SEEDS),
        ]
    },
    core_hours=6.0,
    claims=(
        Claim(
            "E14.1",
            "PPO_CLIP scores no less here than Stable-Baselines3's PPO with the same settings.",
            "this library",
            f"the IQM of the normalised score over the seven tasks is at most {MARGIN} below Stable-Baselines3's",
            not_worse,
            {
                "confirmed": "Both compute the same update; what differs are seeds and when normalisers are updated.",
                "undecided": "The seeds spread too widely for this margin.",
            },
            lambda name: name.rpartition("-")[2] in ("1", "2", "3"),
        ),
    ),
)
EXPERIMENTS = (E14,)
