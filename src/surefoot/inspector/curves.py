"""Read metrics.jsonl as columns while it grows, and reduce curves to as many points as a screen can show."""

import contextlib
import math
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from surefoot.errors import SurefootError
from surefoot.files import open_file
from surefoot.store.reading import BOM, Row, check_counts, in_order, row_of, rows_together, unreadable

Column = NDArray[np.float64]
AT_A_TIME = 2**18
"""bytes read at a time"""
FALLING = ("held_out_loss", "policy_loss")
"""results that are better if lower"""
AT_ONCE = 0.5
"""maximum seconds that one read may take, for a file of any length"""


class NewLines:
    """Reads the lines of a growing metrics.jsonl, each once. Incomplete lines are read the next time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset, self.inode, self.lines = 0, -1, 0
        self.fault: str | None = None
        """why the file can't be read, in words that follow its name"""

    def read(self, until: float) -> tuple[bool, list["Block"]]:
        """Whether the file was truncated, replaced or removed, so that it is read again from its start; and the new lines as
        blocks, until the time is up, but at least one part.
        """
        again, blocks = False, []
        try:
            with open_file(self.path) as file:
                state = self.path.stat()
                if state.st_ino != self.inode or state.st_size < self.offset:
                    again, self.offset, self.inode, self.lines = True, 0, state.st_ino, 0
                file.seek(self.offset)
                for lines in _whole_lines(file):
                    count = lines.count(b"\n")
                    blocks.append(_block(lines if self.offset else lines.removeprefix(BOM), self.lines + 1, count))
                    self.offset += len(lines)
                    self.lines += count
                    if time.monotonic() > until:
                        break
        except (OSError, SurefootError) as error:
            self.offset, self.inode, self.lines = 0, -1, 0
            self.fault = str(error).removeprefix(f"{self.path}: ") if isinstance(error, SurefootError) else None
            return True, []
        self.fault = None
        return again, blocks

    @property
    def unread(self) -> bool:
        """Whether there are bytes after what was read."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_size > self.offset
        return False


class Results:
    """How far a run is, and the last and best value of some of its metrics, without keeping its rows.

    names   the metrics; those of ``FALLING`` are better if lower
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.source, self.names = NewLines(path), names
        self.lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.iterations, self.steps = 0, 0
        self.last: dict[str, float] = {}
        self.best: dict[str, float] = {}

    def read_on(self, patience: float = math.inf) -> None:
        """Read what was written since the last call, for at most ``patience`` seconds."""
        with self.lock:
            again, blocks = self.source.read(time.monotonic() + patience)
            if again:
                self._forget()
            for block in blocks:
                self._add(block)

    def _add(self, block: "Block") -> None:
        if not len(block.numbers):
            return
        self.iterations += len(block.numbers)
        self.steps = int(block.columns["steps"].max())
        for name in self.names:
            values = block.columns.get(name, np.empty(0))
            values = values[np.isfinite(values)]
            if len(values):
                better = min if name in FALLING else max
                self.last[name] = float(values[-1])
                self.best[name] = float(better(better(values), self.best.get(name, values[0])))


class Columns:
    """The metrics of a run. A truncated file is read again from the start."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, NewLines(path)
        self.lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.rows = 0
        self.columns: dict[str, Column] = {}
        self.numbers = np.empty(0, np.int64)
        """the numbers of the lines that the rows are from"""
        self.fault: str | None = None
        """the lines that can't be read, in words that follow the file's name"""

    def read_on(self, patience: float = math.inf) -> int:
        """Read what was written since the last call, and return the number of iterations so far.

        patience   maximum seconds; the rest is read by the next call. A second thread waits for the first, but no longer
        """
        until = time.monotonic() + patience
        if self.lock.acquire(timeout=-1 if patience == math.inf else patience):
            try:
                again, blocks = self.source.read(until)
                if again:
                    self._forget()
                    self.fault = self.source.fault
                self._append(blocks)
            finally:
                self.lock.release()
        return self.rows

    def read_all(self) -> None:
        """Read everything, in parts, so that other threads get what is read so far."""
        before = -1
        while self.source.offset != before:
            before = self.source.offset
            self.read_on(AT_ONCE)
            time.sleep(0)

    def _append(self, blocks: list["Block"]) -> None:
        if not blocks:
            return
        numbers = np.concatenate([self.numbers, *(block.numbers for block in blocks)])
        columns: dict[str, Column] = {}
        for name in dict.fromkeys(chain(self.columns, *(block.columns for block in blocks))):
            parts = [_or_nan(self.columns.get(name), self.rows)] if self.rows else []
            parts += [_or_nan(block.columns.get(name), len(block.numbers)) for block in blocks]
            columns[name] = np.concatenate(parts)
        if columns and ((np.diff(columns["iteration"]) <= 0).any() or (np.diff(columns["steps"]) <= 0).any()):
            kept = in_order(columns["iteration"].tolist(), columns["steps"].tolist())
            columns = {name: column[kept] for name, column in columns.items()}
            numbers = numbers[kept]
        self.rows, self.numbers = len(numbers), numbers
        lines = self.source.lines
        if self.rows < lines:
            first = np.flatnonzero(np.append(numbers, -1) != np.arange(1, self.rows + 2))[0] + 1
            self.fault = unreadable(lines, lines - self.rows, int(first))
        self.columns = columns  # in one assignment, so that other threads never see columns of different lengths

    def names(self) -> list[str]:
        """The metrics that have at least one number."""
        return [name for name, column in self.columns.items() if not np.isnan(column).all()]


@dataclass(frozen=True)
class Block:
    """Consecutive iterations: their lines' numbers, and the numbers of each metric, NaN if missing.   each [N]"""

    numbers: NDArray[np.int64]
    columns: dict[str, Column]


