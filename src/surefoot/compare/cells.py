"""Train the cells of a comparison (algorithm × seed), each in its own run folder, one after another or in parallel.

The folder of a comparison contains its settings (request.json) and one run folder per cell. Repeating the command continues it:
finished cells are skipped, interrupted ones resume exactly. A command with other settings is rejected.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import filelock

from surefoot.compare.processes import OverallProgress, Parent, run_works
from surefoot.compare.statistics import Results, present
from surefoot.control.environments.vector import VectorEnvironments
from surefoot.control.world import ControlWorld
from surefoot.core.algorithms import check_count
from surefoot.core.rollout import Metrics
from surefoot.core.seeding import MAX_SEED
from surefoot.errors import Interrupted, SurefootError
from surefoot.ranks.launching import check_single_process
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.runs import api
from surefoot.runs.callbacks import Callback, MetricsCallback
from surefoot.runs.session import Session
from surefoot.store.checkpoint import checkpoints_in, latest_checkpoint
from surefoot.store.events import Event, IterationEnd, Listener, Message
from surefoot.store.folder import folder_lock, match_settings, task_label
from surefoot.store.manifest import read_listed_table, write_listed
from surefoot.store.metrics import FILE, read_history

RESULT, REQUEST = "result.json", "request.json"
KEPT_POINTS = 400
"""maximum number of points kept of a run's curves"""


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
    """``count`` recipes with seed, seed + 1, … Raises SurefootError if the last seed is too large."""
    if recipe.seed + count - 1 > MAX_SEED:
        raise SurefootError(f"seeds={count}: the last seed would be above {MAX_SEED}; lower seed={recipe.seed}")
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


def default_folder(command: str, recipe: Recipe) -> Path:
    """The default folder of a comparison, determined by task and budget, so that repeating the command continues it."""
    return Path("runs") / f"{command}-{task_label(recipe.trained)}-{recipe.steps}"


@contextlib.contextmanager
def locked_folder(
    folder: Path, request: dict[str, Any], recipes: Mapping[str, ControlRecipe] = MappingProxyType({})
) -> Iterator[None]:
    """Lock the folder of a comparison while it runs, and save or check its settings.

    Raises SurefootError if the folder contains other files, was started with other settings or code or is in use, if a launcher
    has started several processes, or for recipes of a new folder that can't be trained.
    """
    check_single_process(folder)
    if not (folder / REQUEST).exists():
        check_trainable(recipes, request.get("episodes", 0))
    with folder_lock(folder, REQUEST):
        match_settings(folder / REQUEST, request, "choose another --run-dir")
        yield


def read_result(file: Path) -> dict[str, Any]:
    """The result of a cell. Raises SurefootError if it can't be read, or lacks what a report needs."""
    remedy = "remove this file and repeat the command; the run is kept"
    result = read_listed_table(file, remedy)
    numbers = ("seed", "steps", "rollouts", "updates", "episodes", "seconds")
    unknown = ("last_100_mean", "average_return", "explained_variance", "ratio_max", "ratio_outside", "greedy_mean")
    wrong = [name for name in numbers if not _is_number(result.get(name))]
    wrong += [name for name in unknown if result.get(name) is not None and not _is_number(result[name])]
    wrong += [] if isinstance(result.get("label"), str) else ["label"]
    wrong += [] if _are_curves(result.get("curves")) else ["curves"]
    if wrong:
        raise SurefootError(f"{file}: has no {wrong[0]} that can be used; {remedy}")
    return result


def _are_curves(value: Any) -> bool:
    """Whether a value is a table of columns of one length, each of numbers or None."""
    columns = [value.get(name) for name in ("steps", "rollouts", "return", "ratio_max")] if isinstance(value, dict) else []
    lists = [column for column in columns if isinstance(column, list)]
    of_one_length = len(lists) == 4 and len({len(column) for column in lists}) == 1
    return of_one_length and all(x is None or _is_number(x) for column in lists for x in column)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def recipe_tables(recipes: Mapping[str, ControlRecipe]) -> dict[str, Any]:
    """Recipes as tables for request.json."""
    return {name: recipe.table for name, recipe in recipes.items()}


# ---- one cell ---------------------------------------------------------------------------------------------------------


