"""Delivers a run's events to the trackers of its recipe, and keeps training independent of them.

A tracker works in a thread of its own, so that a slow one doesn't hold up training. One that raises an error, or doesn't keep
up, is stopped for this process: the run reports it once, as a finding, and goes on. When the run is resumed, the tracker gets
the rows it lacks from metrics.jsonl, and none that it has.
"""

import contextlib
import importlib.util
import json
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.diagnostics.findings import tracker_failed
from surefoot.errors import SurefootError, cause_of, require_package
from surefoot.recipes.base import Recipe
from surefoot.runs.trackers.interface import TRACKERS, TrackedRun, Tracker
from surefoot.store.events import (
    CheckpointSaved,
    EvaluationEnd,
    Event,
    FindingReported,
    InitialSamples,
    IterationEnd,
    RunEnd,
    RunStart,
    Sample,
)
from surefoot.store.finding import Finding
from surefoot.store.manifest import write_listed
from surefoot.store.metrics import FILE, read_metrics
from surefoot.store.public import public_table
from surefoot.store.reading import TRACKERS_FILE, read_samples, read_trackers, samples_in

IN_THIS_THREAD = ("tensorboard", "trackio")
"""these return at once: one writes a file, the other has its own thread, and prints unless its output is redirected here"""
WAITING = 10_000
"""events that may wait for a tracker"""
CLOSING_SECONDS = 60.0
"""how long the end of a run waits for a tracker"""


def check_trackers(recipe: Recipe, run_dir: Path | None) -> None:
    """Raise SurefootError for a tracker that can't begin: its extra or key is missing, or the run has no folder."""
    if recipe.trackers and run_dir is None:
        names = ", ".join(map(repr, recipe.trackers))
        raise SurefootError(f"trackers=[{names}]: a run without a folder can't be resumed or tracked; set run_dir")
    for name in recipe.trackers:
        require_package(name, name, f"trackers=[{name!r}]")
    if "wandb" in recipe.trackers:
        _module("wandb").check()


def tracker_listeners(recipe: Recipe, folder: Path, report: Callable[[Finding], None]) -> list["Delivery"]:
    """A listener for each tracker of a recipe, made after metrics.jsonl was cut back to the checkpoint.

    report   called with a finding when a tracker has failed
    """
    if not recipe.trackers:
        return []
    group = recipe.tracking.group or f"{recipe.trained}-{recipe.algorithm.lower()}"
    table, _ = public_table(recipe.table, places=True)
    state, rows = read_trackers(folder), read_metrics(folder / FILE)
    steps = rows[-1]["steps"] if rows else 0

    def delivery(name: str) -> Delivery:
        saved = state.get(name, {}).get("identity", {})
        run = TrackedRun(recipe, table, folder, steps, recipe.tracking.name or folder.resolve().name, group, saved)
        return Delivery(name, lambda: getattr(_module(name), TRACKERS[name])(run), run, rows, report)

    return [delivery(name) for name in recipe.trackers]


def _module(name: str) -> Any:
    return importlib.import_module(f"surefoot.runs.trackers.{name}")


_writing = threading.Lock()
"""several trackers write one file"""


def _write(folder: Path, name: str, **changes: Any) -> None:
    """Change the entry of a tracker; None removes a field."""
    with _writing:
        table = read_trackers(folder)
        entry = {**table.get(name, {}), **changes}
        table = {**table, name: {field: value for field, value in entry.items() if value is not None}}
        write_listed(folder / TRACKERS_FILE, json.dumps(table, indent=1))


