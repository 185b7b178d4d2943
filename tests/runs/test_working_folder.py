"""The working folder may be a stranger's: what only reads imports nothing from it. What runs a task of one's own finds it."""

import subprocess
import sys

import pytest

from surefoot.recipes.presets import find_recipe
from surefoot.runs import api

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


def surefoot(start, *words, folder):
    return subprocess.run([*start, *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


EVALUATE = ["evaluate", ".", "--episodes", "1"]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (MODULE, EVALUATE),
        pytest.param(MODULE, ["check", "."], marks=pytest.mark.slow),
        pytest.param(SCRIPT, EVALUATE, marks=pytest.mark.slow),
    ],
)
def test_a_command_imports_nothing_from_the_folder_that_it_reads_in(strange, start, words):
    done = surefoot(start, *words, folder=strange)
    assert done.returncode in (0, 1), done.stderr
    assert [path.name for path in strange.iterdir() if path.name.startswith("sprung")] == []


@pytest.mark.parametrize(("start", "backend"), [pytest.param(MODULE, "loop", marks=pytest.mark.slow), (SCRIPT, "workers")])
def test_a_task_in_the_working_folder_is_found_with_the_modules_beside_it(tmp_path, start, backend):
    """In workers too; and what the task starts itself finds the working folder as without us."""
    (tmp_path / "robot.py").write_text(ROBOT)
    (tmp_path / "tools.py").write_text("def wrapped(env):\n    return env\n")
    (tmp_path / "json.py").write_text("raise SystemExit('not of the library')")
    words = ["--steps", "16", "--rollout.environments", "2", "--rollout.steps", "8", "--objective.reuse.minibatches", "4"]
    words += ["--rollout.backend", backend, "--evaluation.episodes", "0", "--run-dir", "run", "--quiet"]
    done = surefoot(start, "train", "robot:make", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_cells_in_processes_of_their_own_find_a_task_in_the_working_folder(tmp_path):
    (tmp_path / "robot.py").write_text(ROBOT)
    (tmp_path / "tools.py").write_text("def wrapped(env):\n    return env\n")
    (tmp_path / "pickle.py").write_text("raise SystemExit('not of the library')")
    words = ["--steps", "256", "--seeds", "2", "--jobs", "2", "--episodes", "1", "--run-dir", "cells", "--algorithms", "A2C"]
    done = surefoot(SCRIPT, "compare-algorithms", "robot:make", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
