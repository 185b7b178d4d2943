"""Cells: trainings that belong together, each in a run folder of its own, one after the other or side by side.

A folder of cells holds what was asked for (request.json) and a run folder per cell. The same request again continues: what is
finished is skipped, what was interrupted resumes exactly. Another request is refused there.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import filelock

from surefoot.compare.progress import Overall, Reporting
from surefoot.compare.summary import summary
from surefoot.control.environments.looped import VectorEnvironments
from surefoot.control.world import ControlWorld
from surefoot.core.distributed import check_alone
from surefoot.core.rollout import Metrics
from surefoot.errors import Interrupted, SurefootError
from surefoot.files import read_table, write_text
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.import_object import python_safe_path, unset_python_safe_path
from surefoot.recipes.reading import to_table
from surefoot.runs import api
from surefoot.runs.checkpoint import checkpoints_in, latest_checkpoint
from surefoot.runs.folder import differences
from surefoot.runs.session import Session, StopOnSignal
from surefoot.runs.trackers.metrics_jsonl import read_metrics

RESULT = "result.json"


@dataclass(frozen=True)
class Cell:
    """One training: an algorithm on one seed."""

    label: str
    recipe: ControlRecipe
    until: int | None = None
    """stop at this step, short of the recipe's budget (whose schedules it follows)"""

    @property
    def name(self) -> str:
        """Of its run folder."""
        return f"{self.label}-seed{self.recipe.seed}"

    @property
    def steps(self) -> int:
        """How far it trains."""
        return self.recipe.steps if self.until is None else self.until


def seeds_of(recipe: ControlRecipe, count: int) -> list[ControlRecipe]:
    """The recipe with seed, seed + 1, …"""
    return [recipe.model_copy(update={"seed": recipe.seed + i}) for i in range(count)]


def check_trainable(recipes: Mapping[str, ControlRecipe], episodes: int) -> None:
    """Raise SurefootError, naming which, for a recipe that could not even begin, or not be compared; nothing is written.

    episodes   of the greedy evaluation of each final agent
    """
    for name, recipe in recipes.items():
        try:
            if (patience := recipe.evaluation.patience) is not None and recipe.evaluation.episodes:
                raise SurefootError(
                    f"evaluation.patience={patience}: would end a training before the budget that all of them have; set 'none'"
                )
            world = ControlWorld(recipe)
            try:
                if episodes and isinstance(world.environments, VectorEnvironments) and recipe.rollout.backend == "loop":
                    raise SurefootError(
                        f"episodes={episodes}: final agents are judged in single environments, and task={recipe.task!r} makes "
                        "a vector environment; set episodes = 0"
                    )
                Session(recipe, world, None, Reporting(lambda steps: None, lambda line: None))
            finally:
                world.close()
        except SurefootError as error:
            raise SurefootError(f"{name}: {error}") from None


def default_folder(command: str, recipe: ControlRecipe) -> Path:
    """Where a comparison goes unless it is told: the same for the same request, so that repeating it continues."""
    return Path("runs") / f"{command}-{recipe.task.rpartition('/')[2].replace(':', '-').lower()}-{recipe.steps}"


