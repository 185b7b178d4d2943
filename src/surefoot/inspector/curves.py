"""metrics.jsonl as columns, read on as it grows, and as few points as a screen can show of however many iterations."""

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from surefoot.runs.trackers.metrics_jsonl import BOM, Row, in_order, row_of

Column = NDArray[np.float64]
AT_A_TIME = 2**20
"""bytes"""
AT_ONCE = 0.5
"""seconds for which reading keeps others waiting, however long a file is"""


class Columns:
    """The metrics of a run. A line that is not whole yet is read the next time; a file that was cut back is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.offset, self.inode, self.rows = 0, -1, 0
        self.columns: dict[str, Column] = {}

    def read_on(self, patience: float = math.inf) -> int:
        """Take in what was written since the last time; how many iterations there are now.

        patience   seconds after which what is not read yet is left for the next time. What one thread reads another waits for,
                   but no longer either
        """
        until = time.monotonic() + patience
        if self.lock.acquire(timeout=-1 if patience == math.inf else patience):
            try:
                self._append(self._blocks(until))
            finally:
                self.lock.release()
        return self.rows

    def _blocks(self, until: float) -> list["Block"]:
        """What is new in the file, as far as time allows; at least a part of it."""
        blocks: list[Block] = []
        try:
            with self.path.open("rb") as file:
                state = self.path.stat()
                if state.st_ino != self.inode or state.st_size < self.offset:
                    self._forget()
                    self.inode = state.st_ino
                file.seek(self.offset)
                for lines in _whole_lines(file):
                    rows = _rows(lines if self.offset else lines.removeprefix(BOM))
                    self.offset += len(lines)
                    if rows:
                        blocks.append(_block(rows))
                    if time.monotonic() > until:
                        break
        except OSError:
            self._forget()
            return []
        return blocks

    def read_all(self) -> None:
        """Take in everything, with pauses between which others get what is known."""
        before = -1
        while self.offset != before:
            before = self.offset
            self.read_on(AT_ONCE)
            time.sleep(0)

    def _append(self, blocks: list["Block"]) -> None:
        if not blocks:
            return
        columns: dict[str, Column] = {}
        for name in dict.fromkeys(chain(self.columns, *(block.columns for block in blocks))):
            parts = [_or_nothing(self.columns.get(name), self.rows)] if self.rows else []
            columns[name] = np.concatenate([*parts, *(_or_nothing(block.columns.get(name), block.rows) for block in blocks)])
        if (np.diff(columns["iteration"]) <= 0).any() or (np.diff(columns["steps"]) <= 0).any():
            kept = in_order(columns["iteration"].tolist(), columns["steps"].tolist())
            columns = {name: column[kept] for name, column in columns.items()}
        self.rows = len(columns["steps"])
        self.columns = columns  # at once: who draws them meanwhile has all of the old ones, of one length

    def names(self) -> list[str]:
        """The metrics that have a number anywhere."""
        return [name for name, column in self.columns.items() if not np.isnan(column).all()]


@dataclass(frozen=True)
class Block:
    """Some consecutive iterations: the numbers of each name, NaN where one has none.   each [N]"""

    rows: int
    columns: dict[str, Column]


def _block(rows: list[dict[str, Any]]) -> Block:
    """Columns of rows, of which as a rule those with as many keys have the same ones."""
    sizes = np.fromiter(map(len, rows), np.int64)
    columns: dict[str, Column] = {}
    for size in np.unique(sizes):
        at = np.flatnonzero(sizes == size)
        for name, values in _values([rows[index] for index in at]).items():
            columns.setdefault(name, np.full(len(rows), np.nan))[at] = values
    return Block(len(rows), columns)


def _values(rows: list[dict[str, Any]]) -> dict[str, Column]:
    """The numbers of rows with as many keys; what is no number is left out.   each [N]"""
    names = tuple(rows[0])
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if len(names) > 1:
            return dict(zip(names, np.array(list(map(itemgetter(*names), rows)), dtype=np.float64).T, strict=True))
    found: dict[str, Column] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        with contextlib.suppress(TypeError, ValueError):
            found[name] = np.array([row.get(name) for row in rows], dtype=np.float64)
    return found


def _or_nothing(column: Column | None, rows: int) -> Column:
    return np.full(rows, np.nan) if column is None else column


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The rest of a file by whole lines, some at a time: what fits into the processor's cache is read twice as fast."""
    left = b""
    while part := file.read(AT_A_TIME):
        lines, end, rest = part.rpartition(b"\n")
        if end:
            yield left + lines + end
            left = rest
        else:
            left += part


def _rows(lines: bytes) -> list[Row]:
    """The rows in whole lines."""
    return [row for row in map(row_of, lines.split(b"\n")) if row is not None]


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
