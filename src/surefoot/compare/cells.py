"""Train the cells of a comparison (algorithm × seed), each in its own run folder, one after another or in parallel.

The folder of a comparison contains its settings (request.json) and one run folder per cell. Repeating the command continues it:
finished cells are skipped, interrupted ones resume exactly. A command with other settings is rejected.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import filelock
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from surefoot.compare.statistics import Results, present
from surefoot.control.environments.vector import VectorEnvironments
from surefoot.control.world import ControlWorld
from surefoot.core.algorithms import check_count
from surefoot.core.distributed import check_single_process
from surefoot.core.rollout import Metrics
from surefoot.errors import Interrupted, SurefootError
from surefoot.files import read_table, write_text
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.import_object import python_safe_path, unset_python_safe_path
from surefoot.recipes.reading import to_table
from surefoot.runs import api
from surefoot.runs.checkpoint import checkpoints_in, latest_checkpoint
from surefoot.runs.events import Event, IterationEnd, Listener, Message
from surefoot.runs.folder import differences
from surefoot.runs.session import Session, SignalHandler
from surefoot.runs.trackers.metrics_jsonl import read_metrics
from surefoot.terminal import visible_lines

RESULT = "result.json"
POINTS = 400
"""maximum number of points kept of a run's curves"""
PROGRESS_EVERY = 60.0
"""seconds between lines of progress while no cell finishes"""


@dataclass(frozen=True)
class Cell:
    """One run of a comparison: an algorithm with one seed."""

    label: str
    recipe: ControlRecipe
    until: int | None = None
    """stop at this step instead of the recipe's budget; schedules still follow the budget"""

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return f"{self.label}-seed{self.recipe.seed}"

    @property
    def steps(self) -> int:
        """The number of steps that the cell trains."""
        return self.recipe.steps if self.until is None else self.until


def seeds_of(recipe: ControlRecipe, count: int) -> list[ControlRecipe]:
    """``count`` recipes with seed, seed + 1, …"""
    return [recipe.model_copy(update={"seed": recipe.seed + i}) for i in range(count)]


def check_counts(seeds: int, episodes: int, jobs: int) -> None:
    """Raise SurefootError for a count outside the bounds of the command line."""
    check_count("seeds", seeds)
    check_count("episodes", episodes, least=0)
    check_count("jobs", jobs)


def check_trainable(recipes: Mapping[str, ControlRecipe], episodes: int) -> None:
    """Raise SurefootError, with the name of the recipe, for one that can't start or can't be compared. Write nothing.

    episodes   number of greedy episodes that evaluate each final agent
    """
    for name, recipe in recipes.items():
        try:
            if (patience := recipe.evaluation.patience) is not None and recipe.evaluation.episodes:
                raise SurefootError(
                    f"evaluation.patience={patience}: would end a run before the budget that all runs share; set 'none'"
                )
            world = ControlWorld(recipe)
            try:
                if episodes and isinstance(world.environments, VectorEnvironments) and recipe.rollout.backend == "loop":
                    raise SurefootError(
                        f"episodes={episodes}: final agents are evaluated in single environments, but task={recipe.task!r} "
                        "makes a vector environment; set episodes = 0"
                    )
                Session(recipe, world, None)
            finally:
                world.close()
        except SurefootError as error:
            raise SurefootError(f"{name}: {error}") from None


def default_folder(command: str, recipe: ControlRecipe) -> Path:
    """The default folder of a comparison, determined by task and budget, so that repeating the command continues it."""
    return Path("runs") / f"{command}-{recipe.task.rpartition('/')[2].replace(':', '-').lower()}-{recipe.steps}"


