"""What the inspector tells of traces: their rows, every number of one, what stands out, and films of them.

This reads traces with torch, which takes longer to import than the first curves take to draw; so it is imported after them.
"""

import shlex
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.core.traces import BRANCHES, Trace, TracedRow
from surefoot.inspector.curves import numbers
from surefoot.inspector.samples import has_ratios, passes, rule_of, to_json
from surefoot.inspector.store import LONGEST_TEXT, NotThere, Store, shortened
from surefoot.runs.folder import film_of, refusal_of, traces_in
from surefoot.runs.traces import read_trace

SHOWN_SAMPLES, SHOWN_STEPS = 20_000, 4_096
KEPT_TRACES = 6
PER_STEP = ("rewards", "values", "next_values", "td_residuals", "advantages", "returns", "old_log_probs", "ref_log_probs")
PER_VISIT = ("updates", "log_probs", "ratio", "advantages", "mean", "variance", "surrogate", "branch", "values")
NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
FINDS = ("clipped", "ratio", "best", "worst", "truncated")


class Traces:
    """The traces of a store's runs."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lock = threading.Lock()
        self.kept: OrderedDict[tuple[Path, int], Trace] = OrderedDict()

    def trace(self, run: int, steps: int) -> Trace:
        """A trace; the last few are kept."""
        path = self.store.path(run) / "traces" / f"{steps}.safetensors"
        if steps not in [int(file.stem) for file in traces_in(path.parent)]:
            raise NotThere(f"steps={steps}: {self.store.names[run]} has no trace there")
        key = (path, path.stat().st_mtime_ns)
        with self.lock:
            if key not in self.kept:
                self.kept[key] = read_trace(path)
                while len(self.kept) > KEPT_TRACES:
                    self.kept.popitem(last=False)
            self.kept.move_to_end(key)
            return self.kept[key]

    def rows(self, run: int, steps: int) -> dict[str, Any]:
        """What an iteration is: its numbers, and a line for each of its rows."""
        trace = self.trace(run, steps)
        longest = max((len(row.visits.updates) for row in trace.rows), default=0)
        numbers_of = ("iteration", "steps", "gamma", "gae_lambda", "baseline", "clip", "clip_high", "dual_clip", "ratio")
        return {
            **{name: getattr(trace, name) for name in numbers_of},
            "rule": rule_of(trace),
            "passes": longest if has_ratios(trace) else 0,
            "visits": longest,
            "rows": [self._line(row) for row in trace.rows],
        }

    def _line(self, row: TracedRow) -> dict[str, Any]:
        seen = row.visits.updates >= 0
        return {
            "row": row.row,
            "start": row.start,
            "length": len(row.rewards),
            "reward": finite(row.rewards.sum().reshape(1))[0],
            "ratio_max": finite(row.visits.ratio[seen].max().reshape(1))[0] if seen.any() else None,
            "stopped": int((seen & ~row.visits.gradient_flows).sum()),
            "visits": int(seen.sum()),
            "truncated": bool(row.truncated.any()),
            "prompt": shortened(row.about.get("prompt"), 200),
        }

    def row(self, run: int, steps: int, index: int, start: int = 0) -> dict[str, Any]:
        """A row with every number of up to 4,096 of its steps, from ``start`` on."""
        trace = self.trace(run, steps)
        if not 0 <= index < len(trace.rows):
            raise NotThere(f"row={index}: the trace has {len(trace.rows)}")
        row = trace.rows[index]
        count = len(row.rewards)
        first = max(0, min(start, count - 1))
        part = slice(first, first + SHOWN_STEPS)
        tokens = row.about.get("tokens")
        told: dict[str, Any] = {name: exact(getattr(row, name), part) for name in PER_STEP}
        told |= {name: getattr(row, name)[part].tolist() for name in ("mask", "terminated", "truncated")}
        told["reward_parts"] = {name: exact(x, part) for name, x in row.reward_parts.items()}
        told["actions"] = row.actions[part].tolist() if row.actions.ndim == 1 else [numbers(x) for x in row.actions[part]]
        told["visits"] = {name: exact_rows(getattr(row.visits, name), part) for name in PER_VISIT}
        told["branches"] = BRANCHES
        after = first + SHOWN_STEPS
        told |= {
            "row": row.row,
            "start": row.start,
            "first": first,
            "length": count,
            "beyond": finite(row.advantages[after : after + 1])[0] if after < count else None,
            "tokens": None if tokens is None else [str(token) for token in tokens[part]],
            "prompt": shortened(row.about.get("prompt"), LONGEST_TEXT),
            "reference_beta": row.about.get("reference_beta"),
            "episode": row.about.get("episode"),
            "episode_step": row.about.get("step"),
            "filmed": self._film(run, steps, trace, index) is not None,
            "to_film": self._to_film(run, steps, trace, index),
            "not_filmed": self._refusal(run, steps, trace, index),
        }
        return told

    def film(self, run: int, steps: int, index: int) -> Path:
        """The film of a row.

        Raises NotThere when there is none.
        """
        trace = self.trace(run, steps)
        found = self._film(run, steps, trace, index) if index < len(trace.rows) else None
        if found is None:
            raise NotThere(f"row={index}: is not filmed")
        return found

    def _film(self, run: int, steps: int, trace: Trace, index: int) -> Path | None:
        path = film_of(self.store.path(run), steps, index, trace.rows[index])
        return path if path is not None and path.is_file() and not path.is_symlink() else None

    def _to_film(self, run: int, steps: int, trace: Trace, index: int) -> str | None:
        """The command that makes it; None where it can't be made."""
        path = self.store.path(run)
        if film_of(path, steps, index, trace.rows[index]) is None:
            return None
        return f"surefoot watch {shlex.quote(str(path))} --traced {steps}"

    def _refusal(self, run: int, steps: int, trace: Trace, index: int) -> str | None:
        """Why there is no film, as far as it was tried to make one."""
        path = film_of(self.store.path(run), steps, index, trace.rows[index])
        if path is None or (note := refusal_of(path)).is_symlink():
            return None
        try:
            with note.open(encoding="utf-8", errors="replace") as file:
                return file.read(400).strip()
        except OSError:  # as a rule there is none
            return None

    def clip_samples(self, run: int, steps: int, number: int) -> dict[str, Any]:
        """The samples of a pass, or of all of them where the number is −1, thinned to what a screen shows."""
        found = passes(self.trace(run, steps))
        if not -1 <= number < len(found):
            raise NotThere(f"pass={number}: the trace has {len(found)}")
        chosen = found if number < 0 else [found[number]]
        return {"parts": [to_json(part, max(1, SHOWN_SAMPLES // len(chosen))) for part in chosen]}

    def find(self, run: int, what: str, limit: int = 40) -> list[dict[str, Any]]:
        """The steps of all traces of a run that stand out most.

        Raises NotThere when nobody can look for that.
        """
        if what not in FINDS:
            raise NotThere(f"find={what!r}: is not one of {', '.join(FINDS)}")
        found: list[tuple[float, dict[str, Any]]] = []
        for file in traces_in(self.store.path(run) / "traces"):
            steps = int(file.stem)  # its name, which is what leads to it, and not what a file of someone else's says inside
            try:
                trace = self.trace(run, steps)
            except (NotThere, FileNotFoundError):  # made room for another since
                continue
            for index, row in enumerate(trace.rows):
                for rank, visit, t in _outstanding(row, what, limit):
                    found.append((rank, {"steps": steps, "index": index, "visit": visit, "t": t, **_told(row, visit, t)}))
        found.sort(key=lambda pair: (-pair[0], -pair[1]["steps"]))
        return [told for _, told in found[:limit]]


Told = float | str | None
"""a number in JSON, which has no words for what is not finite: "NaN", "Infinity" and "-Infinity" are those of JavaScript"""


def exact(x: Tensor | None, part: slice) -> list[Told] | None:
    """As float32 has it.   [T]"""
    return None if x is None else finite(x[part])


def exact_rows(x: Tensor | None, part: slice) -> list[list[Told]] | None:
    """The same of each pass.   [K, T]"""
    return None if x is None else [finite(line[part]) for line in x]


def finite(x: Tensor) -> list[Told]:
    """Nine digits say all that a float32 holds, and make a shorter text than all of a float64's."""
    values = x.double().tolist()
    return [float(f"{v:.9g}") if abs(v) < float("inf") else NOT_FINITE[str(v)] for v in values]


def _outstanding(row: TracedRow, what: str, limit: int) -> list[tuple[float, int, int]]:
    """(rank, visit, t) of the steps of a row that stand out."""
    seen = row.visits.updates >= 0
    if not seen.any():
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
    if what == "clipped":  # those first whose ratio went furthest
        score = torch.where(seen & ~row.visits.gradient_flows, score.log().abs(), -torch.inf)
    else:
        score = torch.where(seen, score, -torch.inf)
    best, visit = score.max(0)
    top = best.topk(min(limit, len(best)))
    chosen = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    return [(rank, int(visit[t]), t) for rank, t in chosen if rank > -float("inf")]


def _nan_first(score: Tensor) -> Tensor:
    """What is no number stands out most."""
    return torch.where(score.isnan(), torch.inf, score)


def _told(row: TracedRow, visit: int, t: int) -> dict[str, Any]:
    tokens = row.about.get("tokens")
    return {
        "row": row.row,
        "step": row.start + t,
        "ratio": finite(row.visits.ratio[visit, t : t + 1])[0],
        "advantage": finite(row.advantages[t : t + 1])[0],
        "reward": finite(row.rewards[t : t + 1])[0],
        "branch": BRANCHES[int(row.visits.branch[visit, t])],
        "text": None if tokens is None else str(tokens[t]),
    }
