"""What a comparison keeps of a training's metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

POINTS = 400
"""most points that are kept of a training's curves"""


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a comparison reads of a run's metrics: where it ended, extremes, and curves of at most ``POINTS`` points."""
    last, late = rows[-1], rows[-max(1, len(rows) // 4) :]
    outside, explained = _known(rows, "ratio_outside"), sorted(_known(late, "explained_variance"))
    count = min(POINTS, len(rows))
    ends = [round((i + 1) * len(rows) / count) for i in range(count)]
    parts = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return {
        "steps": last["steps"],
        "rollouts": last["iteration"],
        "updates": last["updates"],
        "episodes": last["episodes"],
        "last_100_mean": last["episode_return"],
        "average_return": _area(rows),
        "explained_variance": explained[len(explained) // 2] if explained else None,
        "ratio_max": max(_known(rows, "ratio_max"), default=None),
        "ratio_outside": sum(outside) / len(outside) if outside else None,
        "seconds": sum(row["seconds_collecting"] + row["seconds_learning"] for row in rows),
        "curves": {
            "steps": [part[-1]["steps"] for part in parts],
            "rollouts": [part[-1]["iteration"] for part in parts],
            "return": [part[-1]["episode_return"] for part in parts],
            "ratio_max": [max(_known(part, "ratio_max"), default=None) for part in parts],
        },
    }


def _known(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _area(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean of the return over the steps of a run: the area under its curve, divided by its length.

    Before the first episode has ended its curve has no value yet, and those steps don't count.
    """
    total, counted, before = 0.0, 0, 0
    for row in rows:
        if row["episode_return"] is not None:
            total += row["episode_return"] * (row["steps"] - before)
            counted += row["steps"] - before
        before = row["steps"]
    return total / counted if counted else None
