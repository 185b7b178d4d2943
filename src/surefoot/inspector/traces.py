"""Read traces for the inspector and the clip table: rows with all their numbers, outlying steps, videos, samples.

This module imports torch, which takes longer than drawing the first curves, so the server imports it after those.
"""

import base64
import contextlib
import shlex
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.core.traces import BRANCHES, Trace, TracedRow, Visits
from surefoot.errors import SurefootError
from surefoot.files import open_file
from surefoot.inspector.curves import numbers
from surefoot.inspector.folders import LONGEST_TEXT, RunFolders, shortened
from surefoot.store.reading import replay_failure, trace_video, traces_in
from surefoot.store.traces import clipped_samples, read_trace

SHOWN_SAMPLES, SHOWN_STEPS = 20_000, 4_096
KEPT_TRACES = 6
MOST_COUNTED, COUNTING_SECONDS = 40, 0.5
"""traces, and seconds, in which the one with the most clipped samples is looked for"""
ON_A_PAGE = 200_000
"""maximum number of samples in a self-contained page, about 2 MB; more are thinned evenly over all passes"""
PER_STEP = (
    "rewards",
    "values",
    "next_values",
    "td_residuals",
    "advantages",
    "returns",
    "old_log_probs",
    "ref_log_probs",
    "behaviour_log_probs",
)
PER_VISIT = tuple(field.name for field in fields(Visits))
NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
CRITERIA = ("clipped", "ratio", "best", "worst", "truncated")