@contextlib.contextmanager
def locked_folder(folder: Path, request: dict[str, Any]) -> Iterator[None]:
    """Lock the folder of a comparison while it runs, and save or check its settings.

    Raises SurefootError if the folder contains other files, was started with other settings or is in use, or if a launcher has
    started several processes.
    """
    check_single_process(folder)
    file, request_json = folder / "request.json", json.loads(json.dumps(request))
    if folder.exists() and not file.exists() and (not folder.is_dir() or any(p.name != ".lock" for p in folder.iterdir())):
        raise SurefootError(f"{folder}: contains a run or other files; choose another --run-dir")
    lock = filelock.FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise SurefootError(f"{folder}: in use by another process; wait for it or stop it") from None
    except OSError as error:
        raise SurefootError(f"{folder}: can't be written ({error.strerror}); choose another --run-dir") from None
    try:
        if file.exists():
            changed = differences(_read(file), request_json)
            if changed:
                short = [line if len(line) < 100 else line.partition(":")[0] for line in changed]
                shown = "; ".join(short[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
                raise SurefootError(
                    f"{folder}: was started with other settings ({shown}); repeat those, or choose another --run-dir"
                )
        else:
            write_text(file, json.dumps(request_json, indent=1))
        yield
    finally:
        lock.release()


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_table(file)
    except SurefootError as error:
        raise SurefootError(f"{error}; choose another --run-dir") from None


def recipe_tables(recipes: Mapping[str, ControlRecipe]) -> dict[str, Any]:
    """Recipes as tables for request.json."""
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
    """Train a cell to its end, or resume it, evaluate the final agent greedily, and save the result in result.json.

    episodes   number of greedy episodes; 0 for none
    stop       called after each iteration; True saves and raises Interrupted
    """
    path = folder / cell.name
    if (path / RESULT).exists():
        return _read(path / RESULT)
    if _reached(path) < cell.steps:
        _train(path, cell, cell_listener(on_steps, on_line), stop)
        if _reached(path) < cell.steps:
            raise Interrupted(f"{cell.name}: stopped at step {_reached(path)}")
    checkpoint = latest_checkpoint(path / "checkpoints")
    assert checkpoint is not None, "a finished run has a checkpoint"
    result = {"label": cell.label, "seed": cell.recipe.seed, **summary(read_metrics(path / "metrics.jsonl"))}
    if episodes and cell.until is None:
        evaluation = api.evaluate(api.load(checkpoint), episodes=episodes, seed=cell.recipe.seed)
        result |= {"greedy_mean": evaluation.mean_return, "greedy_std": evaluation.std_return, "greedy_episodes": episodes}
    write_text(path / RESULT, json.dumps(result))
    return result


def _train(path: Path, cell: Cell, display: Listener, stop: Callable[[], bool]) -> None:
    def callback(metrics: Metrics) -> bool:
        return (metrics["steps"] or 0) >= cell.steps or stop()

    if not (path / "config.toml").exists():
        shutil.rmtree(path, ignore_errors=True)  # left by a kill before the run started
        api.start(cell.recipe, path, callback=callback, display=display)
        return
    with contextlib.suppress(filelock.Timeout), filelock.FileLock(path / ".lock", timeout=30):
        pass  # a cell whose parent was killed stops by itself after its iteration
    api.resume(path, callback=callback, display=display)


def _reached(path: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(checkpoint.name) for checkpoint in checkpoints_in(path / "checkpoints")), default=0)


# ---- all cells --------------------------------------------------------------------------------------------------------


def run_cells(
    folder: Path, cells: Sequence[Cell], episodes: int, jobs: int, progress: "OverallProgress"
) -> list[dict[str, Any]]:
    """Train every unfinished cell, ``jobs`` at a time, and return all results in the order of the cells.

    Raises Interrupted after a signal, when running cells are saved. A failed cell doesn't stop the others; in the end the first
    failure is raised as SurefootError.
    """
    results: dict[str, dict[str, Any]] = {}
    for cell in cells:
        if (folder / cell.name / RESULT).exists():
            results[cell.name] = _read(folder / cell.name / RESULT)
            progress.skip(cell.name, cell.steps)
        else:
            progress.skip(cell.name, _reached(folder / cell.name))
    if results:
        progress.print(f"{len(results)} of {len(cells)} runs were already finished")
    failures: dict[str, str] = {}

    def finished(cell: Cell, result: dict[str, Any]) -> None:
        results[cell.name] = result
        progress.step(cell.name, cell.steps)
        progress.print(f"[{len(results)}/{len(cells)}] {finished_line(cell, result)}; {progress.left() or 'nothing left'}")

    def failed(cell: Cell, message: str) -> None:
        failures[cell.name] = message
        progress.print(f"{cell.name} failed: {message}")

    waiting = [cell for cell in cells if cell.name not in results]
    try:
        if jobs == 1:
            _in_this_process(folder, waiting, episodes, progress, finished, failed)
        else:
            _in_parallel(folder, waiting, episodes, jobs, progress, finished, failed)
        if len(results) + len(failures) < len(cells):  # a cell's process was stopped by someone else
            raise Interrupted("stopped")
    except (Interrupted, KeyboardInterrupt):
        raise Interrupted(
            f"stopped with {len(results)} of {len(cells)} runs finished; repeat the command to continue"
        ) from None
    if failures:
        name, message = next(iter(failures.items()))
        rest = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise SurefootError(f"{folder / name}{rest}: {message}; the other runs are kept, repeat the command to continue")
    return [results[cell.name] for cell in cells]


def finished_line(cell: Cell, result: Mapping[str, Any]) -> str:
    """The result of a cell in one line."""
    score = result["last_100_mean"]
    parts = [f"return {score:,.1f}" if score is not None else "no episode finished"]
    if "greedy_mean" in result:
        parts.append(f"greedy {result['greedy_mean']:,.1f}")
    end = f"after {result['steps']:,} steps in {result['seconds']:,.0f} s"
    return f"{cell.label}, seed {cell.recipe.seed}: {', '.join(parts)} {end}"


Finished = Callable[[Cell, dict[str, Any]], None]
Failed = Callable[[Cell, str], None]


def _in_this_process(
    folder: Path,
    cells: Sequence[Cell],
    episodes: int,
    progress: "OverallProgress",
    finished: Finished,
    failed: Failed,
) -> None:
    """Train one cell after another in this process."""
    for cell in cells:
        try:
            result = train_cell(folder, cell, episodes, lambda steps, c=cell: progress.step(c.name, steps), progress.print)  # type: ignore[misc]
        except SurefootError as error:
            failed(cell, str(error))
        else:
            finished(cell, result)


def _in_parallel(
    folder: Path,
    cells: Sequence[Cell],
    episodes: int,
    jobs: int,
    progress: "OverallProgress",
    finished: Finished,
    failed: Failed,
) -> None:
    """Train each cell in its own process, ``jobs`` at a time. Forward a signal once; every cell saves before it stops."""
    context = multiprocessing.get_context("spawn")
    waiting, running = list(cells), dict[Connection, tuple[Cell, Any]]()
    with SignalHandler() as signals:
        forwarded = False
        try:
            while running or (waiting and not signals.stop_requested):
                while waiting and len(running) < jobs and not signals.stop_requested:
                    cell = waiting.pop(0)
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_child, args=(theirs, folder, cell, episodes))
                    with python_safe_path(), _ignoring_interrupts():
                        process.start()
                    theirs.close()
                    running[ours] = (cell, process)
                if signals.stop_requested and not forwarded:
                    forwarded = True
                    for _, process in running.values():
                        process.terminate()
                for connection in wait(list(running), timeout=0.2):
                    assert isinstance(connection, Connection)
                    _receive(connection, running, progress, finished, failed)
        finally:
            for _, process in running.values():
                process.terminate()
                process.join()
        if signals.stop_requested:
            raise Interrupted("stopped")


