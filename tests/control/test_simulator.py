"""MuJoCo's warnings are reported once, with their step, and leave no files."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot.control import environments
from surefoot.control.agent import Agent
from surefoot.control.environments import make_environments
from surefoot.recipes.presets import find_recipe

PROGRAM = """
import sys
from pathlib import Path

import numpy as np

import surefoot
from surefoot.control.environments import make_environments
from surefoot.control.export import export_agent

export_agent(surefoot.load(sys.argv[1]), Path(sys.argv[1]) / "agent.pt2", "torch")
print("exported", file=sys.stderr, flush=True)

environments = make_environments("HalfCheetah-v5", {}, 3, 1)
environments.reset()
for env in environments.environments:
    env.unwrapped.data.qvel[:] = 1e12
environments.step(np.zeros((3, 6), np.float32))
environments.close()
"""


@pytest.mark.slow
def test_an_export_is_silent_an_unstable_simulation_is_shown_once_and_no_log_is_left(tmp_path: Path) -> None:
    """In a process of its own: what is shown where nobody has configured logging, and by C code. An export runs an episode."""
    agent = Agent.for_spaces(find_recipe("HalfCheetah-v5"), *spaces_of("HalfCheetah-v5"), "HalfCheetah-v5")
    agent.save(tmp_path / "agent")
    (tmp_path / "here").mkdir()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "agent")]
    done = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    during_export, mark, after = done.stderr.partition("exported\n")
    assert (during_export, mark) == ("", "exported\n"), done.stderr
    lines = after.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "unstable" in lines[0], "and nothing of the deprecation"
    assert list((tmp_path / "here").iterdir()) == []


def spaces_of(task: str) -> tuple[Any, Any]:
    environments = make_environments(task, {}, 1, 1)
    environments.close()
    return environments.observation_space, environments.action_space


def test_the_deprecation_warning_is_shown_once_when_debugging(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "_logged", set())
    with caplog.at_level(logging.DEBUG, "surefoot.mujoco"):
        make_environments("HalfCheetah-v5", {}, 2, 1).close()
    assert [(record.levelname, "deprecated" in record.message) for record in caplog.records] == [("DEBUG", True)]
