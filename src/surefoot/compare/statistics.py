"""Statistics over a few seeds, and how tables print them: means, intervals, gradient noise.

Only NumPy is needed. Agarwal et al. 2021 (arXiv 2108.13264) recommend the interquartile mean and bootstrap intervals; those
contain the true value in only 70 to 90 % of cases with 3 to 5 seeds, so intervals here are Student's and Welch's t.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
"""of all intervals"""
RESAMPLES = 2_000
NOISE_RESAMPLES = 2_000
FEWEST_BATCHES = 10
"""of the interval of a gradient's noise; with fewer the bootstrap is too narrow"""
PRODUCT_COLUMNS = 1 << 16
"""parameters converted to float64 at a time for inner products; the gradients themselves are stored once, in float32"""
COUNT = "{:,.0f}"

Statistic = Callable[[NDArray[Any]], NDArray[Any]]
"""numbers [..., n] -> one for each row [...]"""
Results = Sequence[Mapping[str, Any]]
"""the result of each cell of one algorithm, as ``cells.train_cell`` returns it"""


def mean(scores: ArrayLike) -> NDArray[Any]:
    """The arithmetic mean.   [..., n] -> [...]"""
    return np.asarray(np.mean(np.asarray(scores, float), -1))


def interquartile_mean(scores: ArrayLike, counts: ArrayLike = 1) -> NDArray[Any]:
    """The mean of the middle half.   [..., n] -> [...]

    Numbers on its borders count in part: as if each number were there four times.

    counts   whole numbers: how often each score counts   [n] or a scalar
    """
    scores = np.asarray(scores, float)
    order = np.argsort(scores, -1)
    weights = np.take_along_axis(np.broadcast_to(4 * np.asarray(counts), scores.shape), order, -1)
    ends = weights.cumsum(-1)  # whole numbers: exact
    quarter = ends[..., -1:] // 4
    inside = np.clip(np.minimum(ends, 3 * quarter) - np.maximum(ends - weights, quarter), 0, None)
    parts = np.where(inside > 0, np.take_along_axis(scores, order, -1), 0) * inside
    return np.asarray(parts.sum(-1) / (2 * quarter[..., 0]))


# ---- intervals over seeds ---------------------------------------------------------------------------------------------


@lru_cache
def t_quantile(freedom: float) -> float:
    """How many standard errors the 95 % interval of Student's t extends to each side, such as 4.3 for 2 degrees of freedom."""
    angles = np.linspace(0, np.pi / 2, 20_001)  # t = √ν tan(angle) makes the density cos^(ν−1)
    density = np.cos(angles) ** (min(freedom, 10_000.0) - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(min(freedom, 10_000.0)) * np.tan(np.interp(LEVEL, below / below[-1], angles)))


def welch_quantile(variances: ArrayLike, counts: ArrayLike) -> float:
    """The quantile of t for a sum of independent means, by Welch's degrees of freedom; infinite if a mean is of one score.

    variances   of the means, s²/n   [k]
    counts      the number of scores behind each   [k]
    """
    variances, counts = np.asarray(variances, float), np.asarray(counts)
    if counts.min() < 2:
        return math.inf
    if not variances.any():
        return 1.0  # of an error of 0
    shares = variances / variances.max()  # so that no square underflows
    return t_quantile(float(np.round(shares.sum() ** 2 / (shares**2 / (counts - 1)).sum(), 3)))


def mean_interval(*groups: ArrayLike) -> tuple[float, float]:
    """The 95 % interval of the mean of independent scores [n] by Student's t.

    With a second group it is the interval of mean(first) − mean(second) by Welch's t.

    One score has no interval: the bounds are infinite. Raises ValueError without scores.
    """
    each = [_scores(group) for group in groups]
    centre = float(each[0].mean() - sum(scores.mean() for scores in each[1:]))
    if min(map(len, each)) < 2:
        return -math.inf, math.inf
    variances = [float(scores.var(ddof=1)) / len(scores) for scores in each]
    half = welch_quantile(variances, [len(scores) for scores in each]) * math.sqrt(sum(variances))
    return centre - half, centre + half


