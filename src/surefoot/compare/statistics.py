"""What a handful of seeds says, and how sure: mean, interquartile mean, bootstrap intervals, tables.

NumPy alone, so that tables come out without any extra. Agarwal et al. 2021 (arXiv 2108.13264) argue for the interquartile mean
and for intervals; with a single task there is one stratum, and the stratified bootstrap is the plain one over seeds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000

Statistic = Callable[[NDArray[Any]], NDArray[Any]]
"""numbers [..., n] -> one for each row [...]"""


def mean(scores: ArrayLike) -> NDArray[Any]:
    """The arithmetic mean.   [..., n] -> [...]"""
    return np.asarray(np.mean(np.asarray(scores, float), -1))


def interquartile_mean(scores: ArrayLike) -> NDArray[Any]:
    """The mean of the middle half.   [..., n] -> [...]

    Where n is no multiple of 4, the numbers on the border count in part: as if each were there four times.
    """
    scores = np.asarray(scores, float)
    n = scores.shape[-1]
    return np.asarray(np.sort(np.repeat(scores, 4, -1), -1)[..., n : 3 * n].mean(-1))


def resampled(count: int, resamples: int = RESAMPLES) -> NDArray[np.int64]:
    """Indices of bootstrap resamples, the same for the same counts.   -> [resamples, count]"""
    return np.random.default_rng(0).integers(0, count, (resamples, count))


def middle(values: NDArray[Any], level: float = 0.95) -> tuple[NDArray[Any], NDArray[Any]]:
    """The bounds between which ``level`` of the resamples' values lie.   [resamples, ...] -> [...], [...]"""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def bootstrap_interval(scores: ArrayLike, statistic: Statistic = mean, level: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap interval of a statistic of independent scores [n].

    Few seeds make it too narrow: it can't reach beyond the worst and the best that happened. Raises ValueError without scores.
    """
    scores = np.asarray(scores, float)
    if scores.ndim != 1 or not scores.size:
        raise ValueError(f"scores: needs one score or more in a row, not shape {scores.shape}")
    low, high = middle(statistic(scores[resampled(len(scores))]), level)
    return float(low), float(high)


def band(curves: ArrayLike, level: float = 0.95) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Mean and bootstrap interval of the mean at every point of n curves.   [n, points] -> [points] three times"""
    curves = np.asarray(curves, float)
    indices = resampled(len(curves), 2_000)
    weights = np.stack([(indices == i).mean(1) for i in range(len(curves))], 1)
    low, high = middle(weights @ curves, level)
    return curves.mean(0), low, high


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up in plain text too: the first on the left, others on the right."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])
