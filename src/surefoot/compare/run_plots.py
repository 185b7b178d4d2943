"""Pictures of runs: one small figure for each thing that matters, a line for each run, raw values pale under smoothed ones.

Colours that both a white and a dark page bear; names are left to whoever shows the pictures, beside the colours.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from surefoot.compare.plots import COLOURS
from surefoot.compare.runs import Run

INK = "#808080"
POINTS = 1_500
"""of a line at most"""
SMOOTH = 0.04
"""of a line's length, over which it is smoothed"""
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Panel:
    """One picture: the metrics in it, the first of which is drawn solid, others dashed."""

    name: str
    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    log: bool = False


PANELS = (
    Panel("return", "Return of episodes", ("episode_return", "evaluation_return"), "solid: in training; dashed: greedy"),
    Panel("reward", "Reward of responses", ("reward", "held_out_reward"), "solid: in training; dashed: held out"),
    Panel("gold", "Gold: the true score", ("gold", "held_out_gold"), "solid: in training; dashed: held out"),
    Panel("loss", "Loss on held-out rows", ("held_out_loss",), "nats"),
    Panel("accuracy", "Accuracy on held-out pairs", ("held_out_accuracy",)),
    Panel("likelihood", "log π of demonstrations", ("held_out_log_likelihood",), "nats per token"),
    Panel("reference", "KL to the reference", ("kl_reference_response", "held_out_kl"), "nats per response; dashed: held out"),
    Panel("kl", "KL(π_old‖π_θ) per batch", ("kl",), "nats", log=True),
    Panel("clip", "Clip", ("clip_active", "ratio_outside"), "share; solid: gradient off; dashed: outside the band"),
    Panel("entropy", "Entropy", ("entropy",), "nats"),
    Panel("critic", "Explained variance", ("explained_variance",), "1 is perfect, 0 a constant"),
    Panel("diversity", "Repeated responses", ("repeated",), "share"),
    Panel("length", "Response length", ("response_length",), "tokens"),
    Panel("speed", "Speed", ("steps_per_second",), "steps/s"),
)


def colour_of(index: int) -> str:
    """Of a run, by its place."""
    return COLOURS[index % (len(COLOURS) - 1)]


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Those of which a run has two values or more."""
    return [panel for panel in PANELS if any(len(run.curve(metric)[0]) > 1 for run in runs for metric in panel.metrics)]


def draw_panel(panel: Panel, runs: Sequence[Run], kind: Literal["svg", "png"] = "svg") -> bytes:
    """The picture as a file's bytes; the same runs give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    axes = figure.subplots()
    lowest = 0.0
    for index, run in enumerate(runs):
        for style, metric in zip(("-", "--"), panel.metrics, strict=False):
            steps, values = (np.asarray(each, float) for each in run.curve(metric))
            finite = np.isfinite(values)
            steps, values = binned(steps[finite], values[finite])
            if panel.log:
                steps, values = steps[values > 0], values[values > 0]
            if len(values):
                _line(axes, steps, values, colour_of(index), style)
                lowest = min(lowest, float(np.quantile(values, 0.05)))
    _plain(axes, panel)
    if panel.name == "critic":  # the first iterations may be far below, and would leave no room for the rest
        axes.set_ylim(max(-1.0, lowest * 1.1) - 0.05, 1.05)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "surefoot", "svg.fonttype": "path"}):
        figure.savefig(file, format=kind, dpi=144, transparent=kind == "svg", metadata={"Date": None} if kind == "svg" else {})
    return file.getvalue()


def _line(axes: Any, steps: Numbers, values: Numbers, colour: str, style: str) -> None:
    """Few points as they are, many pale with their running mean over them."""
    if len(values) < 12:
        axes.plot(steps, values, color=colour, ls=style, lw=1.6, marker="o", ms=3)
        return
    axes.plot(steps, values, color=colour, ls=style, lw=0.8, alpha=0.25)
    axes.plot(steps, smoothed(values), color=colour, ls=style, lw=1.8)


def binned(steps: Numbers, values: Numbers, points: int = POINTS) -> tuple[Numbers, Numbers]:
    """Means of neighbours, where there are more than so many.   [n], [n] -> [≤ points], [≤ points]"""
    if len(values) <= points:
        return steps, values
    edges = np.linspace(0, len(values), points + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(values)))
    return np.add.reduceat(steps, edges) / counts, np.add.reduceat(values, edges) / counts


def smoothed(values: Numbers) -> Numbers:
    """The mean over a window around each point, shorter at the ends.   [n] -> [n]"""
    half = max(1, int(SMOOTH * len(values) / 2))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return np.asarray((sums[high] - sums[low]) / (high - low))


def _plain(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11, color=INK, fontweight="bold", parse_math=False)
    axes.set_title(panel.unit, loc="right", fontsize=8, color=INK)
    if panel.log:
        axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=8, which="both")
    axes.grid(color=INK, alpha=0.2, lw=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.xaxis.set_major_formatter(lambda x, _: thousands(x))


def thousands(x: float) -> str:
    """12,000 as 12k, 3,000,000 as 3M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:g}{letter}"
    return f"{x:g}"
