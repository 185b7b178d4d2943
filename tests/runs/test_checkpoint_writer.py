"""Checkpoints are written during training from copies, one after another; an error of the writer ends the run."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from killing import assert_same, in_child, outcome
from safetensors.torch import save

import surefoot
from surefoot import Callback, SurefootError
from surefoot.runs import session as sessions
from surefoot.runs.session import saving
from surefoot.store import checkpoint as checkpoints
from surefoot.store.checkpoint import checkpoints_in, load_checkpoint, save_checkpoint, take_snapshot, write_snapshot
from surefoot.store.manifest import fault_of
from surefoot.store.metrics import read_metrics
from surefoot.store.tensors import tensor_bytes, write_tensors

FIELDS = {
    "steps": 512,
    "rollout": {"environments": 4, "steps": 16},
    "objective": {"reuse": {"epochs": 2, "minibatches": 1}},
    "optimizer": {"learning_rate": 1e-2},
    "normalise": {"observations": True, "rewards": True},
    "evaluation": {"episodes": 1, "every": 256},
    "checkpoint": {"every": 128, "keep": 9},
}


def train(run, **fields):
    return surefoot.train("CartPole-v1", run_dir=run, **{**FIELDS, **fields})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    run = tmp_path_factory.mktemp("plain") / "run"
    train(run)
    return run


class Held:
    """Writes of one checkpoint that begin only when training has reached some steps."""

    def __init__(self, name, steps):
        self.name, self.steps, self.reached = name, steps, threading.Event()
        self.held, self.when_written = [], {}

    def write(self, folder, snapshot):
        if folder.name == self.name and folder.parent.name == "checkpoints":
            assert self.reached.wait(60), "training waits for the writer"
            self.held.append(folder.name)
        write_snapshot(folder, snapshot)

    def on_steps(self, steps):
        if steps >= self.steps:
            self.reached.set()


class Watching(Callback):
    def __init__(self, held):
        self.held, self.lines = held, []

    def on_iteration(self, run, metrics):
        self.lines.append(("iteration", run.steps))
        self.held.on_steps(run.steps)

    def on_checkpoint(self, run, path):
        assert fault_of(path) is None
        self.lines.append(("checkpoint", path.name))


def test_training_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it(plain, tmp_path, monkeypatch):
    held = Held("256", 320)  # the one after the first, which is waited for
    watching = Watching(held)
    monkeypatch.setattr(saving, "write_snapshot", held.write)
    train(tmp_path / "run", callbacks=watching)
    assert held.held == ["256"]
    assert watching.lines.index(("checkpoint", "256")) > watching.lines.index(("iteration", 320))
    assert [name for what, name in watching.lines if what == "checkpoint"] == ["128", "256", "384", "512"]
    for steps in ("128", "256", "512"):
        parts = [load_checkpoint(run / "checkpoints" / steps) for run in (plain, tmp_path / "run")]
        assert_same(*parts)


def test_a_checkpoint_waits_for_the_previous_one(tmp_path, monkeypatch):
    writing, order = threading.Lock(), []

    def slow(folder, snapshot):
        assert writing.acquire(blocking=False), "two at once"
        time.sleep(0.2)
        write_snapshot(folder, snapshot)
        order.append((folder.parent.name, folder.name))
        writing.release()

    monkeypatch.setattr(saving, "write_snapshot", slow)
    train(tmp_path / "run")
    numbered = [name for place, name in order if place == "checkpoints"]
    assert numbered == ["128", "256", "384", "512"]
    assert order.index(("best", "256")) < order.index(("checkpoints", "256"))
    assert [path.name for path in checkpoints_in(tmp_path / "run" / "checkpoints")] == numbered, "the end waits for the last"


@pytest.mark.parametrize("name", ["256", "512"])
def test_an_error_of_the_writer_ends_the_run_and_loses_nothing(tmp_path, monkeypatch, name):
    def full(folder, snapshot):
        if folder.name == name and folder.parent.name == "checkpoints":
            raise SurefootError(f"{folder}: a checkpoint is not saved (No space left on device)")
        write_snapshot(folder, snapshot)

    monkeypatch.setattr(saving, "write_snapshot", full)
    with pytest.raises(SurefootError, match=f"{name}: a checkpoint is not saved"):
        train(tmp_path / "run")
    last = str(int(name) - 128)
    assert checkpoints_in(tmp_path / "run" / "checkpoints")[-1].name == last
    assert not list((tmp_path / "run").glob("**/.*.tmp"))
    monkeypatch.undo()
    surefoot.resume(tmp_path / "run")


def test_a_kill_while_a_checkpoint_waits_to_be_written_continues_from_the_one_before(plain, tmp_path):
    def kill_later():
        def never(folder, snapshot):
            if folder.name == "384":
                time.sleep(60)
            write_snapshot(folder, snapshot)

        class Killer(Callback):
            def on_iteration(self, run, metrics):
                if run.steps >= 448:
                    os.kill(os.getpid(), signal.SIGKILL)

        saving.write_snapshot = never
        before = sessions.Session.__init__

        def with_killer(self, *arguments, **named):
            before(self, *arguments, **named)
            self.callbacks = [Killer()]

        sessions.Session.__init__ = with_killer

    assert in_child(tmp_path / "run", "CartPole-v1", before=kill_later, fields=FIELDS) == -signal.SIGKILL
    assert checkpoints_in(tmp_path / "run" / "checkpoints")[-1].name == "256"
    surefoot.resume(tmp_path / "run")
    assert_same(outcome(plain), outcome(tmp_path / "run"))


@pytest.mark.parametrize("fault", ["on the disk", "in what is written"])
def test_a_run_reads_its_first_checkpoint_back_before_it_goes_on(fault, tmp_path, monkeypatch):
    def write(folder, snapshot):
        write_snapshot(folder, snapshot)
        if fault == "on the disk":
            file = folder / "learner.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"\x55")

    def write_tensor(tensors, path):
        write_tensors({name: x * 0 if fault == "in what is written" else x for name, x in tensors.items()}, path)

    monkeypatch.setattr(saving, "write_snapshot", write)
    monkeypatch.setattr(checkpoints, "write_tensors", write_tensor)
    with pytest.raises(SurefootError, match=r"checkpoints/128: can't be read back as it was saved \(\w+\.safetensors"):
        train(tmp_path / "run", evaluation={"episodes": 0})
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2, "nothing was trained on top of it"


def test_an_error_of_training_keeps_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    class Broken(Callback):
        def on_iteration(self, run, metrics):
            if run.steps > 256:
                raise LookupError("mine")

    def slow(folder, snapshot):
        time.sleep(0.3)
        write_snapshot(folder, snapshot)

    monkeypatch.setattr(saving, "write_snapshot", slow)
    with pytest.raises(LookupError, match="mine"):
        train(tmp_path / "run", callbacks=Broken())
    assert checkpoints_in(tmp_path / "run" / "checkpoints")[-1].name == "256"


def test_a_snapshot_shares_no_memory_with_the_state(tmp_path):
    weight, table = torch.arange(6.0).view(2, 3), {"episodes": [1, 2]}
    parts = {"agent": {"weight": weight, "tied": weight, "part": weight[:, 1]}, "state": table}
    save_checkpoint(tmp_path / "before", parts)
    snapshot = take_snapshot(parts)
    weight.zero_()
    table["episodes"].append(3)
    write_snapshot(tmp_path / "after", snapshot)
    assert_same(load_checkpoint(tmp_path / "before"), load_checkpoint(tmp_path / "after"))


@pytest.mark.parametrize("last", [torch.float32, torch.bfloat16], ids=["NumPy has the types", "NumPy lacks one"])
def test_tensors_are_written_as_safetensors_writes_them(last: torch.dtype, tmp_path: Path) -> None:
    dtypes = (torch.int64, torch.bool, torch.uint8, torch.float16, torch.float64)
    tensors = {f"{9 - size}": torch.ones(size, 2).to(dtype) for size, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(2.0), "last": torch.zeros(3, dtype=last)}
    assert tensor_bytes(tensors, {"a": "b"}) == save(tensors, {"a": "b"})
    write_tensors(tensors, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == save(tensors)


def test_writing_tensors_of_many_sizes_does_not_grow_memory() -> None:
    """Lengths of episodes differ from checkpoint to checkpoint; ctypes would keep a type for each."""
    before = len(ctypes._pointer_type_cache)
    for size in range(1000, 1100):
        tensor_bytes({"x": torch.zeros(size)})
    assert len(ctypes._pointer_type_cache) == before