def _block(lines: bytes, first: int, count: int) -> Block:
    """The rows of ``count`` whole lines, the first of which has the number ``first``.

    All lines are parsed at once, which takes half the time; if one of them is damaged, each line by itself.
    """
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):
        rows = rows_together(lines, count)
        return Block(np.arange(first, first + count), _columns(rows))
    each = [(number, row) for number, line in enumerate(lines.split(b"\n"), first) if (row := row_of(line)) is not None]
    return Block(np.array([number for number, _ in each], np.int64), _columns([row for _, row in each]))


def _columns(rows: list[Row]) -> dict[str, Column]:
    """The numbers of rows, by metric; rows with the same keys are converted together.   each [N]

    Raises TypeError, KeyError, ValueError or OverflowError if a row is none by ``row_of``.
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(rows):
        alike.setdefault(tuple(row), []).append(index)
    columns: dict[str, Column] = {}
    for names, at in alike.items():
        values = dict(zip(names, zip(*(rows[index].values() for index in at), strict=True), strict=True))
        check_counts(values["iteration"], values["steps"])
        places = np.array(at)
        for name, column in values.items():
            columns.setdefault(name, np.full(len(rows), np.nan))[places] = _numbers(column)
    return columns


def _numbers(values: Sequence[float | None]) -> Column:
    """Values as floats, NaN for None. Raises TypeError for anything else."""
    with contextlib.suppress(TypeError):
        return np.frombuffer(array("d", values))  # type: ignore[type-var]
    return np.frombuffer(array("d", [math.nan if value is None else value for value in values]))


def _or_nan(column: Column | None, rows: int) -> Column:
    return np.full(rows, np.nan) if column is None else column


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The rest of a file, in parts of whole lines that fit into the processor's cache, which is twice as fast."""
    left = b""
    while part := file.read(AT_A_TIME):
        lines, end, rest = part.rpartition(b"\n")
        if end:
            yield left + lines + end
            left = rest
        else:
            left += part


@dataclass(frozen=True)
class Curve:
    """A metric at the points of a grid; NaN where it is unknown.   All [P]

    ``low`` and ``high`` are the extremes of the iterations that a point represents, so no spike is lost.
    """

    low: Column
    high: Column
    smooth: Column
    not_positive: int = 0
    """iterations between the first and the last point with a value that is not above 0, which no log scale can show"""


def grid_of(runs: Sequence[Columns], start: float, end: float, points: int) -> Column:
    """The steps of the points: those of the iterations if there are few, else evenly spaced ones.   [P]"""
    steps = [run.columns.get("steps", np.empty(0)) for run in runs]
    inside = [x[(x >= start) & (x <= end)] for x in steps]
    if sum(map(len, inside)) <= 4 * points:
        union = np.unique(np.concatenate([np.empty(0), *inside]))
        if len(union) <= points:
            return union
    first, last = min(x[0] for x in inside if len(x)), max(x[-1] for x in inside if len(x))
    return np.unique(np.round(np.linspace(first, last, points)))


def curve(run: Columns, name: str, grid: Column, window: int) -> Curve:
    """One metric of one run on a grid.

    window   number of iterations in the running mean, up to and including the point's own; 1 for none
    """
    columns = run.columns
    steps, values = columns.get("steps", np.empty(0)), columns.get(name)
    nothing = np.full(len(grid), np.nan)
    if values is None or not len(grid):
        return Curve(nothing, nothing, nothing)
    ends = np.searchsorted(steps, grid, side="right")  # a point represents the iterations since the point before it
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
    return Curve(low, high, smooth, int(np.count_nonzero(values[starts[0] : ends[-1]] <= 0)))


def running_mean(values: Column, window: int) -> Column:
    """The mean of the finite numbers among the last ``window`` at each place.   [N]"""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(0, end - max(1, window))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums[end] - sums[begin]) / (counts[end] - counts[begin]), dtype=np.float64)


def numbers(x: Any) -> list[float | None]:
    """A list for JSON: six digits, and None for values that are not finite."""
    return [float(f"{value:.6g}") if abs(value) < np.inf else None for value in np.asarray(x, dtype=np.float64).tolist()]