def interval(
    statistic: Callable[..., NDArray[Any]], *groups: Sequence[ArrayLike], within: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[float, float]:
    """The 95 % interval of any statistic of groups of tasks, each with the independent scores of some seeds.

    The standard error is that of normal scores with the mean and variance of each task; the interval extends from the value by
    the quantile of Welch's t. For normal scores of 3 to 10 seeds it contains the true value of an interquartile mean, or of a
    difference of two, in 94 to 98 % of cases. A task with one score makes the bounds infinite.

    statistic   takes the scores of each group, [..., seeds] for each task -> [...]
    within      the bounds of the statistic itself
    """
    each = [[_scores(task) for task in tasks] for tasks in groups]
    flat = [task for tasks in each for task in tasks]
    if min(map(len, flat)) < 2:
        return within
    draw = np.random.default_rng(0)
    drawn = [
        [task.mean() + task.std(ddof=1) * draw.standard_normal((RESAMPLES, len(task))) for task in tasks] for tasks in each
    ]
    quantile = welch_quantile([task.var(ddof=1) / len(task) for task in flat], [len(task) for task in flat])
    value, half = float(statistic(*each)), quantile * float(statistic(*drawn).std())
    return max(within[0], value - half), min(within[1], value + half)


def score_interval(scores: ArrayLike, statistic: Statistic = mean) -> tuple[float, float]:
    """The 95 % interval of the mean, or of another statistic, of independent scores [n]."""
    return mean_interval(scores) if statistic is mean else interval(lambda tasks: statistic(tasks[0]), [scores])


def _scores(scores: ArrayLike) -> NDArray[Any]:
    scores = np.asarray(scores, float)
    if scores.ndim != 1 or not scores.size:
        raise ValueError(f"scores: needs a 1-D array of at least one score, not shape {scores.shape}")
    return scores


def band(curves: ArrayLike) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Mean and 95 % interval at every point of n curves; of one curve only the mean.   [n, points] -> [points] three times"""
    curves = np.asarray(curves, float)
    centre, count = curves.mean(0), len(curves)
    half = t_quantile(count - 1) * curves.std(0, ddof=1) / math.sqrt(count) if count > 1 else np.zeros_like(centre)
    return centre, centre - half, centre + half


# ---- gradient noise ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientNoise:
    """Variance and signal of one estimator's gradients, with 95 % bootstrap intervals over the batches; infinite ones for fewer
    than ``FEWEST_BATCHES``."""

    variance: float
    """trace of the covariance matrix of one batch's gradient"""
    variance_interval: tuple[float, float]
    relative: float | None
    """variance as a share of the first estimator's; None if that is 0, as before there is any reward"""
    relative_interval: tuple[float, float] | None
    """narrow, because both come from the same batches"""
    signal: float
    """squared norm of the expected gradient; the estimate is unbiased, so it may be negative when noise dominates"""
    signal_interval: tuple[float, float]
    noise_to_signal: float | None
    """variance / signal: the number of batches to average until both are equal; None if the signal is not positive"""


def noise_of(gradients: NDArray[np.floating[Any]]) -> list[GradientNoise]:
    """Variance and signal of each estimator, from samples [estimators, batches, parameters] of its gradient.

    Variance is the mean of ½|g_i − g_j|² over pairs of different batches, signal that of g_i·g_j; both are unbiased. The
    bootstrap weighs pairs by how often their batches were drawn and never pairs a batch with itself, so it stays unbiased.
    Raises ValueError for fewer than two batches.
    """
    count = gradients.shape[1]
    if count < 2:
        raise ValueError(f"gradients: {count} batch has no variance; sample at least 2")
    drawn = np.random.default_rng(0).integers(0, count, (NOISE_RESAMPLES, count))
    weights = np.stack([(drawn == i).sum(1) for i in range(count)], 1).astype(float)
    weights = weights[(weights > 0).sum(1) > 1]  # with few batches a resample may contain only one of them: no pair
    noises, first = [], None
    for rows in gradients:
        products = _inner_products(rows)
        squares = np.diag(products)
        distances = (squares[:, None] + squares[None, :]) / 2 - products
        variance, signal = (float(_mean_over_pairs(m, np.ones((1, count)))[0]) for m in (distances, products))
        variances, signals = (_mean_over_pairs(m, weights) for m in (distances, products))
        first = first or (variance, variances)
        varied = first[1] > 0  # if gradients are rarely nonzero, a resample may contain none
        noises.append(
            GradientNoise(
                variance=variance,
                variance_interval=_percentiles(variances, count),
                relative=variance / first[0] if first[0] > 0 else None,
                relative_interval=_percentiles(variances[varied] / first[1][varied], count) if first[0] > 0 else None,
                signal=signal,
                signal_interval=_percentiles(signals, count),
                noise_to_signal=variance / signal if signal > 0 else None,
            )
        )
    return noises


def _inner_products(rows: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """g_i·g_j of all pairs, summed in float64.   [n, parameters] -> [n, n]"""
    total = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], PRODUCT_COLUMNS):
        part = rows[:, start : start + PRODUCT_COLUMNS].astype(np.float64)
        total += part @ part.T
    return total


