"""The curves of a run, which the evidence of its findings comes from."""

import itertools
import math
import statistics
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.store.finding import Evidence

Numbers = NDArray[np.float64]
BLOCKS = 10
"""parts that a curve is divided into"""
CHECKED_METRICS = (
    "episode_return",
    "reward",
    "score_std",
    "gold",
    "held_out_gold",
    "held_out_reward",
    "held_out_loss",
    "held_out_accuracy",
    "held_out_margin",
    "held_out_chosen_moved",
    "held_out_log_likelihood",
    "groups_without_signal",
    "without_score",
    "distinct_2",
    "repeated",
    "eos_rate",
    "special_tokens",
    "sampler_kl",
    "kl_reference",
    "kl_reference_response",
    "policy_loss",
    "value_loss",
    "gradient_norm_policy",
    "explained_variance",
    "entropy",
    "kl",
    "ratio_outside",
    "clip_active",
    "ratio_at_start",
    "observations_constant",
    "observations_outside",
    "observations_clipped",
    "rewards_clipped",
    "actions_clipped",
    "stopped_early",
    "epochs",
    "step_taken",
)
"""the metrics that checks read"""


@dataclass(frozen=True)
class Curve:
    """The known values of one metric.   Both [n]"""

    metric: str
    steps: Numbers
    values: Numbers

    def __len__(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        """Of all values."""
        return float(self.values.mean())

    def part(self, start: int, stop: int) -> "Curve":
        """The values with these indices."""
        return Curve(self.metric, self.steps[start:stop], self.values[start:stop])

    def after(self, step: float) -> "Curve":
        """The values after a step."""
        return self.part(int(np.searchsorted(self.steps, step, "right")), len(self))

    def until(self, step: float) -> "Curve":
        """The values up to a step, inclusive."""
        return self.part(0, int(np.searchsorted(self.steps, step, "right")))

    def last(self, count: int) -> "Curve":
        """The newest values."""
        return self.part(max(0, len(self) - count), len(self))

    def during(self, other: "Curve") -> "Curve":
        """The values between the first and the last step of a part of another curve."""
        return self.after(other.steps[0] - 1).until(other.steps[-1])

    def evidence(self, about: str = "mean", value: float | None = None) -> Evidence:
        """The mean of the curve, or another value, as evidence."""
        return Evidence(self.metric, self.mean if value is None else value, about, int(self.steps[0]), int(self.steps[-1]))

    def window(self, width: int, largest: bool) -> "Curve":
        """The ``width`` values in a row whose mean is largest, or smallest. Needs at least ``width`` values."""
        sums = np.cumsum(np.concatenate([[0.0], self.values]))
        means = sums[width:] - sums[:-width]
        start = int(means.argmax() if largest else means.argmin())
        return self.part(start, start + width)

    def blocks(self) -> "list[Curve]":
        """Ten parts of similar length; fewer if there are fewer values."""
        count = min(BLOCKS, len(self))
        edges = [round(i * len(self) / count) for i in range(count + 1)] if count else []
        return [self.part(start, stop) for start, stop in itertools.pairwise(edges)]

    def means(self) -> list[float]:
        """Of the blocks."""
        return [block.mean for block in self.blocks()]

    def noise(self, slopes: bool = True) -> float:
        """The standard deviation of a block's mean, from the median difference of neighbouring blocks (so a jump does not count
        as noise); 0 for fewer than three blocks.

        slopes   whether a steady rise or fall counts; without it, from the differences of the differences
        """
        means = self.means()
        if len(means) < 3:
            return 0.0
        differences: list[float] = np.abs(np.diff(means, 1 if slopes else 2)).tolist()
        # np.median would import numpy.ma, 1 MB, in the middle of a run.
        return statistics.median(differences) * 1.4826 / math.sqrt(2 if slopes else 6)

    @property
    def least_noise(self) -> float:
        """The smaller of the two, which a steady rise or fall does not raise."""
        return min(self.noise(), self.noise(slopes=False))

    def start(self) -> "tuple[Curve, float]":
        """The first two values, as a whole block may have learned already; and the noise of their mean."""
        block = self.blocks()[0]
        first = block if self.metric == "episode_return" else block.part(0, 2)  # the first episodes to end are the short ones
        return first, self.least_noise * math.sqrt(len(block) / len(first))


class RunCurves:
    """The metrics of a run as curves, by name: ``curves["kl"]``. Rows can be added while the run goes on.

    A run keeps them to its end, and those that it has alone.

    budget   the steps of the recipe; default: the steps so far
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = (), budget: int | None = None) -> None:
        self.budget = budget
        self._steps = array("d")
        self._columns: dict[str, array[float]] = {}
        for row in rows:
            self.add(row)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, row: Mapping[str, Any]) -> None:
        """One more iteration."""
        for name in CHECKED_METRICS:
            if row.get(name) is not None and name not in self._columns:
                self._columns[name] = array("d", [math.nan]) * len(self)
        self._steps.append(row["steps"])
        for name, column in self._columns.items():
            value = row.get(name)
            column.append(math.nan if value is None else value)

    @property
    def steps(self) -> int:
        """Steps so far; 0 before the first iteration."""
        return int(self._steps[-1]) if self._steps else 0

    @property
    def planned(self) -> int:
        """The budget, in steps."""
        return max(self.steps, self.budget or 0)

    def __getitem__(self, metric: str) -> Curve:
        """The finite values of a metric."""
        assert metric in CHECKED_METRICS, metric
        if metric not in self._columns:
            return Curve(metric, np.empty(0), np.empty(0))
        values = np.array(self._columns[metric])
        finite = np.isfinite(values)
        return Curve(metric, np.array(self._steps)[finite], values[finite])

    def width(self, share: float, least: int) -> int:
        """The number of iterations in a share of the whole run, estimated from its speed so far; at least ``least``."""
        if not self.steps:
            return least
        return max(least, round(share * len(self) * self.planned / self.steps))

    def worst(self, curve: Curve, share: float, least: int, largest: bool = True) -> Curve | None:
        """The neighbouring values of a curve, ``width`` of them, whose mean is largest or smallest; None if there are fewer."""
        width = self.width(share, least)
        return curve.window(width, largest) if len(curve) >= width else None


def seen(*curves: Curve) -> tuple[Evidence, ...]:
    """The means of those curves that have values."""
    return tuple(curve.evidence() for curve in curves if len(curve))