@contextlib.contextmanager
def folder_of(folder: Path, request: dict[str, Any]) -> Iterator[None]:
    """Hold the folder for this request, beginning or continuing it.

    Raises SurefootError when the folder holds something else, was begun with another request, or is in use, and where a
    launcher has started several processes.
    """
    check_alone(folder)
    file, wanted = folder / "request.json", json.loads(json.dumps(request))
    if folder.exists() and not file.exists() and (not folder.is_dir() or any(p.name != ".lock" for p in folder.iterdir())):
        raise SurefootError(f"{folder}: holds a run or other files; choose another --run-dir")
    lock = filelock.FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise SurefootError(f"{folder}: in use by another process; wait for it, or stop it") from None
    except OSError as error:
        raise SurefootError(f"{folder}: can't be written ({error.strerror}); choose another --run-dir") from None
    try:
        if file.exists():
            changed = differences(_read(file), wanted)
            if changed:
                brief = [line if len(line) < 100 else line.partition(":")[0] for line in changed]
                shown = "; ".join(brief[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
                raise SurefootError(
                    f"{folder}: was begun with another request ({shown}); repeat that one, or choose another --run-dir"
                )
        else:
            write_text(file, json.dumps(wanted, indent=1))
        yield
    finally:
        lock.release()


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_table(file)
    except SurefootError as error:
        raise SurefootError(f"{error}; choose another --run-dir") from None


def recipe_tables(recipes: Mapping[str, ControlRecipe]) -> dict[str, Any]:
    """Recipes as a request holds them."""
    return {name: to_table(recipe) for name, recipe in recipes.items()}


# ---- one cell ---------------------------------------------------------------------------------------------------------


def train_cell(
    folder: Path,
    cell: Cell,
    episodes: int,
    on_steps: Callable[[int], None],
    on_line: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train a cell to its end, from wherever it is, judge the final agent greedily, and keep both as its result.

    episodes   of the greedy evaluation; 0 for none
    stop       asked after each iteration; True saves and raises Interrupted
    """
    path = folder / cell.name
    if (path / RESULT).exists():
        return _read(path / RESULT)
    if _reached(path) < cell.steps:
        _train(path, cell, Reporting(on_steps, on_line), stop)
        if _reached(path) < cell.steps:
            raise Interrupted(f"{cell.name}: stopped at step {_reached(path)}")
    checkpoint = latest_checkpoint(path / "checkpoints")
    assert checkpoint is not None, "a run that reached its end has a checkpoint"
    result = {"label": cell.label, "seed": cell.recipe.seed, **summary(read_metrics(path / "metrics.jsonl"))}
    if episodes and cell.until is None:
        judged = api.evaluate(api.load(checkpoint), episodes=episodes, seed=cell.recipe.seed)
        result |= {"greedy_mean": judged.mean_return, "greedy_std": judged.std_return, "greedy_episodes": episodes}
    write_text(path / RESULT, json.dumps(result))
    return result


def _train(path: Path, cell: Cell, display: Reporting, stop: Callable[[], bool]) -> None:
    def callback(metrics: Metrics) -> bool:
        return (metrics["steps"] or 0) >= cell.steps or stop()

    if not (path / "config.toml").exists():
        shutil.rmtree(path, ignore_errors=True)  # what a kill left of a run that had not begun
        api.start(cell.recipe, path, callback=callback, display=display)
        return
    with contextlib.suppress(filelock.Timeout), filelock.FileLock(path / ".lock", timeout=30):
        pass  # a cell whose parent was killed stops by itself, but not before its iteration is done
    api.resume(path, callback=callback, display=display)


def _reached(path: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(checkpoint.name) for checkpoint in checkpoints_in(path / "checkpoints")), default=0)


# ---- all cells --------------------------------------------------------------------------------------------------------


def run_cells(folder: Path, cells: Sequence[Cell], episodes: int, jobs: int, overall: Overall) -> list[dict[str, Any]]:
    """Train every cell that is not finished, ``jobs`` at a time, and give all results in the cells' order.

    Raises Interrupted after a signal, once what was running is saved, and SurefootError, naming the first, when cells failed;
    the others are trained all the same.
    """
    results: dict[str, dict[str, Any]] = {}
    for cell in cells:
        if (folder / cell.name / RESULT).exists():
            results[cell.name] = _read(folder / cell.name / RESULT)
            overall.skip(cell.name, cell.steps)
        else:
            overall.skip(cell.name, _reached(folder / cell.name))
    if results:
        overall.say(f"{len(results)} of {len(cells)} trainings were finished before")
    failures: dict[str, str] = {}

    def finished(cell: Cell, result: dict[str, Any]) -> None:
        results[cell.name] = result
        overall.step(cell.name, cell.steps)
        overall.say(f"[{len(results)}/{len(cells)}] {finished_line(cell, result)}; {overall.left() or 'nothing left'}")

    def failed(cell: Cell, message: str) -> None:
        failures[cell.name] = message
        overall.say(f"{cell.name} failed: {message}")

    waiting = [cell for cell in cells if cell.name not in results]
    try:
        run = _here if jobs == 1 else _side_by_side
        run(folder, waiting, episodes, jobs, overall, finished, failed)
        if len(results) + len(failures) < len(cells):  # a training's own process was told to stop
            raise Interrupted("stopped")
    except (Interrupted, KeyboardInterrupt):
        raise Interrupted(
            f"stopped with {len(results)} of {len(cells)} trainings finished; repeat the command to continue"
        ) from None
    if failures:
        name, message = next(iter(failures.items()))
        rest = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise SurefootError(f"{folder / name}{rest}: {message}; the other trainings are kept, repeat the command to continue")
    return [results[cell.name] for cell in cells]


def finished_line(cell: Cell, result: Mapping[str, Any]) -> str:
    """How a cell ended."""
    score = result["last_100_mean"]
    parts = [f"return {score:,.1f}" if score is not None else "no episode finished"]
    if "greedy_mean" in result:
        parts.append(f"greedy {result['greedy_mean']:,.1f}")
    where = f"after {result['steps']:,} steps in {result['seconds']:,.0f} s"
    return f"{cell.label}, seed {cell.recipe.seed}: {', '.join(parts)} {where}"


Finished = Callable[[Cell, dict[str, Any]], None]
Failed = Callable[[Cell, str], None]


def _here(
    folder: Path, cells: Sequence[Cell], episodes: int, jobs: int, overall: Overall, finished: Finished, failed: Failed
) -> None:
    """One after the other, in this process."""
    for cell in cells:
        try:
            result = train_cell(folder, cell, episodes, lambda steps, c=cell: overall.step(c.name, steps), overall.say)  # type: ignore[misc]
        except SurefootError as error:
            failed(cell, str(error))
        else:
            finished(cell, result)


def _side_by_side(
    folder: Path, cells: Sequence[Cell], episodes: int, jobs: int, overall: Overall, finished: Finished, failed: Failed
) -> None:
    """Each in a process of its own, ``jobs`` at a time. A signal is passed on once, and every cell saves before it stops."""
    context = multiprocessing.get_context("spawn")
    waiting, running = list(cells), dict[Connection, tuple[Cell, Any]]()
    with StopOnSignal() as signals:
        told = False
        try:
            while running or (waiting and not signals.requested):
                while waiting and len(running) < jobs and not signals.requested:
                    cell = waiting.pop(0)
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_child, args=(theirs, folder, cell, episodes))
                    with python_safe_path(), _ignoring_interrupts():
                        process.start()
                    theirs.close()
                    running[ours] = (cell, process)
                if signals.requested and not told:
                    told = True
                    for _, process in running.values():
                        process.terminate()
                for connection in wait(list(running), timeout=0.2):
                    assert isinstance(connection, Connection)
                    _hear(connection, running, overall, finished, failed)
        finally:
            for _, process in running.values():
                process.terminate()
                process.join()
        if signals.requested:
            raise Interrupted("stopped")


def _hear(
    connection: Connection, running: dict[Connection, tuple[Cell, Any]], overall: Overall, finished: Finished, failed: Failed
) -> None:
    """Take one message of a child; its end, if it has ended."""
    cell, process = running[connection]
    try:
        kind, content = connection.recv()
    except EOFError:
        kind, content = "failed", None
    if kind == "steps":
        overall.step(cell.name, content)
        return
    if kind == "line":
        overall.say(f"{cell.name}: {content}")
        return
    del running[connection]
    connection.close()
    process.join()
    if kind == "finished":
        finished(cell, content)
    elif kind == "failed":
        failed(cell, content or f"its process ended with code {process.exitcode}")


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """A child begun here ignores Ctrl-C until it has handlers of its own."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _child(connection: Connection, folder: Path, cell: Cell, episodes: int) -> None:
    unset_python_safe_path()
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C on the terminal goes to the parent alone, which passes one signal on
    parent = multiprocessing.parent_process()
    told = 0.0

    def send(kind: str, content: Any) -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            connection.send((kind, content))

    def on_steps(steps: int) -> None:
        nonlocal told
        if time.monotonic() - told > 0.25:
            told = time.monotonic()
            send("steps", steps)

    def orphaned() -> bool:
        return parent is not None and not parent.is_alive()

    try:
        send("finished", train_cell(folder, cell, episodes, on_steps, lambda line: send("line", line), orphaned))
    except Interrupted:
        send("stopped", None)
    except SurefootError as error:
        send("failed", str(error))
