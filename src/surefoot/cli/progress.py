"""What the commands that train say, and into which folder a run goes."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli.echo import echo
from surefoot.files import check_name
from surefoot.recipes.base import Recipe

if TYPE_CHECKING:
    from surefoot.recipes.presets import Origin
    from surefoot.runs.display import Display


def run_folder(recipe: Recipe, run_dir: Path | None, name: str | None, several: bool) -> Path:
    """Where a run goes. Names made up here never collide; names that were given are taken as they are."""
    suffix = f"-seed{recipe.seed}" if several else ""
    if name is not None:
        check_name("--name", name)
        return (run_dir or Path("runs")) / f"{name}{suffix}"
    if run_dir is not None:
        return run_dir / f"seed{recipe.seed}" if several else run_dir
    from surefoot.runs.folder import task_label

    base = Path("runs") / f"{task_label(recipe.trained)}-{recipe.algorithm.lower()}-{recipe.seed}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder


def display_for(recipe: Recipe | None, folder: Path, quiet: bool = False, origin: "Origin | None" = None) -> "Display":
    """A live table on a terminal, plain lines elsewhere; its title says what the recipe has from a preset."""
    from surefoot.runs.display import Dashboard, Lines, Quiet

    if quiet:
        return Quiet()
    title = f"{recipe.title}, seed {recipe.seed} -> {folder}" if recipe else f"resuming {folder}"
    title += f"\n{origin.line}" if origin else ""
    return Dashboard(title) if sys.stdout.isatty() else Lines(title)


def final_line(recipe: Recipe, folder: Path) -> tuple[str, float | None]:
    """How a run ended, from its own metrics."""
    from surefoot.runs.metrics import SHOWN
    from surefoot.runs.trackers.metrics_jsonl import read_metrics

    rows = read_metrics(folder / "metrics.jsonl")
    last = rows[-1] if rows else {"steps": recipe.steps}  # nothing was left to do but to write what a run leaves
    name = next((name for name in recipe.scores if last.get(name) is not None), recipe.scores[-1])
    score = last.get(name)
    shown = "not known yet" if score is None else f"{score:,.4g}" if abs(score) < 10 else f"{score:,.1f}"
    label = SHOWN[name][0] if name in SHOWN else name
    return f"{recipe.trained}, seed {recipe.seed}: {label} {shown} after {last['steps']:,} steps -> {folder}", score


def spread(scores: list[float | None]) -> str:
    """Mean and spread over seeds."""
    import numpy as np

    known = [score for score in scores if score is not None]
    if not known:
        return "no seed has a score"
    std = np.std(known, ddof=min(1, len(known) - 1))
    return f"{len(known)} seeds: mean {np.mean(known):,.1f}, standard deviation {std:,.1f}, worst {min(known):,.1f}"


def tell(line: str) -> None:
    """Print what a training came to; whoever listened may have gone, and that ends nothing."""
    try:
        echo(line)
    except BrokenPipeError:  # the descriptor itself, so that the flush at the end has somewhere to go, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
