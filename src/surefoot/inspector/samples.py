"""The (ratio, advantage) samples of a run's traces: what the loss read, iteration by iteration and pass by pass."""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.core.traces import Trace
from surefoot.runs.folder import traces_in
from surefoot.runs.traces import read_trace

ON_A_PAGE = 200_000
"""samples that a self-contained page may hold, about 2 MB; of more, as many of each pass as make that"""


@dataclass(frozen=True)
class Pass:
    """What the loss read in one pass over the traced rows, of all of them in turn.   [N]"""

    ratios: Tensor
    advantages: Tensor

    def thinned(self, most: int) -> "Pass":
        """At most so many of them, evenly chosen."""
        count = len(self.ratios)
        if count <= most:
            return self
        at = torch.arange(most) * count // most
        return Pass(self.ratios[at], self.advantages[at])


def passes(trace: Trace) -> list[Pass]:
    """The samples of a trace, pass by pass; empty where the loss has no ratio.

    What was masked, or never visited because the passes ended early, is left out.
    """
    longest = max((len(row.visits.updates) for row in trace.rows), default=0)
    found = []
    for k in range(longest):
        parts = [(row.visits, row.visits.updates[k] >= 0) for row in trace.rows if k < len(row.visits.updates)]
        ratios = torch.cat([visits.ratio[k][kept] for visits, kept in parts])
        if len(ratios):
            found.append(Pass(ratios, torch.cat([visits.advantages[k][kept] for visits, kept in parts])))
    return found


def rule_of(trace: Trace) -> dict[str, float | None] | None:
    """ε below and above and the dual clip's bound, as a page reads them; None where nothing clips."""
    if trace.clip is None:
        return None
    return {"low": trace.clip, "high": trace.clip_high, "dual": trace.dual_clip}


def has_ratios(trace: Trace) -> bool:
    """Whether the loss read ratios: a supervised one, and one that uses a batch once, has none."""
    return all(row.old_log_probs is not None for row in trace.rows)


def on_a_page(runs: list[Path]) -> list[dict[str, Any]]:
    """The samples of some runs for a self-contained page, thinned to what one may hold; runs without any are left out."""
    read = [(run, [trace for trace in map(read_trace, traces_in(run / "traces")) if has_ratios(trace)]) for run in runs]
    count = sum(len(part.ratios) for _, traces in read for trace in traces for part in passes(trace))
    share = min(1.0, ON_A_PAGE / max(1, count))
    found = []
    for run, traces in read:
        told = [
            {
                "steps": trace.steps,
                "iteration": trace.iteration,
                "rule": rule_of(trace),
                "samples": [to_json(part, max(1, int(len(part.ratios) * share))) for part in passes(trace)],
            }
            for trace in traces
        ]
        if told := [trace for trace in told if trace["samples"]]:
            found.append({"name": run.absolute().name, "traces": told})
    return found


def to_json(part: Pass, most: int) -> dict[str, Any]:
    """At most so many samples of a pass as base64 of little-endian float32, and how many there were."""
    few = part.thinned(most)
    return {"ratios": _text(few.ratios), "advantages": _text(few.advantages), "total": len(part.ratios)}


def _text(x: Tensor) -> str:
    return base64.b64encode(x.to(torch.float32).contiguous().numpy().astype("<f4").tobytes()).decode()
