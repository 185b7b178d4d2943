"""Train one cell with the cells of ``surefoot.compare``: resumable, evaluated greedily, summarised in one small table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from claims import Result
from surefoot.compare import cells
from surefoot.compare.processes import Parent
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import as_control, merge_tables

POINTS = 50
"""points kept of each curve"""
GREEDY_EPISODES = 20


def silent(name: str, steps: int) -> None:
    """Show no progress: a lane's log has one line per cell."""


def recipe_of(task: str, algorithm: str, seed: int, changes: Mapping[str, Any] | None = None) -> ControlRecipe:
    """A task's own recipe with an algorithm, a seed and changes; no evaluation while training."""
    fixed = {"seed": seed, "algorithm": algorithm, "engine": "eager", "evaluation": {"episodes": 0}, "traces": {"rows": 0}}
    return as_control(find_recipe(task, merge_tables(fixed, changes or {})))


def trained(recipe: ControlRecipe, folder: Path) -> Result:
    """Train a recipe, or continue; its scores, curves and settings."""
    result = cells.train_cell(folder, cells.Cell("run", recipe), GREEDY_EPISODES, Parent(silent, print))
    curves = {name: thinned(values) for name, values in result["curves"].items()}
    settings = {"task": recipe.task, "algorithm": recipe.algorithm, "engine": recipe.engine}
    return {**settings, **{name: value for name, value in result.items() if name != "label"}, "curves": curves}


def thinned(values: list[Any]) -> list[Any]:
    """The last value of each of at most ``POINTS`` equal parts, with five digits."""
    count = min(POINTS, len(values))
    kept = [values[round((i + 1) * len(values) / count) - 1] for i in range(count)]
    return [float(f"{value:.5g}") if isinstance(value, float) else value for value in kept]
