"""Runs in a forked child that can be killed, and what two finished runs are compared by."""

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefoot.core import fingerprints
from surefoot.diagnostics.metrics import TIMING
from surefoot.errors import SurefootError
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.store.checkpoint import latest_checkpoint, load_checkpoint
from surefoot.store.metrics import read_fingerprints, read_metrics
from surefoot.store.reading import traces_in

RECIPES: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "steps": 2048,
        "objective": {"reuse": {"epochs": 4, "minibatches": 4}},
        "normalise": {"observations": True, "rewards": True},
        "evaluation": {"every": 1024, "episodes": 2},
        "checkpoint": {"every": 300},
        "traces": {"every": 204},
    },
    "Pendulum-v1": {
        "steps": 1024,
        "rollout": {"environments": 4, "steps": 64},
        "objective": {"reuse": {"epochs": 2, "minibatches": 4}, "target_kl": 0.01},
        "evaluation": {"every": 512, "episodes": 1},
        "checkpoint": {"every": 256},
        "traces": {"every": 102},
        "optimizer": {"critic_learning_rate": 1e-3},
    },
}


fingerprints.SHARE = 1e9  # of every iteration, whatever time they take here

FILES = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
"""functions of os by which a run changes what is on the disk, beside writing into a file that is open"""


@contextmanager
def suppress_finished() -> Iterator[None]:
    """A kill may come when nothing is left to do."""
    try:
        yield
    except SurefootError as error:
        if "finished" not in str(error):
            raise


def begin_or_continue(path: Path, task: str, fields: dict[str, Any] | None = None) -> None:
    """Train from the start, or from the last checkpoint, to the end."""
    if (path / "config.toml").exists():
        with suppress_finished():
            api.resume(path)
    else:
        api.start(find_recipe(task, fields or RECIPES[task]), path)


def in_child(
    path: Path,
    task: str,
    before: Callable[[], None] | None = None,
    delay: float | None = None,
    fields: dict[str, Any] | None = None,
) -> int:
    """Run in a child process, killed after ``delay`` seconds if it still runs; its exit code (−9 when it was killed)."""

    def body() -> None:
        torch.set_num_threads(1)
        if before is not None:
            before()
        begin_or_continue(path, task, fields)

    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join(delay)
    if child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    return child.exitcode


def die_at(module: Any, names: str | Sequence[str], call: int, after: bool = False) -> Callable[[], None]:
    """A change to make in the child: SIGKILL itself at the ``call``-th use of a function of the operating system, or of any of
    some.
    """
    count = itertools.count(1)

    def lethal(real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            due = next(count) == call
            if due and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **kwargs)
            finally:
                if due:
                    os.kill(os.getpid(), signal.SIGKILL)

        return function

    def patch() -> None:
        for name in [names] if isinstance(names, str) else names:
            setattr(module, name, lethal(getattr(module, name)))

    return patch


def rows_of(run: Path, aside: Collection[str] = TIMING) -> list[dict[str, Any]]:
    """The rows of a run, without times and speeds."""
    return [{name: value for name, value in row.items() if name not in aside} for row in read_metrics(run / "metrics.jsonl")]


def outcome(path: Path) -> dict[str, Any]:
    """All that must be equal: checkpoints, traces, samples, fingerprints, and the metrics, time and speed aside."""
    final, best = latest_checkpoint(path / "checkpoints"), latest_checkpoint(path / "best")
    files = [*traces_in(path / "traces"), *sorted(path.glob("samples/*.jsonl"))]
    texts = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    parts = {"final": load_checkpoint(final), "best": load_checkpoint(best)}
    return {
        "rows": rows_of(path),
        "fingerprints": read_fingerprints(path).rows,
        "texts": texts,
        "at": (final.name, best.name),
        **parts,
    }


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert np.array_equal(a.numpy(), b.numpy(), equal_nan=True), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{index}]")
    else:
        assert json.dumps(a) == json.dumps(b), f"{where}: {a} != {b}"