class Delivery:
    """Passes a run's events to one tracker; a listener.

    name    of the tracker
    make    opens the run there
    run     as it is opened
    rows    of metrics.jsonl
    report  called in the thread of training with the finding of a failure
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: TrackedRun,
        rows: Sequence[Mapping[str, Any]],
        report: Callable[[Finding], None],
    ) -> None:
        self.name, self.make, self.run, self.rows, self.report = name, make, run, rows, report
        self.tracker: Tracker | None = None
        self.samples: Sequence[Sample] = ()
        self.error: str | None = None
        self.reported = False
        self.seen: set[Path] = set()
        """videos that are logged, or were there before this process"""
        self.steps = run.steps
        self.waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self.thread: threading.Thread | None = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        if name in IN_THIS_THREAD:
            self.thread = None

    def __call__(self, event: Event) -> None:
        match event:
            case RunStart():
                self._start()
            case InitialSamples():
                self.samples = event.samples
                self._row(event.state.steps, {"steps": event.state.steps})
            case EvaluationEnd():
                self.samples = event.report.samples
            case IterationEnd():
                self._row(event.state.steps, event.metrics)
            case CheckpointSaved():
                self._videos()
            case FindingReported() if event.finding.name != "tracker_failed":
                self._do(lambda tracker: tracker.log_finding(event.steps, event.finding))
            case RunEnd():
                self._videos()
                self._end(event.failed)
        if self.error is not None and not self.reported:
            self.reported = True
            self.report(tracker_failed(self.name, self.error))

    # ---- in the thread of training ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.seen = set(self._recorded())
        if "failed" in read_trackers(self.run.folder).get(self.name, {}):  # in an earlier process
            with contextlib.suppress(OSError):
                _write(self.run.folder, self.name, failed=None)
        if self.thread is not None:
            self.thread.start()
        self._put(self._open)

    def _row(self, steps: int, metrics: Mapping[str, float | None]) -> None:
        row, samples, self.samples, self.steps = dict(metrics), self.samples, (), steps
        self._do(lambda tracker: _log(tracker, steps, row, samples))

    def _recorded(self) -> list[Path]:
        return sorted((self.run.folder / "videos").glob("*.mp4"))

    def _videos(self) -> None:
        for path in self._recorded():
            if path not in self.seen:
                self.seen.add(path)
                self._video(path, self.steps)

    def _video(self, path: Path, steps: int) -> None:
        self._do(lambda tracker: tracker.log_video(max(steps, tracker.last_step), path))

    def _do(self, act: Callable[[Tracker], None]) -> None:
        def acting() -> None:
            assert self.tracker is not None, "it is opened first"
            act(self.tracker)

        self._put(acting)

    def _put(self, act: Callable[[], None]) -> None:
        if self.error is not None:
            return
        if self.thread is None:
            self._try(act)
            return
        try:
            self.waiting.put_nowait(act)
        except queue.Full:
            self._fail(f"it is {WAITING:,} events behind")

    def _end(self, failed: bool) -> None:
        self._do(lambda tracker: tracker.close(failed))
        if self.thread is None or not self.thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self.waiting.put_nowait(None)
        self.thread.join(CLOSING_SECONDS)
        if self.thread.is_alive() and self.error is None:
            self._fail(f"it did not finish within {CLOSING_SECONDS:.0f} s of the end")

    # ---- in the tracker's thread, if it has one --------------------------------------------------------------------------

    def _work(self) -> None:
        while self.error is None and (act := self.waiting.get()) is not None:
            self._try(act)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._fail(str(error) if isinstance(error, SurefootError) else cause_of(error))

    def _fail(self, cause: str) -> None:
        with contextlib.suppress(OSError):  # a full disk, which the metrics file reports
            _write(self.run.folder, self.name, failed=cause)
        self.error = cause

    def _open(self) -> None:
        """Open the run, and log the rows of metrics.jsonl, with their samples, that the tracker lacks."""
        self.tracker = self.make()
        _write(self.run.folder, self.name, identity=self.tracker.identity)
        written = {int(path.stem): path for path in samples_in(self.run.folder / "samples")}
        rows = [{"steps": 0}, *self.rows] if 0 in written else self.rows
        for row in [row for row in rows if row["steps"] > self.tracker.last_step]:
            steps = row["steps"]
            samples = read_samples(written[steps]) if steps in written else []
            _log(self.tracker, steps, row, samples)


def _log(tracker: Tracker, steps: int, row: Mapping[str, Any], samples: Sequence[Sample]) -> None:
    """Log a row unless the tracker has it; undefined values are left out."""
    if steps > tracker.last_step:
        tracker.log(steps, {name: float(x) for name, x in row.items() if _is_number(x)}, samples)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