class Traces:
    """The traces of the inspected runs."""

    def __init__(self, folders: RunFolders) -> None:
        self.folders = folders
        self.lock = threading.Lock()
        self.kept: OrderedDict[tuple[Path, int], Trace] = OrderedDict()
        self.counts: dict[tuple[Path, int], list[tuple[int, int]]] = {}
        """clipped samples and samples of each row of a file"""

    def trace(self, run: int, steps: int) -> Trace:
        """The trace of one iteration; the last few stay in memory. Raises SurefootError if there is none."""
        path = self.folders.path(run) / "traces" / f"{steps}.safetensors"
        if steps not in [int(file.stem) for file in traces_in(path.parent)]:
            raise SurefootError(f"steps={steps}: {self.folders.names[run]} has no trace of this step")
        return self._read(path)

    def _read(self, path: Path) -> Trace:
        key = (path, path.stat().st_mtime_ns)
        with self.lock:
            if key not in self.kept:
                self.kept[key] = read_trace(path)
                while len(self.kept) > KEPT_TRACES:
                    self.kept.popitem(last=False)
            self.kept.move_to_end(key)
            return self.kept[key]

    def most_clipped(self, run: int) -> dict[str, Any]:
        """The step of a run's traces to look at first: of the trace with the most clipped samples, the row with the most, there
        the step whose clipped ratio is furthest from 1.

        Traces are counted in the order of their iterations' ``clip_active``, until ``MOST_COUNTED`` of them or
        ``COUNTING_SECONDS`` seconds. ``steps`` is None if no counted trace has a clipped sample.
        """
        files = traces_in(self.folders.path(run) / "traces")
        share = self._clip_active(run)
        files.sort(key=lambda file: (-share.get(int(file.stem), 1.0), -int(file.stem)))
        best: tuple[int, int, int] = (0, 0, 0)
        counted, until = 0, time.monotonic() + COUNTING_SECONDS
        for file in files[:MOST_COUNTED]:
            if counted and time.monotonic() > until:
                break
            try:
                rows = self._clipped(file)
            except (SurefootError, FileNotFoundError):  # damaged, or deleted in the meantime
                continue
            counted += 1
            best = max(best, (sum(row[0] for row in rows), int(file.stem), sum(row[1] for row in rows)))
        clipped, steps, samples = best
        counts = {"clipped": clipped, "samples": samples, "counted": counted, "traces": len(files), "steps": None}
        if not clipped:
            return counts
        trace = self.trace(run, steps)
        stopped = [self._line(row)["stopped"] for row in trace.rows]
        index = stopped.index(max(stopped))
        ((_, visit, t), *_) = _highest(trace.rows[index], "clipped", 1)
        return {**counts, "steps": steps, "iteration": trace.iteration, "index": index, "t": t, "visit": visit}

    def _clip_active(self, run: int) -> dict[int, float]:
        """Steps -> share of the samples of that iteration that were clipped, where metrics.jsonl has it."""
        columns = self.folders.columns[run].columns
        share = columns.get("clip_active")
        if share is None:
            return {}
        return {int(at): x for at, x in zip(columns["steps"].tolist(), share.tolist(), strict=True) if x == x}

    def _clipped(self, file: Path) -> list[tuple[int, int]]:
        key = (file, file.stat().st_mtime_ns)
        if key not in self.counts:
            self.counts[key] = clipped_samples(file)
        return self.counts[key]

    def rows(self, run: int, steps: int) -> dict[str, Any]:
        """The settings of an iteration, and a summary of each of its rows."""
        trace = self.trace(run, steps)
        longest = max((len(row.visits.updates) for row in trace.rows), default=0)
        return {
            **{field.name: getattr(trace, field.name) for field in fields(trace) if field.name != "rows"},
            "rule": rule_of(trace),
            "passes": longest if has_ratios(trace) else 0,
            "visits": longest,
            "rows": [self._line(row) for row in trace.rows],
        }

    def _line(self, row: TracedRow) -> dict[str, Any]:
        visited = row.visits.updates >= 0
        return {
            "row": row.row,
            "episode": row.about.get("episode"),
            "first_t": first_t(row),
            "length": len(row.rewards),
            "reward": finite(row.rewards.sum().reshape(1))[0],
            "ratio_max": finite(row.visits.ratio[visited].max().reshape(1))[0] if visited.any() else None,
            "stopped": int((visited & ~row.visits.gradient_flows).sum()),
            "visits": int(visited.sum()),
            "truncated": bool(row.truncated.any()),
            "prompt": shortened(row.about.get("prompt"), 200),
        }

    def row(self, run: int, steps: int, index: int, start: int = 0) -> dict[str, Any]:
        """A row with all numbers of up to 4,096 steps from ``start`` on. Raises SurefootError for an unknown row."""
        trace = self.trace(run, steps)
        if not 0 <= index < len(trace.rows):
            raise SurefootError(f"row={index}: unknown; the trace has {len(trace.rows)}")
        row = trace.rows[index]
        count = len(row.rewards)
        first = max(0, min(start, count - 1))
        part = slice(first, first + SHOWN_STEPS)
        tokens = row.about.get("tokens")
        table: dict[str, Any] = {name: exact(getattr(row, name), part) for name in PER_STEP}
        table |= {name: getattr(row, name)[part].tolist() for name in ("mask", "terminated", "truncated")}
        table["reward_parts"] = {name: exact(x, part) for name, x in row.reward_parts.items()}
        table["actions"] = row.actions[part].tolist() if row.actions.ndim == 1 else [numbers(x) for x in row.actions[part]]
        table["visits"] = {
            name: x if x is None else [finite(line[part]) for line in x]  # with all digits of float32   [K, T]
            for name, x in ((name, getattr(row.visits, name)) for name in PER_VISIT)
        }
        table["branches"] = BRANCHES
        after = first + SHOWN_STEPS
        table |= {
            "row": row.row,
            "first_t": first_t(row),
            "first": first,
            "length": count,
            "beyond": finite(row.advantages[after : after + 1])[0] if after < count else None,
            "tokens": None if tokens is None else [str(token) for token in tokens[part]],
            "prompt": shortened(row.about.get("prompt"), LONGEST_TEXT),
            "reference_beta": row.about.get("reference_beta"),
            "episode": row.about.get("episode"),
            **self._about_video(run, steps, index),
        }
        return table

    def _about_video(self, run: int, steps: int, index: int) -> dict[str, Any]:
        """Whether the row of a trace has a video, the command that records it, and why the last attempt to do so failed."""
        path = self.folders.path(run)
        video, failure = trace_video(path, steps, index, self.trace(run, steps).rows[index]), None
        if video is None:
            return {"has_video": False, "video_command": None, "video_failure": None}
        with contextlib.suppress(OSError, SurefootError):  # usually the file does not exist
            if not (note := replay_failure(video)).is_symlink():
                with open_file(note) as file:
                    failure = file.read(400).decode("utf-8", errors="replace").strip()
        command = f"surefoot watch {shlex.quote(str(path))} --traced {steps}"
        return {"has_video": _is_video(video), "video_command": command, "video_failure": failure}

    def video(self, run: int, steps: int, index: int) -> Path:
        """The video of a row. Raises SurefootError if there is none."""
        trace = self.trace(run, steps)
        path = trace_video(self.folders.path(run), steps, index, trace.rows[index]) if index < len(trace.rows) else None
        if path is None or not _is_video(path):
            raise SurefootError(f"row={index}: has no video; make it with: surefoot watch RUN --traced {steps}")
        return path

    def clip_samples(self, run: int, steps: int, number: int) -> dict[str, Any]:
        """The samples of one pass, or of all passes if ``number`` is 0, thinned to what a screen can show."""
        parts = passes(self.trace(run, steps))
        if number > len(parts):
            raise SurefootError(f"pass={number}: unknown; the trace has {len(parts)}")
        chosen = [parts[number - 1]] if number else parts
        return {"parts": [to_json(part, max(1, SHOWN_SAMPLES // len(chosen))) for part in chosen]}

    def find(self, run: int, what: str, limit: int = 40) -> list[dict[str, Any]]:
        """The steps of a run's traces that rank highest by a criterion. Raises SurefootError for an unknown criterion."""
        if what not in CRITERIA:
            raise SurefootError(f"find={what!r}: unknown; choose one of {', '.join(CRITERIA)}")
        ranked: list[tuple[float, dict[str, Any]]] = []
        for file in traces_in(self.folders.path(run) / "traces"):
            steps = int(file.stem)  # by its name, which the page links to; the content may differ in a foreign file
            try:
                trace = self._read(file)
            except FileNotFoundError:  # deleted in the meantime
                continue
            for index, row in enumerate(trace.rows):
                for rank, visit, t in _highest(row, what, limit):
                    ranked.append((rank, {"steps": steps, "index": index, "visit": visit, "t": t, **_step(row, visit, t)}))
        ranked.sort(key=lambda pair: (-pair[0], -pair[1]["steps"]))
        return [step for _, step in ranked[:limit]]


def _is_video(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def first_t(row: TracedRow) -> int:
    """The time step of a row's first step in its episode, from 0, or in the rollout if no episodes are counted; 0 for text."""
    known = row.about.get("step")
    return known if isinstance(known, int) else 0 if row.about.get("tokens") is not None else row.start


JsonNumber = float | str | None
"""a number in JSON; values that are not finite are the strings "NaN", "Infinity" and "-Infinity", as in JavaScript"""


def exact(x: Tensor | None, part: slice) -> list[JsonNumber] | None:
    """The numbers of a part of a row, with all digits of float32.   [T]"""
    return None if x is None else finite(x[part])


def finite(x: Tensor) -> list[JsonNumber]:
    """Numbers for JSON with nine digits, which represent a float32 exactly."""
    values = x.double().tolist()
    return [float(f"{v:.9g}") if abs(v) < float("inf") else NOT_FINITE[str(v)] for v in values]


def _highest(row: TracedRow, what: str, limit: int) -> list[tuple[float, int, int]]:
    """(rank, visit, t) of the steps of a row that rank highest by a criterion."""
    visited = row.visits.updates >= 0
    if not visited.any():
        return []
    if what == "truncated":
        at = (row.truncated & row.mask).nonzero().flatten().tolist()
        return [(1.0, 0, t) for t in at]
    if what in ("best", "worst"):
        score = _nan_first(row.advantages.double() * (1 if what == "best" else -1))
        score = torch.where(row.mask.bool(), score, -torch.inf)
        top = score.topk(min(limit, len(score)))
        return [(rank, 0, t) for rank, t in zip(top.values.tolist(), top.indices.tolist(), strict=True) if rank > -float("inf")]
    score = _nan_first(row.visits.ratio.double())
    if what == "clipped":  # ranked by the distance of the ratio from 1
        score = torch.where(visited & ~row.visits.gradient_flows, score.log().abs(), -torch.inf)
    else:
        score = torch.where(visited, score, -torch.inf)
    best, visit = score.max(0)
    top = best.topk(min(limit, len(best)))
    chosen = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    return [(rank, int(visit[t]), t) for rank, t in chosen if rank > -float("inf")]


def _nan_first(score: Tensor) -> Tensor:
    """NaN ranks highest."""
    return torch.where(score.isnan(), torch.inf, score)


def _step(row: TracedRow, visit: int, t: int) -> dict[str, Any]:
    tokens = row.about.get("tokens")
    return {
        "row": row.row,
        "at": first_t(row) + t,
        "episode": row.about.get("episode"),
        "ratio": finite(row.visits.ratio[visit, t : t + 1])[0],
        "advantage": finite(row.advantages[t : t + 1])[0],
        "reward": finite(row.rewards[t : t + 1])[0],
        "branch": BRANCHES[int(row.visits.branch[visit, t])],
        "text": None if tokens is None else str(tokens[t]),
    }


# ---- samples of the clip table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassSamples:
    """Ratios and advantages that the loss used in one pass, over all traced rows.   [N]"""

    ratios: Tensor
    advantages: Tensor

    def thinned(self, most: int) -> "PassSamples":
        """At most ``most`` samples, evenly spaced."""
        count = min(most, len(self.ratios))
        at = torch.arange(count) * len(self.ratios) // max(1, count)
        return PassSamples(self.ratios[at], self.advantages[at])


def passes(trace: Trace) -> list[PassSamples]:
    """The samples of a trace, pass by pass; empty if the loss has no ratio.

    Masked steps, and steps not visited because the passes ended early, are left out.
    """
    longest = max((len(row.visits.updates) for row in trace.rows), default=0)
    samples = []
    for k in range(longest):
        parts = [(row.visits, row.visits.updates[k] >= 0) for row in trace.rows if k < len(row.visits.updates)]
        ratios = torch.cat([visits.ratio[k][kept] for visits, kept in parts])
        if len(ratios):
            samples.append(PassSamples(ratios, torch.cat([visits.advantages[k][kept] for visits, kept in parts])))
    return samples


def rule_of(trace: Trace) -> dict[str, float | None] | None:
    """ε below and above, and the bound of the dual clip; None without a clip."""
    if trace.clip is None:
        return None
    return {"low": trace.clip, "high": trace.clip_high, "dual": trace.dual_clip}


def has_ratios(trace: Trace) -> bool:
    """Whether the loss uses ratios. A supervised loss, and one that uses each batch once, does not."""
    return all(row.old_log_probs is not None for row in trace.rows)


def on_a_page(runs: list[Path]) -> list[dict[str, Any]]:
    """The samples of some runs for a self-contained page, thinned to ``ON_A_PAGE``; runs without samples are left out."""
    read = [(run, [trace for trace in map(read_trace, traces_in(run / "traces")) if has_ratios(trace)]) for run in runs]
    count = sum(len(part.ratios) for _, traces in read for trace in traces for part in passes(trace))
    share = min(1.0, ON_A_PAGE / max(1, count))
    tables = []
    for run, traces in read:
        iterations = [
            {
                "steps": trace.steps,
                "iteration": trace.iteration,
                "rule": rule_of(trace),
                "samples": [to_json(part, max(1, int(len(part.ratios) * share))) for part in passes(trace)],
            }
            for trace in traces
        ]
        if iterations := [iteration for iteration in iterations if iteration["samples"]]:
            tables.append({"name": run.absolute().name, "traces": iterations})
    return tables


def to_json(part: PassSamples, most: int) -> dict[str, Any]:
    """At most ``most`` samples of a pass as base64 of little-endian float32, and the total number."""
    few = part.thinned(most)
    return {"ratios": _base64(few.ratios), "advantages": _base64(few.advantages), "total": len(part.ratios)}


def _base64(x: Tensor) -> str:
    return base64.b64encode(x.to(torch.float32).contiguous().numpy().astype("<f4").tobytes()).decode()
