"""Plot comparisons of algorithms (curves with a band over seeds) and the metrics of runs (one small plot for each).

The colours suit colour-blind readers. Only this module imports matplotlib, and only to draw into files.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from surefoot.compare.across_tasks import TaskComparison
from surefoot.compare.runs import SavedRun, short_text
from surefoot.compare.statistics import Results, band, mean_interval, number

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""the palette of Okabe and Ito without its yellow, which is hard to see on white"""
RUNGS = ("#999999", "#000000", "#56B4E9", "#0072B2", "#E69F00", "#D55E00")
"""colours of the ladder's rungs: grey and black without a critic, blues with one, warm colours if batches are reused"""
OF_ALGORITHM = dict(
    zip(("REINFORCE", "REINFORCE_BASELINE", "ACTOR_CRITIC", "A2C", "PPO_UNCLIPPED", "PPO_CLIP"), RUNGS, strict=True),
    PPO_PENALTY="#CC79A7",
    PPO_PENALTY_ADAPTIVE="#882255",
    TRPO="#009E73",
)
"""an algorithm has one colour in all plots, and on the page about how PPO works"""
STYLES = ("-", "--", ":", "-.")
GREY = "#808080"
"""of the text in plots of runs: readable on white and on dark pages"""
DRAWN_POINTS = 1_500
"""maximum number of points in a line"""
SMOOTHING = 0.04
"""window of the running mean, as a share of the line's length"""
Numbers = NDArray[Any]


