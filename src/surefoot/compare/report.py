"""What a comparison leaves: results.json for programs, report.md for people, a plot where matplotlib is installed."""

import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.compare.statistics import bootstrap_interval, interquartile_mean, markdown_table, mean
from surefoot.errors import to_install
from surefoot.files import write_text
from surefoot.recipes.control import ControlRecipe

COUNT = "{:,.0f}"

Results = dict[str, Any]
Draw = Callable[[Results, Path], None]


@dataclass(frozen=True)
class Report:
    """A finished comparison."""

    folder: Path
    results: Results
    """what results.json holds"""
    text: str
    """Markdown, with columns that line up in plain text"""
    plot: Path | None
    """None where matplotlib is not installed"""

    @property
    def last_line(self) -> str:
        """Where it all is."""
        if self.plot is not None:
            return f"plot, report.md and results.json are in {self.folder}/"
        return (
            f"report.md and results.json are in {self.folder}/; for the plot run: {to_install('plots')}, "
            "and repeat the command (nothing is trained again)"
        )


def write_report(folder: Path, results: Results, text: str, draw: Draw) -> Report:
    """Write all of it; ``draw`` makes the plot's files and is called only where matplotlib is there."""
    results = finite(results)
    plot, picture = None, ""
    if matplotlib_is_there():
        plot = folder / "plot.png"
        draw(results, plot)
        draw(results, plot.with_suffix(".svg"))
        picture = "\n![the same as curves](plot.png)\n"
    write_text(folder / "results.json", json.dumps(results, allow_nan=False))
    write_text(folder / "report.md", f"{text}\n{picture}")
    return Report(folder, results, text, plot)


def matplotlib_is_there() -> bool:
    """Whether plots can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def finite(tree: Any) -> Any:
    """The same tree with None for numbers that JSON can't hold."""
    if isinstance(tree, Mapping):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def known(results: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A number of each cell, where it has one."""
    return [result[name] for result in results if result.get(name) is not None]


def number(value: float | None) -> str:
    """About four digits, thousands apart; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 or value == 0 else 4
    return f"{value:,.{digits}f}"


def span(low: float, high: float) -> str:
    """An interval."""
    return f"{number(low)} to {number(high)}"


def each(values: Sequence[float]) -> str:
    """The numbers of all seeds."""
    return ", ".join(number(value) for value in values) or "–"


def average(results: Sequence[Mapping[str, Any]], name: str, form: str | None = None) -> str:
    """The mean over seeds of a number, in about four digits or as ``form`` says."""
    values = known(results, name)
    if not values:
        return "–"
    mean_value = sum(values) / len(values)
    return number(mean_value) if form is None else form.format(mean_value)


def mean_and_interval(scores: Sequence[float]) -> tuple[str, str]:
    """The mean and its interval, as cells of a table."""
    if not scores:
        return "–", "–"
    return number(float(mean(scores))), span(*bootstrap_interval(scores))


def score_table(by_name: Mapping[str, Sequence[Mapping[str, Any]]], score: str) -> str:
    """One row per algorithm: mean, interquartile mean, an interval of each, and every seed."""
    rows = []
    for name, results in by_name.items():
        scores = known(results, score)
        middle, its_interval = "–", "–"
        if scores:
            middle = number(float(interquartile_mean(scores)))
            its_interval = span(*bootstrap_interval(scores, interquartile_mean))
        rows.append([name, *mean_and_interval(scores), middle, its_interval, each(scores)])
    return markdown_table(["algorithm", "mean", "95 % interval", "IQM", "95 % interval", "each seed"], rows)


def setting_of(recipe: ControlRecipe) -> str:
    """What all trainings of a comparison share, in words."""
    network, optimizer, normalise = recipe.network, recipe.optimizer, recipe.normalise
    widths = f"{network.custom}" if network.custom else f"{'-'.join(map(str, network.hidden))} {network.activation}"
    widths += f", then an LSTM of {network.lstm}" if network.lstm else ""
    trunk = "one trunk shared with the critic" if network.shared_trunk else "separate networks for policy and critic"
    schedule = {"linear": "falling linearly to zero", "cosine": "falling to zero as a cosine"}.get(
        optimizer.schedule, optimizer.schedule
    )
    schedule += f" after a warm-up of {optimizer.warmup:g}" if optimizer.warmup else ""
    critics = f" ({optimizer.critic_learning_rate:g} for the critic)" if optimizer.critic_learning_rate else ""
    limit = "no gradient clip" if optimizer.max_grad_norm is None else f"gradients clipped at norm {optimizer.max_grad_norm:g}"
    normalised = [name for name in ("observations", "rewards") if getattr(normalise, name)]
    return (
        f"{widths}, {trunk}; Adam {optimizer.learning_rate:g}{critics}, {schedule}, {limit}; "
        f"γ = {recipe.objective.gamma:g}; {' and '.join(normalised) or 'nothing'} normalised"
    )


def seeds_in_words(first: int, count: int) -> str:
    """``3 seeds (1 to 3)``"""
    return f"seed {first}" if count == 1 else f"{count} seeds ({first} to {first + count - 1})"


def how_sure(seeds: int) -> str:
    """What the intervals are."""
    text = "Intervals: 95 % percentile bootstrap over seeds, 10,000 resamples"
    if seeds == 1:
        return f"{text}; with one seed they say nothing, train more"
    if seeds < 10:
        return f"{text}; with {seeds} seeds they are too narrow, as they can't reach beyond the worst and the best seed"
    return text
