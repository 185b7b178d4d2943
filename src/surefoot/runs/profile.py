"""Where the seconds of a run's iterations went: a table, a summary for the inspector, and traces for Chrome's viewer.

The seconds are those of ``core.rollout.Timer``. The second iteration is traced operation by operation, which makes it slower,
and the first one loads and compiles programs; neither counts in the means.
"""

import contextlib
import json
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from surefoot.core.timer import Timer
from surefoot.store.manifest import write_listed
from surefoot.store.reading import PROFILE, SUMMARY

TRACED = 2
"""the iteration that is traced"""
TRACED_SECONDS = 2.0
"""of each of its two parts, collecting and learning; a trace of more would be slow to open"""
OTHER = "other"

SectionPath = tuple[str, ...]


@dataclass
class Sections:
    """The seconds and calls of sections over some iterations."""

    iterations: int = 0
    elapsed: float = 0.0
    seconds: dict[SectionPath, float] = field(default_factory=dict)
    calls: dict[SectionPath, int] = field(default_factory=dict)

    def add(self, elapsed: float, timer: Timer, before: "Sections") -> None:
        """Add an iteration: what a timer has measured beyond ``before``."""
        self.iterations += 1
        self.elapsed += elapsed
        for path, value in timer.seconds.items():
            self.seconds[path] = self.seconds.get(path, 0.0) + value - before.seconds.get(path, 0.0)
            self.calls[path] = self.calls.get(path, 0) + timer.calls[path] - before.calls.get(path, 0)


class Profile:
    """Measures the iterations of a run.

    timer    of the run, which becomes detailed
    folder   of the run; None writes no files
    device   of the recipe
    """

    def __init__(self, timer: Timer, folder: Path | None, device: str) -> None:
        self.timer, self.folder, self.device = timer, folder, device
        self.first, self.others, self.traced = Sections(), Sections(), Sections()
        self.traces: list[str] = []
        self.began = time.perf_counter()
        self._before = Sections()

    def begin(self) -> None:
        """Measure from here on."""
        self.timer.detailed = True
        if self.device.startswith("cuda"):
            self.timer.synchronise = torch.cuda.synchronize
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        self._before = Sections(seconds=dict(self.timer.seconds), calls=dict(self.timer.calls))
        self.began = time.perf_counter()

    def end_iteration(self) -> None:
        """End an iteration. The next one begins now."""
        elapsed = time.perf_counter() - self.began
        done = self.first.iterations + self.traced.iterations + self.others.iterations
        into = self.first if done == 0 else self.traced if done == TRACED - 1 else self.others
        into.add(elapsed, self.timer, self._before)
        if self.folder is not None and done + 2 == TRACED:
            self.timer.observer = OperationTraces(self.folder / PROFILE, self.device)
        else:
            self._end_traces()
        self._begin_iteration()

    def finish(self) -> list[str]:
        """Stop measuring, write the summary, and return the lines of the table."""
        self.close()
        if not self.first.iterations:
            return []
        summary = self.summary()
        lines = table(summary)
        if self.folder is not None:
            (self.folder / PROFILE).mkdir(exist_ok=True)
            write_listed(self.folder / PROFILE / SUMMARY, json.dumps(summary))
            shown = ", ".join(str(self.folder / PROFILE / name) for name in self.traces)
            lines.append(
                f"operations of iteration {TRACED}, for chrome://tracing or ui.perfetto.dev: {shown}"
                if shown
                else "no trace of operations: the run has one iteration, and the second is traced"
            )
        return lines

    def close(self) -> None:
        """Stop measuring."""
        self.timer.detailed, self.timer.synchronise = False, None
        self._end_traces()

    def _end_traces(self) -> None:
        if isinstance(self.timer.observer, OperationTraces):
            self.timer.observer.stop()
            self.traces, self.timer.observer = self.timer.observer.written, None

    def summary(self) -> dict[str, Any]:
        """The means per iteration, section by section, each before its parts; the rest of a section is its part "other"."""
        counted = self.others if self.others.iterations else self.first
        iterations = self.first.iterations + self.traced.iterations + self.others.iterations
        return {
            "iterations": iterations,
            "counted": counted.iterations,
            "seconds": counted.elapsed / counted.iterations,
            "first": self.first.elapsed,
            "sections": _rows(counted, self.first, ()),
            "traces": self.traces,
        }