def draw_comparison(results: Mapping[str, Any], path: Path) -> None:
    """Plot return over steps, and the final scores of every seed with mean and interval."""
    from matplotlib.figure import Figure

    by_name: Mapping[str, Results] = results["results"]
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    curves, scores = figure.subplots(1, 2, width_ratios=[3, 2])
    free = [colour for colour in COLOURS if colour not in {OF_ALGORITHM.get(name) for name in by_name}]
    others = [name for name in by_name if name not in OF_ALGORITHM]
    styles = {name: (free[i % len(free)], STYLES[i // len(free) % len(STYLES)]) for i, name in enumerate(others)}
    styles |= {name: (colour, "-") for name, colour in OF_ALGORITHM.items()}
    ends = [_curve(curves, cells, "steps", "return", *styles[name], name) for name, cells in by_name.items()]
    _finish(curves, "Return over steps", "environment steps", "mean return of the last 100 episodes", ends)
    kinds = [("last_100_mean", "o", "in training"), ("greedy_mean", "D", "final agent, greedy")]
    for row, (name, cells) in enumerate(by_name.items()):
        for (score, marker, _), shift in zip(kinds, (0.14, -0.14), strict=True):
            _points(scores, [c[score] for c in cells if c.get(score) is not None], -row + shift, styles[name][0], marker)
    for _, marker, text in kinds:
        scores.plot([], [], marker, color="#555555", label=text)
    scores.set_yticks([-row for row in range(len(by_name))], list(by_name))
    scores.set_ylim(-len(by_name) + 0.3, 1.0)
    scores.legend(loc="upper left", frameon=False, ncols=2, fontsize=8)
    scores.locator_params(axis="x", nbins=5)
    _label_axes(scores, "Final return (pale: each seed)", "return", "")
    figure.suptitle(_title(next(iter(results["recipes"].values())), results["seeds"]))
    figure.savefig(path, dpi=110)


def draw_profiles(comparison: TaskComparison, kind: Literal["svg", "png"] = "svg") -> bytes:
    """The performance profiles as the bytes of a file: the share of runs above each normalised score, with bands."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.4), layout="constrained")
    axes = figure.subplots()
    thresholds = comparison.results["thresholds"]
    for index, (value, row) in enumerate(comparison.results["results"].items()):
        colour, style = COLOURS[index % len(COLOURS)], STYLES[index // len(COLOURS) % len(STYLES)]
        axes.plot(thresholds, row["profile"]["value"], style, color=colour, label=short_text(value))
        axes.fill_between(thresholds, row["profile"]["low"], row["profile"]["high"], color=colour, alpha=0.15, lw=0)
    legend = axes.legend(frameon=False, fontsize=8, labelcolor=GREY, title=comparison.field, title_fontsize=8)
    legend.get_title().set_color(GREY)
    _label_panel(axes, Panel("profiles", "Performance profiles", (), comparison.metric))
    axes.set_xlabel("normalised score τ", color=GREY, fontsize=8)
    axes.set_ylabel("share of runs with score > τ", color=GREY, fontsize=8)
    return _file_of(figure, kind)


def draw_ladder(results: Mapping[str, Any], path: Path) -> None:
    """Plot return over steps, gradient noise at one θ, return over batches, and the largest ratios."""
    from matplotlib.figure import Figure

    by_name: Mapping[str, Results] = results["results"]
    rungs: Mapping[str, int] = results["rungs"]
    figure = Figure(figsize=(13, 9))
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.12)
    (steps, noise), (rollouts, ratios) = figure.subplots(2, 2)
    ends = [
        _curve(steps, cells, "steps", "return", RUNGS[rungs[name]], "-", _rung(rungs, name)) for name, cells in by_name.items()
    ]
    _finish(steps, "Learning: return over steps", "environment steps", "mean return of the last 100 episodes", ends)
    _noise(noise, results["gradients"], rungs)
    upper = {name: cells for name, cells in by_name.items() if rungs[name] >= 3}
    ends = [
        _curve(rollouts, cells, "rollouts", "return", RUNGS[rungs[name]], "-", _rung(rungs, name))
        for name, cells in upper.items()
    ]
    title = "Effect of reuse: return over batches of one size"
    _finish(rollouts, title, "batches collected", "mean return of the last 100 episodes", ends)
    ends = [
        _curve(ratios, cells, "rollouts", "ratio_max", RUNGS[rungs[name]], "-", _rung(rungs, name), _median_and_range)
        for name, cells in by_name.items()
        if rungs[name] >= 4
    ]
    if results["clip"] is not None and any(end is not None for end in ends):
        ratios.axhline(1 + results["clip"], color="#555555", lw=0.8, ls="--", zorder=0)
        ends.append(("1 + ε", 1 + results["clip"], "#555555"))
    ratios.set_yscale("log")
    unit = "largest ρ of each batch: median, range of seeds"
    _finish(ratios, "Effect of the clip: ratios ρ (log scale)", "batches collected", unit, ends)
    figure.suptitle(f"The ladder on {_title(next(iter(results['recipes'].values())), results['seeds'])}")
    figure.savefig(path, dpi=110)


def _noise(axes: Any, gradients: Mapping[str, Any] | None, rungs: Mapping[str, int]) -> None:
    """One row per rung: the variance with its interval on a log scale, labelled with its share of the first rung's."""
    if gradients is None:
        axes.axis("off")
        return
    rows = list(gradients["noise"].items())
    for row, (name, noise) in enumerate(rows):
        colour, value, (low, high) = RUNGS[rungs[name]], noise["variance"], noise["variance_interval"]
        if not value:  # no batch had a reward; a log scale has no place for 0
            axes.annotate(
                "no noise" if noise["signal"] else "no gradient",
                (0.5, -row),
                xycoords=("axes fraction", "data"),
                ha="center",
                fontsize=9,
            )
            continue
        low, high = (value if end is None else end for end in (low, high))
        axes.plot([low, high], [-row, -row], color=colour, lw=2.5, solid_capstyle="butt")
        axes.plot([value], [-row], "o", color=colour, ms=8)
        batches = noise["noise_to_signal"]
        signal = "signal lost in noise" if batches is None else f"noise/signal {number(batches)}"
        text = signal if noise["relative"] is None else f"×{noise['relative']:.2g}; {signal}"
        axes.annotate(text, (value, -row), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xscale("log")
    axes.margins(x=0.35)
    axes.set_yticks([-row for row in range(len(rows))], [_rung(rungs, name) for name, _ in rows])
    axes.set_ylim(-len(rows) + 0.4, 0.7)
    _label_axes(
        axes, "Effect of baselines and λ: noise of a batch's gradient", "trace of the covariance at one frozen θ, log scale", ""
    )


def _rung(rungs: Mapping[str, int], name: str) -> str:
    return f"{rungs[name]}  {name}"


def _title(recipe: Mapping[str, Any], seeds: int) -> str:
    spread = "one seed" if seeds == 1 else f"mean of {seeds} seeds, 95 % interval"
    return f"{recipe['task']}, {recipe['steps']:,} steps, {spread}"


# ---- curves -----------------------------------------------------------------------------------------------------------

End = tuple[str, float, str]
"""a curve's label, its last value and its colour"""

Spread = Callable[[Numbers], tuple[Numbers, Numbers, Numbers]]


def _median_and_range(curves: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    return np.median(curves, 0), curves.min(0), curves.max(0)


def aligned(cells: Results, x: str, y: str) -> tuple[Numbers, Numbers] | None:
    """The curves of all seeds at common points; None if no seed has any value.   [points], [n, points]"""
    curves = []
    for cell in cells:
        pairs = [(a, b) for a, b in zip(cell["curves"][x], cell["curves"][y], strict=True) if b is not None]
        if pairs:
            curves.append(np.array(pairs, float).T)
    if not curves:
        return None
    count = max(len(xs) for xs, _ in curves)  # as many points as the longest curve has, so that spikes stay visible
    grid = np.linspace(max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves), count)
    return grid, np.stack([np.interp(grid, xs, ys) for xs, ys in curves])


def _curve(axes: Any, cells: Results, x: str, y: str, colour: str, style: str, label: str, spread: Spread = band) -> End | None:
    curves_at = aligned(cells, x, y)
    if curves_at is None:
        return None
    grid, curves = curves_at
    centre, low, high = spread(curves)
    axes.fill_between(grid, low, high, color=colour, alpha=0.16, lw=0)
    axes.plot(grid, centre, color=colour, ls=style, lw=1.8)
    return label, float(centre[-1]), colour


def _points(axes: Any, scores: Sequence[float], row: float, colour: str, marker: str) -> None:
    """Draw each seed pale, the mean and its interval strong."""
    if not scores:
        return
    axes.plot(scores, [row] * len(scores), marker, color=colour, alpha=0.3, ms=5, mew=0)
    axes.plot(
        mean_interval(scores) if len(scores) > 1 else [*scores, *scores],
        [row, row],
        color=colour,
        lw=2.5,
        solid_capstyle="butt",
    )
    axes.plot([np.mean(scores)], [row], marker, color=colour, ms=7)


def _minor_label(value: float, _: int) -> str:
    """Label 2 and 5 between the powers of ten, and no other minor tick."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _frame(axes: Any, colour: str, alpha: float) -> None:
    """Hide the upper and right edge, and draw a grid below the lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=colour, alpha=alpha, lw=0.6)
    axes.set_axisbelow(True)


def _label_axes(axes: Any, title: str, x: str, y: str) -> None:
    from matplotlib import ticker

    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _frame(axes, "#DDDDDD", 1.0)

    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            low, high = sorted(axis.get_view_interval())
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(_minor_label if high < 300 * low else "")
            if high < 5 * low:  # the axis may contain no power of ten
                axis.set_major_locator(ticker.MaxNLocator(5))
                axis.set_minor_locator(ticker.NullLocator())
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_formatter("{x:,.0f}")


def _finish(axes: Any, title: str, x: str, y: str, ends: Sequence[End | None]) -> None:
    """Set title and axes, and label each curve at its end; labels that would overlap are moved apart."""
    drawn = [end for end in ends if end is not None]
    if not drawn:
        axes.axis("off")
        return
    _label_axes(axes, title, x, y)
    axes.margins(x=0)
    at = [_height(axes, value) for _, value, _ in drawn]
    for (label, _, colour), start, height in zip(drawn, at, apart(at, 0.055), strict=True):
        axes.annotate(
            label,
            (1.0, start),
            (1.03, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=9,
            fontweight="bold",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)},
        )


def _height(axes: Any, value: float) -> float:
    """The height of a value on the y axis: 0 at its lower end, 1 at its upper end."""
    scale = np.log if axes.get_yscale() == "log" else np.asarray
    low, high, at = (float(scale(each)) for each in (*axes.get_ylim(), value))
    return (at - low) / (high - low)


def apart(heights: Sequence[float], distance: float) -> list[float]:
    """Heights in the same order, moved as little as needed so that no two are closer than ``distance``."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[float]] = []  # [mean height, members]: labels that touch are centred together
    for i in order:
        groups.append([heights[i], 1])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < distance * (groups[-1][1] + groups[-2][1]) / 2:
            (a, n), (b, m) = groups[-2], groups.pop()
            groups[-1] = [(a * n + b * m) / (n + m), n + m]
    placed = [centre + distance * (k - (size - 1) / 2) for centre, size in groups for k in range(int(size))]
    result = [0.0] * len(heights)
    for i, height in zip(order, placed, strict=True):
        result[i] = height
    return result


# ---- plots of runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """One plot of metrics: the first is drawn solid, the second dashed."""

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


def run_colour(index: int) -> str:
    """The colour of a run, by its position."""
    return COLOURS[index % (len(COLOURS) - 1)]


def panels_of(runs: Sequence[SavedRun]) -> list[Panel]:
    """The panels for which any run has at least two values."""
    return [panel for panel in PANELS if any(len(run.curve(metric)[0]) > 1 for run in runs for metric in panel.metrics)]


def draw_panel(panel: Panel, runs: Sequence[SavedRun], kind: Literal["svg", "png"] = "svg") -> bytes:
    """The plot as the bytes of a file. The same runs give the same bytes; the caller names the lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 2.6), layout="constrained")
    axes = figure.subplots()
    lowest = 0.0
    for index, run in enumerate(runs):
        for style, metric in zip(("-", "--"), panel.metrics, strict=False):
            steps, values = (np.asarray(x, float) for x in run.curve(metric))
            finite = np.isfinite(values)
            steps, values = binned(steps[finite], values[finite])
            if panel.log:
                steps, values = steps[values > 0], values[values > 0]
            if len(values):
                _line(axes, steps, values, run_colour(index), style)
                lowest = min(lowest, float(np.quantile(values, 0.05)))
    _label_panel(axes, panel)
    if panel.name == "critic":  # the first iterations may be far below and would flatten the rest
        axes.set_ylim(max(-1.0, lowest * 1.1) - 0.05, 1.05)
    return _file_of(figure, kind)


