"""Under a launcher, commands for one process are rejected, and one process trains as usual."""

from pathlib import Path

import pytest

import surefoot
from surefoot.errors import SurefootError

SMALL = ("--steps", "64", "--rollout.environments", "2", "--rollout.steps", "8", "--algorithm", "A2C")
LAUNCHERS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2"},
    "srun": {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
}
ALONE = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
"""in a batch script of SLURM"""
COMMANDS = {
    "ladder": ("ladder", "CartPole-v1", "--rung", "0", "--seeds", "1", "--steps", "64"),
    "compare-algorithms": ("compare-algorithms", "CartPole-v1", "--algorithms", "REINFORCE,A2C", "--steps", "64"),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variables in LAUNCHERS.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)


def launched(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_command_of_one_process_is_rejected_in_one_line_and_writes_nothing(launcher, command, monkeypatch):
    launched(monkeypatch, LAUNCHERS[launcher])
    code, _, err = command(*COMMANDS["ladder" if "srun" in launcher else "compare-algorithms"])
    assert code == 2
    assert "processes were started, but this command is one process, and each would write into runs/" in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()


def test_ranks_that_cannot_connect_are_rejected_in_one_line(command, monkeypatch):
    launched(monkeypatch, LAUNCHERS["mpirun"])
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = command("train", "CartPole-v1", *SMALL, "--run-dir", "run")
    assert code == 2
    assert err.startswith("surefoot: MASTER_ADDR, MASTER_PORT: are not set")
    assert err.count("\n") == 1
    with pytest.raises(SurefootError, match="MASTER_ADDR, MASTER_PORT: are not set"):
        surefoot.train("CartPole-v1", steps=64, run_dir="new")
    assert not Path("new").exists()


def test_missing_ranks_are_reported_in_one_line(command, monkeypatch):
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    launched(monkeypatch, {**variables, "SUREFOOT_RANK_TIMEOUT": "1"})
    code, _, err = command("train", "CartPole-v1", *SMALL, "--run-dir", "run")
    assert code == 2
    assert err.startswith("surefoot: ranks: the others did not join within 1 s")


def test_options_of_ranks_that_do_not_fit_are_rejected_in_one_line(command, monkeypatch):
    for words in (("--max-restarts", "1"), ("--ranks", "0"), ("--rank-timeout", "-1"), ("--ranks", "3")):
        if words[1] == "3":
            launched(monkeypatch, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "a", "MASTER_PORT": "b"})
            monkeypatch.setattr("surefoot.cli.main.join_ranks", lambda: None)
        code, _, err = command("train", "CartPole-v1", *SMALL, "--run-dir", "run", *words)
        assert code == 2
        assert words[0] in err
        assert err.count("\n") == 1


def test_one_process_trains_whatever_its_launcher_has_set(command, monkeypatch):
    launched(monkeypatch, ALONE)
    assert command("train", "CartPole-v1", *SMALL, "--run-dir", "run", "--quiet")[0] == 0
