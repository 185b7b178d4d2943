"""A run's metrics as columns: what the rules read. It grows with a run, and holds few enough numbers for a long one."""

import itertools
import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.diagnostics.finding import Evidence

Numbers = NDArray[np.float64]

WATCHED = (
    "episode_return",
    "reward",
    "score_std",
    "gold",
    "held_out_gold",
    "held_out_log_likelihood",
    "groups_without_signal",
    "without_score",
    "distinct_2",
    "repeated",
    "eos_rate",
    "kl_reference",
    "kl_reference_response",
    "policy_loss",
    "value_loss",
    "explained_variance",
    "entropy",
    "kl",
    "ratio_outside",
    "clip_active",
    "ratio_at_start",
    "observations_clipped",
    "rewards_clipped",
    "actions_clipped",
    "stopped_early",
    "epochs",
    "step_taken",
)
"""the metrics that rules read"""
BLOCKS = 10


@dataclass(frozen=True)
class Curve:
    """The known values of one metric.   Both [n]"""

    metric: str
    steps: Numbers
    values: Numbers

    def __len__(self) -> int:
        return len(self.values)

    def part(self, start: int, stop: int) -> "Curve":
        """Some of it."""
        return Curve(self.metric, self.steps[start:stop], self.values[start:stop])

    def after(self, step: float) -> "Curve":
        """What was measured later."""
        return self.part(int(np.searchsorted(self.steps, step, "right")), len(self))

    def until(self, step: float) -> "Curve":
        """What was measured by then."""
        return self.part(0, int(np.searchsorted(self.steps, step, "right")))

    def evidence(self, about: str = "mean", value: float | None = None) -> Evidence:
        """The mean of all of it, or a value that it has somewhere."""
        value = float(self.values.mean()) if value is None else value
        return Evidence(self.metric, value, about, int(self.steps[0]), int(self.steps[-1]))

    def window(self, width: int, largest: bool) -> "Curve":
        """The ``width`` values in a row whose mean is the largest, or the least. Needs so many values."""
        sums = np.cumsum(np.concatenate([[0.0], self.values]))
        means = sums[width:] - sums[:-width]
        start = int(means.argmax() if largest else means.argmin())
        return self.part(start, start + width)

    def blocks(self) -> "list[Curve]":
        """Ten parts of like length, fewer where there are fewer values."""
        count = min(BLOCKS, len(self))
        edges = [round(i * len(self) / count) for i in range(count + 1)] if count else []
        return [self.part(start, stop) for start, stop in itertools.pairwise(edges)]

    def noise(self) -> float:
        """The standard deviation of a block's mean about the trend, from what neighbours differ by (their median, so that a
        jump is no noise); 0 for fewer than three blocks.
        """
        means = [float(block.values.mean()) for block in self.blocks()]
        if len(means) < 3:
            return 0.0
        return float(np.median(np.abs(np.diff(means)))) * 1.4826 / math.sqrt(2)


class Story:
    """What happened in a run, iteration by iteration.

    budget   the steps that the run is to take; none: those that it has
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = (), budget: int | None = None) -> None:
        self.budget = budget
        self._steps = array("d")
        self._columns = {name: array("d") for name in WATCHED}
        for row in rows:
            self.add(row)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, row: Mapping[str, Any]) -> None:
        """One more iteration."""
        self._steps.append(row["steps"])
        for name, column in self._columns.items():
            value = row.get(name)
            column.append(math.nan if value is None else value)

    @property
    def steps(self) -> int:
        """Where the run stands; 0 before its first iteration."""
        return int(self._steps[-1]) if self._steps else 0

    @property
    def planned(self) -> int:
        """The budget, in steps."""
        return max(self.steps, self.budget or 0)

    def curve(self, metric: str) -> Curve:
        """Where a metric is a finite number."""
        values = np.array(self._columns[metric])
        known = np.isfinite(values)
        return Curve(metric, np.array(self._steps)[known], values[known])

    def long(self, share: float, least: int) -> int:
        """How many iterations are a share of the whole run, as far as one can tell now; ``least`` at least."""
        if not self.steps:
            return least
        return max(least, round(share * len(self) * self.planned / self.steps))
