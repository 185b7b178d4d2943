"""metrics.jsonl as columns, read on as it grows, and as few points as a screen can show of however many iterations."""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json  # twice as fast as json, and long runs have 100 MB of it

Column = NDArray[np.float64]


class Columns:
    """The metrics of a run. A line that is not whole yet is read the next time; a file that was cut back is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.offset, self.inode, self.rows = 0, -1, 0
        self.columns: dict[str, Column] = {}

    def read_on(self) -> int:
        """Take in what was written since the last time; how many iterations there are now."""
        with self.lock:
            try:
                with self.path.open("rb") as file:
                    state = self.path.stat()
                    if state.st_ino != self.inode or state.st_size < self.offset:
                        self._forget()
                        self.inode = state.st_ino
                    file.seek(self.offset)
                    text = file.read()
            except OSError:
                self._forget()
                return 0
            text = text[: text.rfind(b"\n") + 1]
            self.offset += len(text)
            if rows := _objects(text):
                self._append(rows)
            return self.rows

    def _append(self, rows: list[dict[str, Any]]) -> None:
        names = list(dict.fromkeys(chain(self.columns, *rows)))
        columns: dict[str, Column] = {}
        for name, new in zip(names, _columns(rows, names), strict=True):
            old = self.columns.get(name)
            if new is not None or old is not None:
                columns[name] = np.append(_or_nothing(old, self.rows), _or_nothing(new, len(rows)))
        self.rows += len(rows)
        self.columns = columns  # at once: who draws them meanwhile has all of the old ones, of one length

    def names(self) -> list[str]:
        """The metrics that have a number anywhere."""
        return [name for name, column in self.columns.items() if not np.isnan(column).all()]


def _columns(rows: list[dict[str, Any]], names: list[str]) -> list[Column | None]:
    """The numbers of each name, NaN where a row has none; None for what is no number.   each [N]"""
    with contextlib.suppress(KeyError, TypeError, ValueError):  # as a rule every row has the same keys, and numbers alone
        if len(names) > 1:
            return list(np.array(list(map(itemgetter(*names), rows)), dtype=np.float64).T.copy())
    found: list[Column | None] = []
    for name in names:
        try:
            found.append(np.array([row.get(name) for row in rows], dtype=np.float64))
        except (TypeError, ValueError):
            found.append(None)
    return found


def _or_nothing(column: Column | None, rows: int) -> Column:
    return np.full(rows, np.nan) if column is None else column


def _objects(text: bytes) -> list[dict[str, Any]]:
    lines = text.splitlines()
    try:
        rows = from_json(b"[" + b",".join(lines) + b"]", cache_strings="keys")
    except ValueError:
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError):
                rows.append(from_json(line))
    return [row for row in rows if isinstance(row, dict) and "steps" in row]


@dataclass(frozen=True)
class Curve:
    """A metric at the points of a grid; NaN where nothing is known.   All [P]

    ``low`` and ``high`` are the extremes of the iterations that a point stands for, so that no spike is lost.
    """

    low: Column
    high: Column
    smooth: Column


def grid_of(runs: Sequence[Columns], start: float, end: float, points: int) -> Column:
    """The steps at which curves are told: the iterations' own where they are few, else evenly spaced ones.   [P]"""
    steps = [_steps(run) for run in runs]
    inside = [x[(x >= start) & (x <= end)] for x in steps]
    if sum(map(len, inside)) <= 4 * points:
        union = np.unique(np.concatenate([np.empty(0), *inside]))
        if len(union) <= points:
            return union
    first, last = min(x[0] for x in inside if len(x)), max(x[-1] for x in inside if len(x))
    return np.unique(np.round(np.linspace(first, last, points)))


def curve(run: Columns, name: str, grid: Column, window: int) -> Curve:
    """One metric of one run on a grid.

    window   iterations of the running mean, the last of which is the point's own; 1 for none
    """
    columns = run.columns
    steps, values = columns.get("steps", np.empty(0)), columns.get(name)
    nothing = np.full(len(grid), np.nan)
    if values is None or not len(grid):
        return Curve(nothing, nothing, nothing)
    ends = np.searchsorted(steps, grid, side="right")  # a point stands for the iterations since the point before it
    starts = np.concatenate([[max(0, np.searchsorted(steps, grid[0]))], ends[:-1]])
    low, high, smooth = nothing.copy(), nothing.copy(), nothing.copy()
    held = np.flatnonzero(ends > starts)
    if len(held):
        pairs = np.column_stack([starts[held], ends[held]]).ravel()
        padded = np.append(values, np.nan)
        low[held], high[held] = np.fmin.reduceat(padded, pairs)[::2], np.fmax.reduceat(padded, pairs)[::2]
        means = running_mean(values, window)
        last = ends[held] - 1
        smooth[held] = np.where(np.isnan(high[held]), np.nan, means[last])
    return Curve(low, high, smooth)


def running_mean(values: Column, window: int) -> Column:
    """The mean of the last ``window`` numbers at each place, of those that are finite.   [N]"""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(0, end - max(1, window))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums[end] - sums[begin]) / (counts[end] - counts[begin]), dtype=np.float64)


def _steps(run: Columns) -> Column:
    return run.columns.get("steps", np.empty(0))


def numbers(x: Any) -> list[float | None]:
    """A list for JSON: six digits, and None for what is not finite."""
    return [float(f"{value:.6g}") if abs(value) < np.inf else None for value in np.asarray(x, dtype=np.float64).tolist()]
