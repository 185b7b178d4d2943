"""Where a launcher starts several processes, none of them trains into a run folder that all would share."""

from pathlib import Path

import pytest

import surefoot
from surefoot.errors import SurefootError

SMALL = ("--steps", "64", "--rollout.environments", "2", "--rollout.steps", "8", "--algorithm", "A2C")
LAUNCHERS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2"},
    "srun": {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    "mpirun, whose daemons srun has started, one on each machine": {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
    },
}
ALONE = {
    "torchrun with one": {"RANK": "0", "WORLD_SIZE": "1"},
    "a batch script of SLURM": {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    "one step of a larger job": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
}
COMMANDS = {
    "train": ("train", "CartPole-v1", "--name", "run"),
    "demo": ("demo", "control"),
    "ladder": ("ladder", "CartPole-v1", "--rung", "0", "--seeds", "1", "--steps", "64"),
    "compare-algorithms": ("compare-algorithms", "CartPole-v1", "--algorithms", "REINFORCE,A2C", "--steps", "64"),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variables in (*LAUNCHERS.values(), *ALONE.values()):
        for name in variables:
            monkeypatch.delenv(name, raising=False)


def launched(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_trains_is_rejected_in_one_line_and_writes_nothing(words, command, monkeypatch):
    launched(monkeypatch, LAUNCHERS["torchrun"])
    code, _, err = command(*words)
    assert code == 2
    assert err.startswith("surefoot: WORLD_SIZE=2: 2 processes would each train the same run into runs/")
    assert err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_training_and_resuming_are_rejected_under_every_launcher(launcher, command, monkeypatch):
    assert command("train", "CartPole-v1", *SMALL, "--run-dir", "run", "--quiet")[0] == 0
    launched(monkeypatch, LAUNCHERS[launcher])
    for rejected in (
        lambda: surefoot.train("CartPole-v1", steps=64, run_dir="new"),
        lambda: surefoot.resume("run", steps=128),
    ):
        with pytest.raises(SurefootError, match=r"processes would each train the same run into (new|run); start one process"):
            rejected()
    assert not Path("new").exists()
    assert command("resume", "run", "--steps", "128")[0] == 2


@pytest.mark.parametrize("variables", ALONE.values(), ids=ALONE)
def test_one_process_trains_whatever_its_launcher_has_set(variables, command, monkeypatch):
    launched(monkeypatch, variables)
    assert command("train", "CartPole-v1", *SMALL, "--run-dir", "run", "--quiet")[0] == 0
