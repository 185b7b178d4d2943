"""Print text, JSON, and the progress and results of training.

Names of folders, files and tasks may come from other people, so control characters are never sent to the terminal.
"""

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.terminal import is_terminal, shown_on, visible, visible_json, wrapped

if TYPE_CHECKING:
    from surefoot.recipes.base import Recipe
    from surefoot.recipes.presets import Origin
    from surefoot.runs.display import Display


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text of one or more lines, with control characters made visible."""
    click.echo(shown_on(sys.stderr if err else sys.stdout, str(text)), err=err, nl=nl)


def echo_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    click.echo(shown_on(sys.stdout, visible_json(value)))


def echo_result(line: str) -> None:
    """Print the result of a training; a closed pipe is no error, because the training has succeeded."""
    try:
        echo(wrapped(line))
    except BrokenPipeError:  # redirect the descriptor itself, so that the flush at exit succeeds too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def display_for(recipe: "Recipe | None", folder: Path, quiet: bool = False, origin: "Origin | None" = None) -> "Display":
    """A live table on a terminal, plain lines elsewhere; the title names the run and the preset it starts from."""
    from surefoot.runs.display import Dashboard, Lines, Quiet

    if quiet:
        return Quiet()
    title = f"{recipe.title}, seed {recipe.seed} -> {folder}" if recipe else f"resuming {folder}"
    title = visible(title) + (f"\n{origin.line}" if origin else "")
    return Dashboard(title) if is_terminal(sys.stdout) else Lines(title)


def result_line(recipe: "Recipe", folder: Path) -> tuple[str, float | None]:
    """The result of a run from its metrics: one line, and its score or None."""
    from surefoot.diagnostics.metrics import shown
    from surefoot.store.checkpoint import checkpoints_in
    from surefoot.store.metrics import read_metrics

    rows = read_metrics(folder / "metrics.jsonl")
    last = rows[-1] if rows else {"steps": recipe.steps}  # a resumed run may only have had files to write
    name = next((name for name in recipe.scores if last.get(name) is not None), recipe.scores[-1])
    score = last.get(name)
    text = "not known yet" if score is None else number(score)
    label = shown(last)[name][0] if name in shown(last) else name
    if name != "held_out_accuracy" and (accuracy := last.get("held_out_accuracy")) is not None:
        text += f", accuracy {accuracy:.1%}"
    kept = {path.name for path in checkpoints_in(folder / "best")} if recipe.kind == "control" else set()
    before = first_and_best(name, rows, kept)
    truncated = "" if (ended := last.get("eos_rate")) is None else f", {1 - ended:.0%} of the last answers truncated"
    line = f"{recipe.trained}, seed {recipe.seed}: {label} {text} after {last['steps']:,} steps{before}{truncated}"
    return f"{line} -> {folder}", score


def first_and_best(name: str, rows: Sequence[Mapping[str, Any]], kept: Collection[str] = ()) -> str:
    """The first and the best value of a score in a run's metrics with their steps, in brackets; empty if there are not two.

    kept  steps of the checkpoint in best/, which is not that of the largest value if code has changed since then
    """
    points = [(row[name], row["steps"]) for row in rows if row.get(name) is not None]
    if len(points) < 2:
        return ""
    first, start = points[0]
    points = [point for point in points if str(point[1]) in kept] or points
    best, at = min(points) if name.endswith("loss") else max(points, key=lambda point: point[0])
    return f" (first {number(first)} at {start:,}, best {number(best)} at {at:,})"


def number(value: float) -> str:
    """A score in four digits, with one decimal from 10 on."""
    return f"{value:,.4g}" if abs(value) < 10 else f"{value:,.1f}"