def _rows(counted: Sections, first: Sections, path: SectionPath) -> list[dict[str, Any]]:
    """The parts of a section, the longest first, each with its own parts after it."""
    known = {inner for sections in (counted, first) for inner in sections.seconds if inner[:-1] == path}
    rows: list[dict[str, Any]] = []
    for inner in sorted(known, key=lambda inner: (-counted.seconds.get(inner, 0.0), inner)):
        seconds, calls = counted.seconds.get(inner, 0.0), counted.calls.get(inner, 0)
        mean = {"seconds": seconds / counted.iterations, "calls": calls / counted.iterations}
        rows.append({"path": list(inner), **mean, "first": first.seconds.get(inner, 0.0)})
        rows += _rows(counted, first, inner)
    if known:
        rest = {name: _rest(sections, path, known) for name, sections in (("seconds", counted), ("first", first))}
        rest["seconds"] /= counted.iterations
        rows.append({"path": [*path, OTHER], "calls": None, **rest})
    return rows


def _rest(sections: Sections, path: SectionPath, parts: set[SectionPath]) -> float:
    """The seconds of a section outside its parts, some of which may not have run."""
    whole = sections.seconds.get(path, 0.0) if path else sections.elapsed
    return max(0.0, whole - sum(sections.seconds.get(part, 0.0) for part in parts))


def table(summary: Mapping[str, Any]) -> list[str]:
    """A summary as lines of text."""
    total, several = summary["seconds"], summary["counted"] < summary["iterations"]
    without = f"mean of {summary['counted']:,}, without the first and the traced one" if several else "the first, with start-up"
    lines = [
        f"profile of {summary['iterations']:,} iterations ({without})",
        f"  {'section':<34}{'seconds':>10}{'share':>8}{'calls':>11}{'first':>10}",
    ]
    rows = [*summary["sections"], {"path": ["all"], "seconds": total, "calls": None, "first": summary["first"]}]
    for row in rows:
        name = "  " * (len(row["path"]) - 1) + row["path"][-1]
        calls = "" if row["calls"] is None else f"{row['calls']:,.4g}" if row["calls"] < 10 else f"{row['calls']:,.0f}"
        share = row["seconds"] / total if total else 0.0
        lines.append(f"  {name:<34}{row['seconds']:>10.4f}{share:>8.1%}{calls:>11}{row['first']:>10.4f}")
    return lines


class OperationTraces:
    """Traces PyTorch's operations in ``TRACED_SECONDS`` of each outermost section that has parts: one file each.

    folder   of the files
    device   of the recipe
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.written: list[str] = []
        self.profiler: profile | None = None
        self._until = 0.0
        self._name = ""
        self._open: list[contextlib.AbstractContextManager[Any]] = []
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]

    def enter(self, path: SectionPath) -> None:
        """Begin a trace with a section, or mark a section in it."""
        if len(path) == 1 and path[0] in ("collecting", "learning"):
            self._start(path[0])
        if self.profiler is not None:
            self._open.append(record_function(path[-1]))
            self._open[-1].__enter__()

    def leave(self, path: SectionPath) -> None:
        """End the mark; end the trace with its section, or when it is long enough."""
        if self.profiler is None:
            return
        self._open.pop().__exit__(None, None, None)
        if not self._open or time.perf_counter() > self._until:
            self.stop()

    def _start(self, name: str) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its messages are for PyTorch's developers
        self._name, self.profiler = name, profile(activities=self._activities)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.profiler.start()
        self._until = time.perf_counter() + TRACED_SECONDS

    def stop(self) -> None:
        """End a trace and write it."""
        if self.profiler is None:
            return
        while self._open:
            self._open.pop().__exit__(None, None, None)
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        self.folder.mkdir(exist_ok=True)
        name = f"{self._name}.json.gz"
        profiler.export_chrome_trace(str(self.folder / name))
        self.written.append(name)
