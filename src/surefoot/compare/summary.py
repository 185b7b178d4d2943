"""What a comparison keeps of a training's metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.errors import SurefootError

POINTS = 400
"""most points that are kept of a training's curves"""


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a comparison reads of a run's metrics: where it ended, extremes, and curves of at most ``POINTS`` points.

    A measure that a row lacks is unknown. Raises SurefootError where there is no row, or the last one lacks a count.
    """
    lacking = [name for name in ("updates", "episodes") if not rows or rows[-1].get(name) is None]
    if lacking:
        what = f"its last row has no {' and no '.join(lacking)}" if rows else "has no row"
        raise SurefootError(f"metrics.jsonl: {what}; remove the run's folder, and it is trained again")
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
        "last_100_mean": last.get("episode_return"),
        "average_return": _area(rows),
        "explained_variance": explained[len(explained) // 2] if explained else None,
        "ratio_max": max(_known(rows, "ratio_max"), default=None),
        "ratio_outside": sum(outside) / len(outside) if outside else None,
        "seconds": sum((row.get("seconds_collecting") or 0) + (row.get("seconds_learning") or 0) for row in rows),
        "curves": {
            "steps": [part[-1]["steps"] for part in parts],
            "rollouts": [part[-1]["iteration"] for part in parts],
            "return": [part[-1].get("episode_return") for part in parts],
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
        if row.get("episode_return") is not None:
            total += row["episode_return"] * (row["steps"] - before)
            counted += row["steps"] - before
        before = row["steps"]
    return total / counted if counted else None
