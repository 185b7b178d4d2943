"""An untrusted working folder: commands that only read import nothing from it; commands that run a task find it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import surefoot
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.store.folder import RunFolder
from surefoot.store.metrics import read_metrics

SCRIPT = [sys.executable, "-P", "-c", "from surefoot.cli.main import main; main()"]
"""as the installed command: the working folder is not on its path"""
MODULE = [sys.executable, "-m", "surefoot"]
TRAPS = ("json", "torch", "click", "dataclasses", "sitecustomize", "numpy", "surefoot_plugin", "multiprocessing", "pickle")
ROBOT = """
import subprocess
import sys
import gymnasium
import tools


def make():
    subprocess.run([sys.executable, "-c", "import tools"], check=True)
    return tools.wrapped(gymnasium.make("CartPole-v1"))
"""


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """A run whose folder holds modules that Python would take for its own."""
    path = tmp_path_factory.mktemp("strange") / "run"
    api.start(find_recipe("CartPole-v1", {"steps": 256, "evaluation": {"episodes": 1}}), path)
    for name in TRAPS:
        (path / f"{name}.py").write_text(f"open('sprung-{name}', 'w').close()\nraise SystemExit('{name} of a stranger')\n")
    return path


def command(start, *words, folder):
    return subprocess.run([*start, *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


EVALUATE = ["evaluate", ".", "--episodes", "1"]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (MODULE, EVALUATE),
        pytest.param(MODULE, ["check", "."], marks=pytest.mark.release),
        pytest.param(SCRIPT, EVALUATE, marks=pytest.mark.release),
    ],
)
def test_a_command_imports_nothing_from_the_folder_that_it_reads_in(strange, start, words):
    done = command(start, *words, folder=strange)
    assert done.returncode in (0, 1), done.stderr
    assert [path.name for path in strange.iterdir() if path.name.startswith("sprung")] == []


@pytest.mark.parametrize(("start", "backend"), [pytest.param(MODULE, "loop", marks=pytest.mark.release), (SCRIPT, "workers")])
def test_a_task_in_the_working_folder_is_found_with_the_modules_beside_it(tmp_path, start, backend):
    """In workers too; and what the task starts itself finds the working folder as without us."""
    (tmp_path / "robot.py").write_text(ROBOT)
    (tmp_path / "tools.py").write_text("def wrapped(env):\n    return env\n")
    (tmp_path / "json.py").write_text("raise SystemExit('not of the library')")
    words = ["--steps", "16", "--rollout.environments", "2", "--rollout.steps", "8", "--objective.reuse.minibatches", "4"]
    words += ["--rollout.backend", backend, "--evaluation.episodes", "0", "--run-dir", "run", "--quiet"]
    done = command(start, "train", "robot:make", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.release
def test_cells_in_processes_of_their_own_find_a_task_in_the_working_folder(tmp_path):
    (tmp_path / "robot.py").write_text(ROBOT)
    (tmp_path / "tools.py").write_text("def wrapped(env):\n    return env\n")
    (tmp_path / "pickle.py").write_text("raise SystemExit('not of the library')")
    words = ["--steps", "256", "--seeds", "2", "--jobs", "2", "--episodes", "1", "--run-dir", "cells", "--algorithms", "A2C"]
    done = command(SCRIPT, "compare-algorithms", "robot:make", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr


class Wandering(gymnasium.Env):
    """Goes to a folder of its own when it is made and in every step, as simulators with scratch files do."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, scratch):
        self.scratch = scratch
        os.chdir(scratch)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        os.chdir(self.scratch)
        return np.zeros(1, np.float32), 1.0, False, True, {}


def test_a_run_stays_in_its_folder_when_an_environment_changes_the_working_folder(tmp_path, monkeypatch):
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    monkeypatch.chdir(home)
    small = {
        "preset": "none",
        "rollout": {"environments": 2, "steps": 16},
        "objective": {"reuse": {"epochs": 1, "minibatches": 2}},
    }
    begin = {**small, "display": False, "steps": 64, "evaluation": {"episodes": 0}, "checkpoint": {"every": 32}}
    surefoot.train(lambda: Wandering(scratch), run_dir="run", **begin)
    assert Path.cwd() == home
    assert surefoot.resume("run", task=lambda: Wandering(scratch), steps=128, display=False).recipe.steps == 128
    assert Path.cwd() == home
    assert list(scratch.iterdir()) == []
    assert json.loads((home / "run" / "environment.json").read_text())["working_folder"] == str(home)
    assert [row["steps"] for row in read_metrics(home / "run" / "metrics.jsonl")] == [32, 64, 96, 128]


def test_messages_name_a_run_as_the_user_did(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.reserve(tmp_path / "runs" / "a", shown=Path("runs/a"))
    assert folder.as_shown(f"the model is in {folder.path / 'model'}") == "the model is in runs/a/model"
    folder.close()
