"""Cells that train one control run: resumable, evaluated greedily, summarised in one small table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from claims import LEDGER, Cell, Result, Results
from surefoot.compare import cells
from surefoot.compare.processes import Parent
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import as_control, merge_tables

POINTS = 50
"""points kept of each curve"""
GREEDY_EPISODES = 20
MUJOCO: dict[str, Any] = {"engine": "compiled", "steps": 1_000_000}
SEVEN = (
    "HalfCheetah-v5",
    "Hopper-v5",
    "InvertedDoublePendulum-v5",
    "InvertedPendulum-v5",
    "Reacher-v5",
    "Swimmer-v5",
    "Walker2d-v5",
)


def silent(name: str, steps: int) -> None:
    """Show no progress: a lane's log has one line per cell."""


def recipe_of(
    task: str, algorithm: str, seed: int, changes: Mapping[str, Any] | None = None, preset: str | None = None
) -> ControlRecipe:
    """A preset, by default the task's own, with an algorithm, a seed and changes; no evaluation while training."""
    run = {"task": task, "algorithm": algorithm, "seed": seed, "engine": "eager"}
    fixed = {**run, "evaluation": {"episodes": 0}, "traces": {"rows": 0}}
    return as_control(find_recipe(preset or task, merge_tables(fixed, changes or {})))


def trained(recipe: ControlRecipe, folder: Path, episodes: int = GREEDY_EPISODES) -> Result:
    """Train a recipe, or continue; its scores, curves and settings. ``episodes`` are greedy ones at the end."""
    result = cells.train_cell(folder, cells.Cell("run", recipe), episodes, Parent(silent, print))
    curves = {name: thinned(values) for name, values in result["curves"].items()}
    settings = {"task": recipe.task, "algorithm": recipe.algorithm, "engine": recipe.engine}
    return {**settings, **{name: value for name, value in result.items() if name != "label"}, "curves": curves}


def thinned(values: list[Any]) -> list[Any]:
    """The last value of each of at most ``POINTS`` equal parts, with five digits."""
    count = min(POINTS, len(values))
    kept = [values[round((i + 1) * len(values) / count) - 1] for i in range(count)]
    return [float(f"{value:.5g}") if isinstance(value, float) else value for value in kept]


def run_cell(
    experiment: str,
    name: str,
    task: str,
    algorithm: str,
    seed: int,
    changes: Mapping[str, Any],
    preset: str | None = None,
) -> Cell:
    """Train an algorithm with changes to a preset, by default the task's own."""

    def work(folder: Path) -> Result:
        return trained(recipe_of(task, algorithm, seed, changes, preset), folder)

    return Cell(f"{name}-{seed}", work, LEDGER / experiment / f"{name}-{seed}")


def scores_named(results: Results, name: str, key: str = "average_return") -> list[float]:
    """A score of all finished seeds of a name."""
    return [result[key] for cell, result in results.items() if cell.rpartition("-")[0] == name]


def within(*names: str) -> Any:
    """Whether a cell has one of these names, apart from its seed."""
    return lambda cell: cell.rpartition("-")[0] in names


def random_cell(experiment: str, task: str) -> Cell:
    """The mean return of uniformly random actions, which is 0 on the normalised scale."""

    def work(folder: Path) -> Result:
        import gymnasium

        environment, returns = gymnasium.make(task), []
        environment.action_space.seed(1)
        for episode in range(50):
            environment.reset(seed=episode)
            total, over = 0.0, False
            while not over:
                _, reward, terminated, truncated, _ = environment.step(environment.action_space.sample())
                total, over = total + float(reward), terminated or truncated
            returns.append(total)
        environment.close()
        return {"task": task, "episodes": len(returns), "last_100_mean": sum(returns) / len(returns)}

    return Cell(f"{task}-random-1", work, LEDGER / experiment / f"{task}-random")