def _mean_over_pairs(matrix: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of a matrix's entries off the diagonal, entry (i, j) weighted by w_i w_j.   [n, n], [k, n] -> [k]"""
    whole = np.einsum("ki,ij,kj->k", weights, matrix, weights, optimize=True) - weights**2 @ np.diag(matrix)
    return np.asarray(whole / (weights.sum(1) ** 2 - (weights**2).sum(1)))


def _percentiles(values: NDArray[np.float64], batches: int) -> tuple[float, float]:
    """The bounds that contain the middle 95 % of the resamples' values; infinite for few batches.   [resamples]"""
    if batches < FEWEST_BATCHES:
        return -math.inf, math.inf
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


# ---- as text ----------------------------------------------------------------------------------------------------------


def finite(tree: Any) -> Any:
    """A tree with None in place of infinities and NaN, which JSON can't represent."""
    if isinstance(tree, Mapping):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def number(value: float | None) -> str:
    """About four digits, with commas between thousands; a dash for None or a value that is not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 or value == 0 else 4
    return f"{value:,.{digits}f}"


def interval_text(low: float | None, high: float | None) -> str:
    """``1.00 to 2.00``; a dash for one without bounds, as of one seed."""
    known = [bound for bound in (low, high) if bound is not None and math.isfinite(bound)]
    return f"{number(low)} to {number(high)}" if known else "–"


def numbers(values: Sequence[float | None]) -> str:
    """The numbers of all seeds, separated by commas, with a dash for one without; a dash if there are none."""
    return ", ".join(map(number, values)) if any(value is not None for value in values) else "–"


def present(results: Results, name: str) -> list[float]:
    """The values of one score, without the cells that have none."""
    return [result[name] for result in results if result.get(name) is not None]


def average(results: Results, name: str, form: str | None = None) -> str:
    """The mean over seeds of a score, in about four digits or in a given format."""
    values = present(results, name)
    if not values:
        return "–"
    mean_value = sum(values) / len(values)
    return number(mean_value) if form is None else form.format(mean_value)


def with_interval(scores: Sequence[float], statistic: Statistic = mean) -> tuple[str, str]:
    """A statistic and its interval, as two cells of a table."""
    if not scores:
        return "–", "–"
    return number(float(statistic(np.asarray(scores, float)))), interval_text(*score_interval(scores, statistic))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text: the first aligned left, the others right."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])
