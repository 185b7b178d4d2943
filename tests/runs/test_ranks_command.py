"""``--ranks`` on the command line: errors in one line, and automatic restarts that continue exactly."""

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from killing import rows_of as every_row_of

from surefoot.diagnostics.metrics import TIMING

pytestmark = pytest.mark.slow

KILLS = [pytest.param(*each, marks=pytest.mark.release) for each in (("cartpole", 10), ("sorting", 6), ("sharded sorting", 4))]
ROWS = ("--data.train", "rows.jsonl", "--data.held-out", "rows.jsonl", "--evaluation.rows", "16")
TASKS = {
    "cartpole": ("cartpole", "--steps", "12_000", "--checkpoint-every", "1024"),
    "sorting": (
        "sorting",
        "--model",
        "pocket",
        *ROWS,
        "--steps",
        "960",
        "--checkpoint-every",
        "64",
        "--sampling.prompts",
        "32",
    ),
}
TASKS["sharded sorting"] = (*TASKS["sorting"], "--sharding", "full")


def started(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "surefoot", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=400)
    return process.returncode, out, err


rows_of = partial(every_row_of, aside={*TIMING, "tokens_per_second", "seconds_sampling", "seconds_scoring"})


def rows_in(run: Path) -> int:
    return len(rows_of(run)) if (run / "metrics.jsonl").exists() else 0


def kill_a_rank(number: int, agent: "subprocess.Popen[str]") -> None:
    """Kill a rank as soon as there is one: between two attempts there is none."""
    limit = time.monotonic() + 200
    while time.monotonic() < limit:
        try:
            os.kill(process_of_rank(number, agent.pid), signal.SIGKILL)
            return
        except (AssertionError, ProcessLookupError):
            time.sleep(0.05)
    raise AssertionError(f"no rank {number} to kill")


def process_of_rank(number: int, parent: int) -> int:
    """The process of a rank that a command has started."""
    for folder in Path("/proc").iterdir():
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if above == parent and f"RANK={number}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"no rank {number}")


@pytest.mark.parametrize(("task", "kills"), [("cartpole", 1), *KILLS])
def test_each_kill_of_any_rank_costs_a_restart_and_the_run_is_the_undisturbed_one(task, kills, tmp_path):
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed of the kills:", seed)
    rng = random.Random(seed)
    if task != "cartpole":
        made = ended(started(tmp_path, "data", "make", "sorting", "--difficulty", "3", "--rows", "64", "--out", "rows.jsonl"))
        assert made[0] == 0, made[2]
    words = ("train", *TASKS[task], "--ranks", "2")
    code, _, err = ended(started(tmp_path, *words, "--quiet", "--name", "whole"))
    assert code == 0, err
    run = started(tmp_path, *words, "--name", "killed", "--max-restarts", str(kills))
    folder = tmp_path / "runs" / "killed"
    for _ in range(kills):
        limit, before = time.monotonic() + 200, rows_in(folder)
        until = before + rng.randint(0, 2)
        while rows_in(folder) <= until and time.monotonic() < limit:  # fewer after a restart: it goes back to a checkpoint
            assert run.poll() is None, run.communicate()
            until = min(until, rows_in(folder) + 3)
            time.sleep(0.02)
        kill_a_rank(rng.randrange(2), run)
    code, out, err = ended(run)
    assert code == 0, err
    assert f"restart {kills}, because a rank died: all continue from step" in out
    assert rows_of(tmp_path / "runs" / "killed") == rows_of(tmp_path / "runs" / "whole")
    for command in (("resume", "killed", "--steps", "16_000"), ("evaluate", "killed")):
        code, _, err = ended(started(tmp_path, *command))
        assert code == 0, err


def test_without_restarts_a_killed_rank_is_one_line_and_the_run_resumes_on_one(tmp_path):
    run = started(tmp_path, "train", *TASKS["cartpole"], "--ranks", "2", "--quiet", "--name", "run")
    folder = tmp_path / "runs" / "run"
    while not (folder / "checkpoints").exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    os.kill(process_of_rank(1, run.pid), signal.SIGKILL)
    code, _, err = ended(run)
    assert code == 2
    assert err.startswith("surefoot: rank 1 was ended by SIGKILL")
    assert err.count("\n") == 1
    code, _, err = ended(started(tmp_path, "resume", "run", "--quiet"))
    assert code == 0, err


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGUSR1, marks=pytest.mark.release)])
def test_a_signal_to_the_command_saves_and_stops_in_one_line(number, tmp_path):
    run = started(tmp_path, "train", *TASKS["cartpole"], "--steps", "100_000", "--ranks", "2", "--quiet", "--name", "run")
    while not (tmp_path / "runs" / "run" / "checkpoints").exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(number)
    code, _, err = ended(run)
    assert code == 130
    lines = [line for line in err.splitlines() if not line.startswith("stopping after this ")]  # Ctrl-C alone says it
    assert [line for line in lines if "stopped at step" in line and "surefoot resume" in line]
    assert len(lines) == 1


def test_bad_input_of_ranks_is_one_line_and_leaves_nothing(tmp_path):
    for words, expected in (
        (("--rollout.environments", "1"), "rollout.environments=1: too few for 2 ranks"),
        (("--optimizer.learning-rate", "fast"), "optimizer.learning_rate"),
        (("--task-file",), "--task-file"),
    ):
        code, _, err = ended(started(tmp_path, "train", "cartpole", "--ranks", "2", *words))
        assert code == 2
        assert expected in err
        assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.release
def test_torchrun_starts_the_same_run_as_ranks(tmp_path):
    words = ("train", "cartpole", "--steps", "2048", "--quiet")
    code, _, err = ended(started(tmp_path, *words, "--ranks", "2", "--name", "ours"))
    assert code == 0, err
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    outside = subprocess.run(
        [*torchrun, "-m", "surefoot", *words, "--name", "torchrun"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert outside.returncode == 0, outside.stderr
    assert rows_of(tmp_path / "runs" / "torchrun") == rows_of(tmp_path / "runs" / "ours")
