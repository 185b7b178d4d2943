"""Plots of comparisons: curves with a band over seeds, labels beside the lines, colours that colour-blind readers tell apart.

matplotlib is imported here when a plot is drawn, and nowhere else; it draws into files, never on a screen.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.compare.report import number
from surefoot.compare.statistics import band, bootstrap_interval

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, without the yellow, which is hard to see on white"""
RUNGS = ("#999999", "#000000", "#56B4E9", "#0072B2", "#E69F00", "#D55E00")
"""of the ladder's six: grey and black without a critic, blues with one, warm colours where a batch is reused"""
STYLES = ("-", "--", ":", "-.")

Cells = Sequence[Mapping[str, Any]]


def draw_comparison(results: Mapping[str, Any], path: Path) -> None:
    """Return over steps, and the final scores of every seed with mean and interval."""
    from matplotlib.figure import Figure

    by_name: Mapping[str, Cells] = results["results"]
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    curves, scores = figure.subplots(1, 2, width_ratios=[3, 2])
    looks = {name: (COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]) for i, name in enumerate(by_name)}
    ends = [_curve(curves, cells, "steps", "return", *looks[name], name) for name, cells in by_name.items()]
    _finish(curves, "Return over steps", "environment steps", "mean return of the last 100 episodes", ends)
    kinds = [("last_100_mean", "o", "in training, last 100 episodes"), ("greedy_mean", "D", "final agent, greedy")]
    for row, (name, cells) in enumerate(by_name.items()):
        for (score, marker, _), shift in zip(kinds, (0.14, -0.14), strict=True):
            _points(scores, [c[score] for c in cells if c.get(score) is not None], -row + shift, looks[name][0], marker)
    for _, marker, text in kinds:
        scores.plot([], [], marker, color="#555555", label=text)
    scores.set_yticks([-row for row in range(len(by_name))], list(by_name))
    scores.set_ylim(-len(by_name) + 0.3, 1.0)
    scores.legend(loc="upper left", frameon=False, ncols=2, fontsize=8)
    _plain(scores, "Final return: seeds (pale), mean and interval", "return", "")
    figure.suptitle(_title(next(iter(results["recipes"].values())), results["seeds"]))
    figure.savefig(path, dpi=110)


def draw_ladder(results: Mapping[str, Any], path: Path) -> None:
    """Four pictures: return over steps, gradient noise at one θ, learning per rollout, and the largest ratios."""
    from matplotlib.figure import Figure

    by_name: Mapping[str, Cells] = results["results"]
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
    title = "What reuse buys: return over batches of one size"
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
    _finish(ratios, "What the clip tames: ratios ρ (log scale)", "batches collected", unit, ends)
    figure.suptitle(f"The ladder on {_title(next(iter(results['recipes'].values())), results['seeds'])}")
    figure.savefig(path, dpi=110)


def _noise(axes: Any, gradients: Mapping[str, Any] | None, rungs: Mapping[str, int]) -> None:
    """A row per rung: the variance with its interval on a log scale, and in words what share is left."""
    if gradients is None:
        axes.axis("off")
        return
    rows = list(gradients["noise"].items())
    for row, (name, noise) in enumerate(rows):
        colour, value, (low, high) = RUNGS[rungs[name]], noise["variance"], noise["variance_interval"]
        if not value:  # as where nothing was rewarded in any batch: there is no place for it on a log scale
            axes.annotate(
                "no noise" if noise["signal"] else "no gradient",
                (0.5, -row),
                xycoords=("axes fraction", "data"),
                ha="center",
                fontsize=9,
            )
            continue
        axes.plot([low, high], [-row, -row], color=colour, lw=2.5, solid_capstyle="butt")
        axes.plot([value], [-row], "o", color=colour, ms=8)
        batches = noise["noise_to_signal"]
        seen = "signal lost in noise" if batches is None else f"noise/signal {number(batches)}"
        text = seen if noise["relative"] is None else f"×{noise['relative']:.2g}; {seen}"
        axes.annotate(text, (value, -row), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xscale("log")
    axes.margins(x=0.35)
    axes.set_yticks([-row for row in range(len(rows))], [_rung(rungs, name) for name, _ in rows])
    axes.set_ylim(-len(rows) + 0.4, 0.7)
    _plain(
        axes, "What baselines and λ buy: noise of a batch's gradient", "trace of the covariance at one frozen θ, log scale", ""
    )


def _rung(rungs: Mapping[str, int], name: str) -> str:
    return f"{rungs[name]}  {name}"


def _title(recipe: Mapping[str, Any], seeds: int) -> str:
    spread = "one seed" if seeds == 1 else f"mean of {seeds} seeds, 95 % bootstrap interval"
    return f"{recipe['task']}, {recipe['steps']:,} steps, {spread}"


# ---- curves -----------------------------------------------------------------------------------------------------------

End = tuple[str, float, str]
"""a curve's label, its last value and its colour"""

Spread = Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]


