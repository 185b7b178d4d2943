"""The share of a run's time that training waits for its checkpoints.

    python benchmarks/checkpoints.py cartpole sorting

Each run is that of ``surefoot train NAME``; the pause at a checkpoint is what it copies and the wait for the one before.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.runs.session.saving import Saver


class Timer:
    """Wall-clock and CPU seconds of this thread in methods of the saver of checkpoints."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.calls = 0

    def wrap(self, name: str) -> None:
        """Time a method of every saver."""
        method = getattr(Saver, name)

        def timed(saver: Saver, *arguments: Any, **named: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(saver, *arguments, **named)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.thread_time() - cpu
                self.calls += 1

        setattr(Saver, name, timed)


def fields_of(name: str, folder: Path) -> dict[str, Any]:
    """What a recipe lacks: sorting needs a model and problems."""
    if name != "sorting":
        return {}
    from surefoot.language import tasks
    from surefoot.language.data.rows import write_rows

    rows = folder / "rows.jsonl"
    write_rows(rows, tasks.rows("sorting", 512, 1))
    return {"model": "pocket", "data": {"train": str(rows), "held_out": str(rows)}}


def measure(name: str, fields: dict[str, Any]) -> None:
    """Train and print the shares."""
    copying, waiting = Timer(), Timer()
    originals = {method: getattr(Saver, method) for method in ("copy", "wait")}
    copying.wrap("copy")
    waiting.wrap("wait")
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
    try:
        recipe = find_recipe(name, {**fields_of(name, folder), **fields})
        wall, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
        api.start(recipe, folder / "run")
        wall, cpu, own = time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - own
    finally:
        shutil.rmtree(folder)
        for method, original in originals.items():
            setattr(Saver, method, original)
    shares = copying.wall / wall, copying.cpu / own
    print(f"{name}: {copying.calls} copies, pause {copying.wall:.2f} s of {wall:.1f} s = {shares[0]:.2%}, CPU of training in")
    print(f"  copies {copying.cpu:.2f} s of {own:.1f} s = {shares[1]:.2%}, all threads {cpu:.1f} s; end {waiting.wall:.2f} s")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="presets or recipes")
    parser.add_argument("--steps", type=int, help="other steps than the recipe's")
    arguments = parser.parse_args()
    for name in arguments.names:
        measure(name, {} if arguments.steps is None else {"steps": arguments.steps})


if __name__ == "__main__":
    main()