def _file_of(figure: Any, kind: Literal["svg", "png"]) -> bytes:
    """A figure as the bytes of a file; svg without a background."""
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "surefoot", "svg.fonttype": "path"}):
        figure.savefig(file, format=kind, dpi=144, transparent=kind == "svg", metadata={"Date": None} if kind == "svg" else {})
    return file.getvalue()


def _line(axes: Any, steps: Numbers, values: Numbers, colour: str, style: str) -> None:
    """Draw few points as they are, many pale and with their running mean."""
    if len(values) < 12:
        axes.plot(steps, values, color=colour, ls=style, lw=1.6, marker="o", ms=3)
        return
    axes.plot(steps, values, color=colour, ls=style, lw=0.8, alpha=0.25)
    axes.plot(steps, smoothed(values), color=colour, ls=style, lw=1.8)


def binned(steps: Numbers, values: Numbers, points: int = DRAWN_POINTS) -> tuple[Numbers, Numbers]:
    """Means over neighbours, so that at most ``points`` remain.   [n], [n] -> [≤ points], [≤ points]"""
    if len(values) <= points:
        return steps, values
    edges = np.linspace(0, len(values), points + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(values)))
    return np.add.reduceat(steps, edges) / counts, np.add.reduceat(values, edges) / counts


def smoothed(values: Numbers) -> Numbers:
    """The mean over a window around each point, shorter at the ends.   [n] -> [n]"""
    window = np.ones(2 * max(1, int(SMOOTHING * len(values) / 2)) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _label_panel(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11, color=GREY, fontweight="bold", parse_math=False)
    axes.set_title(panel.unit, loc="right", fontsize=8, color=GREY)
    if panel.log:
        axes.set_yscale("log")
    _frame(axes, GREY, 0.2)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelsize=8, which="both")
    axes.margins(x=0.01)
    axes.xaxis.set_major_formatter(lambda x, _: thousands(x))


def thousands(x: float) -> str:
    """``12k`` for 12,000, ``3M`` for 3,000,000."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:g}{letter}"
    return f"{x:g}"