def _receive(
    connection: Connection,
    running: dict[Connection, tuple[Cell, Any]],
    progress: "OverallProgress",
    finished: Finished,
    failed: Failed,
) -> None:
    """Handle one message of a child process, or its exit."""
    cell, process = running[connection]
    try:
        kind, content = connection.recv()
    except EOFError:
        kind, content = "failed", None
    if kind == "steps":
        progress.step(cell.name, content)
        return
    if kind == "line":
        progress.print(f"{cell.name}: {content}")
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
    """A child started in this context ignores Ctrl-C until it installs its own handlers."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _child(connection: Connection, folder: Path, cell: Cell, episodes: int) -> None:
    unset_python_safe_path()
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C on the terminal reaches only the parent, which forwards one signal
    parent = multiprocessing.parent_process()
    last_sent = 0.0

    def send(kind: str, content: Any) -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            connection.send((kind, content))

    def on_steps(steps: int) -> None:
        nonlocal last_sent
        if time.monotonic() - last_sent > 0.25:
            last_sent = time.monotonic()
            send("steps", steps)

    def orphaned() -> bool:
        return parent is not None and not parent.is_alive()

    try:
        send("finished", train_cell(folder, cell, episodes, on_steps, lambda line: send("line", line), orphaned))
    except Interrupted:
        send("stopped", None)
    except SurefootError as error:
        send("failed", str(error))


# ---- progress ---------------------------------------------------------------------------------------------------------


class OverallProgress:
    """The progress of all parts of a comparison, in steps: a bar on a terminal, else one line per minute.

    total    steps of all parts
    stderr   print to stderr instead of stdout
    """

    def __init__(self, total: int, stderr: bool = False) -> None:
        self.total, self.done = total, dict[str, int]()
        stream = sys.stderr if stderr else sys.stdout
        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        if stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(32), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("all runs", total=total, left="")
        self.started = self.last_line = time.monotonic()
        self.skipped = 0

    def __enter__(self) -> "OverallProgress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def skip(self, name: str, steps: int) -> None:
        """Count steps of a part that were done before; the estimate of the remaining time ignores them."""
        self.done[name] = steps
        self.skipped += steps

    def step(self, name: str, steps: int) -> None:
        """Set the number of steps that a part has done."""
        self.done[name] = steps
        if self.bar is not None:
            self.bar.start()  # only the first call has an effect
            self.bar.update(self.task, completed=sum(self.done.values()), left=self.left())
        elif time.monotonic() - self.last_line > PROGRESS_EVERY:
            self.print(f"{min(1.0, sum(self.done.values()) / self.total):.0%} of all steps; {self.left()}")

    def left(self) -> str:
        """An estimate of the remaining time, from the average speed so far; parts may differ in speed."""
        done = sum(self.done.values())
        if done <= self.skipped:
            return ""
        per_step = (time.monotonic() - self.started) / (done - self.skipped)
        seconds = round(per_step * max(0, self.total - done))
        return f"about {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self.last_line = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # the run survives a closed output pipe
            self.console.print(visible_lines(line), markup=False)


def cell_listener(on_steps: Callable[[int], None], on_line: Callable[[str], None]) -> Listener:
    """The listener of one run of a comparison: it forwards the number of steps and the messages."""

    def listener(event: Event) -> None:
        match event:
            case IterationEnd():
                on_steps(event.state.steps)
            case Message():
                on_line(event.text)

    return listener


# ---- summary ----------------------------------------------------------------------------------------------------------


def summary(rows: Results) -> dict[str, Any]:
    """The scores of a run for results.json, from the rows of its metrics: last values, extremes, and curves.

    A score that a row lacks is unknown. Raises SurefootError without rows, or if the last one lacks a count.
    """
    lacking = [name for name in ("updates", "episodes") if not rows or rows[-1].get(name) is None]
    if lacking:
        what = f"its last row has no {' and no '.join(lacking)}" if rows else "has no row"
        raise SurefootError(f"metrics.jsonl: {what}; remove the run's folder to train it again")
    last, late = rows[-1], rows[-max(1, len(rows) // 4) :]
    outside, explained = present(rows, "ratio_outside"), sorted(present(late, "explained_variance"))
    count = min(POINTS, len(rows))
    ends = [round((i + 1) * len(rows) / count) for i in range(count)]
    parts = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return {
        "steps": last["steps"],
        "rollouts": last["iteration"],
        "updates": last["updates"],
        "episodes": last["episodes"],
        "last_100_mean": last.get("episode_return"),
        "average_return": _mean_over_steps(rows),
        "explained_variance": explained[len(explained) // 2] if explained else None,
        "ratio_max": max(present(rows, "ratio_max"), default=None),
        "ratio_outside": sum(outside) / len(outside) if outside else None,
        "seconds": sum((row.get("seconds_collecting") or 0) + (row.get("seconds_learning") or 0) for row in rows),
        "curves": {
            "steps": [part[-1]["steps"] for part in parts],
            "rollouts": [part[-1]["iteration"] for part in parts],
            "return": [part[-1].get("episode_return") for part in parts],
            "ratio_max": [max(present(part, "ratio_max"), default=None) for part in parts],
        },
    }


def _mean_over_steps(rows: Results) -> float | None:
    """The area under the curve of the return, divided by its length. Steps before the end of the first episode don't count."""
    total, counted, before = 0.0, 0, 0
    for row in rows:
        if row.get("episode_return") is not None:
            total += row["episode_return"] * (row["steps"] - before)
            counted += row["steps"] - before
        before = row["steps"]
    return total / counted if counted else None