def _median_and_range(curves: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    return np.median(curves, 0), curves.min(0), curves.max(0)


def aligned(cells: Cells, x: str, y: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """The curves of all seeds at common points, where all have a value; None where there are none.   [points], [n, points]"""
    known = []
    for cell in cells:
        pairs = [(a, b) for a, b in zip(cell["curves"][x], cell["curves"][y], strict=True) if b is not None]
        if pairs:
            known.append(np.array(pairs, float).T)
    if not known:
        return None
    count = max(len(xs) for xs, _ in known)  # as many as there are, so that a spike stays one
    grid = np.linspace(max(xs[0] for xs, _ in known), min(xs[-1] for xs, _ in known), count)
    return grid, np.stack([np.interp(grid, xs, ys) for xs, ys in known])


def _curve(axes: Any, cells: Cells, x: str, y: str, colour: str, style: str, label: str, spread: Spread = band) -> End | None:
    found = aligned(cells, x, y)
    if found is None:
        return None
    grid, curves = found
    centre, low, high = spread(curves)
    axes.fill_between(grid, low, high, color=colour, alpha=0.16, lw=0)
    axes.plot(grid, centre, color=colour, ls=style, lw=1.8)
    return label, float(centre[-1]), colour


def _points(axes: Any, scores: Sequence[float], row: float, colour: str, marker: str) -> None:
    """Each seed pale, the mean and its interval strong."""
    if not scores:
        return
    axes.plot(scores, [row] * len(scores), marker, color=colour, alpha=0.3, ms=5, mew=0)
    axes.plot(bootstrap_interval(scores), [row, row], color=colour, lw=2.5, solid_capstyle="butt")
    axes.plot([np.mean(scores)], [row], marker, color=colour, ms=7)


def _few(value: float, _: int) -> str:
    """Labels of 2 and 5 between the powers of ten."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _plain(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    from matplotlib import ticker

    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            low, high = sorted(axis.get_view_interval())
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(_few if high < 300 * low else "")
            if high < 5 * low:  # not even a power of ten may lie within
                axis.set_major_locator(ticker.MaxNLocator(5))
                axis.set_minor_locator(ticker.NullLocator())
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_formatter("{x:,.0f}")


def _finish(axes: Any, title: str, x: str, y: str, ends: Sequence[End | None]) -> None:
    """Title and axes, and each curve's label beside its end, moved apart where they would overlap."""
    there = [end for end in ends if end is not None]
    if not there:
        axes.axis("off")
        return
    _plain(axes, title, x, y)
    axes.margins(x=0)
    at = [_height(axes, value) for _, value, _ in there]
    for (label, _, colour), start, height in zip(there, at, apart(at, 0.055), strict=True):
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
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "shrinkA": 1, "shrinkB": 0},
        )


def _height(axes: Any, value: float) -> float:
    """Where a value lies between the lower and the upper end of the y axis, as a share."""
    scale = np.log if axes.get_yscale() == "log" else np.asarray
    low, high, here = (float(scale(each)) for each in (*axes.get_ylim(), value))
    return (here - low) / (high - low)


def apart(heights: Sequence[float], distance: float) -> list[float]:
    """Heights in the same order, moved as little as needed so that no two are nearer than ``distance``."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[float]] = []  # [mean height, members]: neighbours that touch share one centre
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