def train_cell(folder: Path, cell: Cell, episodes: int, parent: Parent) -> dict[str, Any]:
    """Train a cell to its end, or resume it, evaluate the final agent greedily, and save the result in result.json.

    episodes   number of greedy episodes; 0 for none
    parent     shows the progress; if it stops the cell, the cell is saved and Interrupted is raised
    """
    path = folder / cell.name
    if (path / RESULT).exists():
        return read_result(path / RESULT)
    if not is_trained(path, cell.steps):
        listener = run_listener(cell.name, parent)

        def callback(metrics: Metrics) -> bool:
            return (metrics["steps"] or 0) >= cell.steps or parent.stopped()

        train_or_resume(path, cell.recipe, listener, callback)
        if reached(path) < cell.steps:
            raise Interrupted(f"{cell.name}: stopped at step {reached(path)}")
    checkpoint = latest_checkpoint(path / "checkpoints")
    assert checkpoint is not None, "a finished run has a checkpoint"
    history = read_history(path)
    if history.fault is not None:
        parent.print(f"{cell.name}: {FILE} {history.fault}; the result is that of the rows that can be read")
    result = {"label": cell.label, "seed": cell.recipe.seed, **summary(history.rows)}
    if episodes and cell.until is None:
        evaluation = api.evaluate(api.load(checkpoint), episodes=episodes, seed=cell.recipe.seed)
        result |= {"greedy_mean": evaluation.mean_return, "greedy_std": evaluation.std_return, "greedy_episodes": episodes}
    write_listed(path / RESULT, json.dumps(result))
    return result


def train_or_resume(
    path: Path, recipe: Recipe, display: Listener, callback: MetricsCallback | None = None, callbacks: Sequence[Callback] = ()
) -> None:
    """Train a recipe in a run folder; if the folder has a run of it already, resume that."""
    if not (path / "config.toml").exists():
        api.start(recipe, path, callback=callback, callbacks=callbacks, display=display)
        return
    with contextlib.suppress(filelock.Timeout), filelock.FileLock(path / ".lock", timeout=30):
        pass  # a run whose parent was killed stops by itself after its iteration
    api.resume(path, callback=callback, callbacks=callbacks, display=display)


def reached(path: Path) -> int:
    """The step of a run's newest checkpoint; 0 without one."""
    return max((int(checkpoint.name) for checkpoint in checkpoints_in(path / "checkpoints")), default=0)


def is_trained(path: Path, steps: int) -> bool:
    """Whether a run has reached its budget, and does not have to repeat the evaluation there."""
    checkpoint = latest_checkpoint(path / "checkpoints")
    return checkpoint is not None and int(checkpoint.name) >= steps and not read_listed_table(checkpoint / "pending.json")


def run_listener(name: str, parent: Parent) -> Listener:
    """The listener of one run of a comparison: it passes the number of steps and the messages on."""

    def listener(event: Event) -> None:
        match event:
            case IterationEnd():
                parent.step(name, event.state.steps)
            case Message():
                parent.print(f"{name}: {event.text}")

    return listener


# ---- all cells --------------------------------------------------------------------------------------------------------


def run_cells(
    folder: Path, cells: Sequence[Cell], episodes: int, jobs: int, progress: "OverallProgress"
) -> dict[str, list[dict[str, Any]]]:
    """Train every unfinished cell, ``jobs`` at a time, and return all results by label, in the order of the cells.

    Raises Interrupted after a signal, when running cells are saved. A failed cell doesn't stop the others; in the end the first
    failure is raised as SurefootError.
    """
    results: dict[str, dict[str, Any]] = {}
    for cell in cells:
        if (folder / cell.name / RESULT).exists():
            results[cell.name] = read_result(folder / cell.name / RESULT)
            progress.skip(cell.name, cell.steps)
        else:
            progress.skip(cell.name, reached(folder / cell.name))
    if results:
        progress.print(f"{len(results)} of {len(cells)} runs were already finished")
    failures: dict[str, str] = {}

    def finished(name: str, result: dict[str, Any]) -> None:
        results[name], cell = result, cell_of[name]
        progress.step(name, cell.steps)
        progress.print(f"[{len(results)}/{len(cells)}] {finished_line(cell, result)}; {progress.left() or 'nothing left'}")

    def failed(name: str, message: str) -> None:
        failures[name] = message
        progress.print(f"{name} failed: {message}")

    cell_of = {cell.name: cell for cell in cells}
    waiting = {cell.name: partial(train_cell, folder, cell, episodes) for cell in cells if cell.name not in results}
    try:
        run_works(waiting, jobs, progress, finished, failed)
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
    return {label: [results[c.name] for c in cells if c.label == label] for label in dict.fromkeys(c.label for c in cells)}


def finished_line(cell: Cell, result: Mapping[str, Any]) -> str:
    """The result of a cell in one line."""
    score = result["last_100_mean"]
    parts = [f"return {score:,.1f}" if score is not None else "no episode finished"]
    if "greedy_mean" in result:
        parts.append(f"greedy {result['greedy_mean']:,.1f}")
    end = f"after {result['steps']:,} steps in {result['seconds']:,.0f} s"
    return f"{cell.label}, seed {cell.recipe.seed}: {', '.join(parts)} {end}"


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
    count = min(KEPT_POINTS, len(rows))
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
