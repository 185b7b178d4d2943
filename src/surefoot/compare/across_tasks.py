"""Compare algorithms, or any field of a recipe, over several tasks and seeds: scores normalised per task, then aggregated.

As Agarwal et al. 2021 (arXiv 2108.13264) recommend: the interquartile mean, performance profiles and the probability of
improvement. Every task has the same weight, whatever its number of seeds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.compare.runs import SCORES, SavedRun, differences_between, distinguishing_fields, full_text, short_text
from surefoot.compare.statistics import finite, interquartile_mean, interval, t_quantile
from surefoot.errors import SurefootError
from surefoot.recipes.reading import flatten

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(21))
"""normalised scores at which profiles are computed"""

Range = tuple[float, float]
Scores = Sequence[NDArray[Any]]
"""for each task, normalised scores of its seeds   [..., seeds]"""
Aggregate = Callable[[Scores], NDArray[Any]]


def iqm(scores: Scores) -> NDArray[Any]:
    """The interquartile mean over runs of all tasks, counted so that every task has the same weight.   -> [...]"""
    seeds = [task.shape[-1] for task in scores]
    counts = np.repeat([math.lcm(*seeds) // count for count in seeds], seeds)
    return interquartile_mean(np.concatenate(scores, -1), counts)


def task_mean(scores: Scores) -> NDArray[Any]:
    """The mean over tasks of the mean over seeds.   -> [...]"""
    return np.asarray(np.mean([task.mean(-1) for task in scores], 0))


def task_median(scores: Scores) -> NDArray[Any]:
    """The median over tasks of the mean over seeds.   -> [...]"""
    return np.asarray(np.median([task.mean(-1) for task in scores], 0))


def optimality_gap(scores: Scores) -> NDArray[Any]:
    """The mean shortfall from a normalised score of 1; scores above 1 count as 1.   -> [...]"""
    return np.asarray(np.mean([np.maximum(0, 1 - task).mean(-1) for task in scores], 0))


def profile(scores: Scores, thresholds: Sequence[float] = THRESHOLDS) -> NDArray[Any]:
    """The share of runs above each threshold, averaged over tasks.   -> [..., thresholds]"""
    edges = np.asarray(thresholds)
    return np.asarray(np.mean([(task[..., None] > edges).mean(-2) for task in scores], 0))


def improvement(scores: Scores, base: Scores) -> NDArray[Any]:
    """P(X > Y) for a run X of one and Y of the other on the same task, ties ½, averaged over tasks.   -> [...]"""
    wins = [np.sign(x[..., :, None] - y[..., None, :]).mean((-1, -2)) for x, y in zip(scores, base, strict=True)]
    return np.asarray((1 + np.mean(wins, 0)) / 2)


def share_interval(share: float, variance: Callable[[NDArray[Any]], NDArray[Any]]) -> Range:
    """The 95 % score interval of a share: all values that lie within the normal quantile of the observed one.

    variance   of the estimate if the true share is p   [n] -> [n]; p(1−p)/n makes it Wilson's interval
    """
    p = np.linspace(0, 1, 2001)
    inside = p[(share - p) ** 2 <= t_quantile(math.inf) ** 2 * variance(p) + 1e-12]
    return float(inside[0]), float(inside[-1])


def mean_of_shares(shares: Sequence[float], intervals: Sequence[Range]) -> list[float]:
    """The 95 % interval of the mean of independent shares from their own intervals (Zou and Donner 2008)."""
    values, (lows, highs) = np.asarray(shares), np.asarray(intervals).T
    below, above = (float(np.sqrt(((values - ends) ** 2).sum())) / len(values) for ends in (lows, highs))
    return [max(0.0, float(values.mean()) - below), min(1.0, float(values.mean()) + above)]


def improvement_interval(scores: Scores, base: Scores) -> list[float]:
    """The 95 % interval of ``improvement``: Newcombe's (2006, method 5) for each task."""

    def newcombe(x: int, y: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
        pairs = (x + y) / 2 - 1
        return lambda p: p * (1 - p) * (1 + pairs * ((1 - p) / (2 - p) + p / (1 + p))) / (x * y)

    wins = [float(improvement([x], [y])) for x, y in zip(scores, base, strict=True)]
    sizes = [(len(x), len(y)) for x, y in zip(scores, base, strict=True)]
    return mean_of_shares(wins, [share_interval(win, newcombe(*size)) for win, size in zip(wins, sizes, strict=True)])


def profile_interval(scores: Scores) -> tuple[list[float], list[float]]:
    """The lower and upper ends of the 95 % intervals of ``profile``: Wilson's for each task."""

    def wilson(share: float, count: int) -> Range:
        return share_interval(share, lambda p: p * (1 - p) / count)

    ends = []
    for edge in THRESHOLDS:
        shares = [float((task > edge).mean()) for task in scores]
        ends.append(mean_of_shares(shares, [wilson(share, len(task)) for share, task in zip(shares, scores, strict=True)]))
    return [low for low, _ in ends], [high for _, high in ends]


AGGREGATES: dict[str, Aggregate] = {"iqm": iqm, "median": task_median, "mean": task_mean, "optimality_gap": optimality_gap}


@dataclass(frozen=True)
class TaskComparison:
    """Runs of several tasks, grouped by the value of one field."""

    field: str
    metric: str
    ranges: Mapping[str, Range]
    """task -> the scores that count as 0 and 1"""
    runs: Mapping[str, Mapping[str, Sequence[SavedRun]]]
    """value of the field -> task -> runs, each with a score"""

    @cached_property
    def scores(self) -> dict[str, dict[str, list[float]]]:
        """Value of the field -> task -> the score of each run, not normalised."""
        return _scores_of(self.runs, self.metric)

    def normalised(self, value: str) -> Scores:
        """The normalised scores of a value of the field, in the order of the tasks."""
        return [(np.asarray(self.scores[value][task], float) - low) / (high - low) for task, (low, high) in self.ranges.items()]

    @cached_property
    def results(self) -> dict[str, Any]:
        """Aggregates with intervals, profiles, and the probability of improvement over the first value."""
        first, table = next(iter(self.scores)), {}
        base = self.normalised(first)
        for value in self.scores:
            scores = self.normalised(value)
            row: dict[str, Any] = {"runs": {task: len(each) for task, each in self.scores[value].items()}}
            for name, aggregate in AGGREGATES.items():
                row[name] = {"value": float(aggregate(scores)), "interval": list(interval(aggregate, scores))}
            low, high = profile_interval(scores)
            row["profile"] = {"value": profile(scores).tolist(), "low": low, "high": high}
            if value != first:
                against = improvement_interval(scores, base)
                row["improvement"] = {"value": float(improvement(scores, base)), "interval": against}
            table[value] = row
        return {
            "field": self.field,
            "metric": self.metric,
            "ranges": {task: list(ends) for task, ends in self.ranges.items()},
            "thresholds": list(THRESHOLDS),
            "scores": {value: {task: list(each) for task, each in tasks.items()} for value, tasks in self.scores.items()},
            "results": table,
        }

    def to_json(self) -> dict[str, Any]:
        """The results as plain values that JSON can represent."""
        return dict(finite(self.results))


def compare_across_tasks(
    runs: Sequence[SavedRun], field: str, metric: str | None = None, ranges: Mapping[str, Range] | None = None
) -> TaskComparison:
    """Group runs by task and by the value of a recipe's field.

    metric  the score; default: the first of ``SCORES`` that all runs have
    ranges  task -> scores that count as 0 and 1; by default the worst and the best of these runs

    Raises SurefootError for a field that a recipe lacks, a score that a run lacks or of which lower is better, or a value that
    has no run of some task.
    """
    if metric is not None and metric.endswith("loss"):
        raise SurefootError(f"--score {metric}: of a loss lower is better; name a metric of which higher is better")
    metric = metric or _common_metric(runs)
    groups: dict[str, dict[str, list[SavedRun]]] = {}
    first: dict[tuple[str, str], SavedRun] = {}
    for run in runs:
        table = dict(flatten(run.recipe.table))
        if field not in table:
            raise SurefootError(f"--by {field}: {run.name} has no such field; name one, such as algorithm or seed")
        last = run.last(metric)
        if last is None or not np.isfinite(last):
            raise SurefootError(f"--score {metric}: {run.name} has none; name a metric that all runs have")
        value, task = full_text(table[field]), full_text(table.get("task") or table.get("data.train") or table.get("kind"))
        like = first.setdefault((value, task), run)
        if apart := differences_between([distinguishing_fields(like.recipe), distinguishing_fields(run.recipe)]):
            names = ", ".join(list(apart)[:3])
            both = f"{like.name} and {run.name} ({short_text(value)}, {short_text(task)})"
            raise SurefootError(f"--by {field}: {both} differ in {names} too; leave one out")
        groups.setdefault(value, {}).setdefault(task, []).append(run)
    tasks = sorted({task for by_task in groups.values() for task in by_task})
    for value, by_task in groups.items():
        if missing := [task for task in tasks if task not in by_task]:
            raise SurefootError(f"--by {field}: no run of {value} on {', '.join(missing)}; every value needs every task")
    if unknown := [task for task in ranges or {} if task not in tasks]:
        raise SurefootError(f"--range {unknown[0]}: no run of this task; tasks are {', '.join(tasks)}")
    scores = _scores_of(groups, metric)
    ends = {task: (ranges or {}).get(task) or _observed_range(task, scores) for task in tasks}
    return TaskComparison(field, metric, ends, {value: {t: by_task[t] for t in tasks} for value, by_task in groups.items()})


def _scores_of(groups: Mapping[str, Mapping[str, Sequence[SavedRun]]], metric: str) -> dict[str, dict[str, list[float]]]:
    return {
        value: {task: [float(run.last(metric) or 0.0) for run in runs] for task, runs in by_task.items()}
        for value, by_task in groups.items()
    }


def _common_metric(runs: Sequence[SavedRun]) -> str:
    """The first score that all runs have; losses are left out, since lower is better."""
    for metric in SCORES:
        if not metric.endswith("loss") and all(run.last(metric) is not None for run in runs):
            return metric
    raise SurefootError("compare --by: the runs have no score in common; compare runs of one kind")


def _observed_range(task: str, scores: Mapping[str, Mapping[str, Sequence[float]]]) -> Range:
    each = [score for by_task in scores.values() for score in by_task[task]]
    low, high = min(each), max(each)
    if low == high:
        raise SurefootError(f"{task}: all runs have the same score {low:g}; give its range with --range {task}=LOW:HIGH")
    return low, high
