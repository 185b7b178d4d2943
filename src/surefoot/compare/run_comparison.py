"""``surefoot compare``: in what some runs' recipes differ, and what came of it, with intervals over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from surefoot.compare.report import each, finite, how_sure, mean_and_interval, number, span
from surefoot.compare.runs import ABSENT, JUDGED, Run, differences_between, fields_of, flat, grouped
from surefoot.compare.statistics import bootstrap_interval, interquartile_mean, markdown_table, mean, middle, resampled
from surefoot.terminal import visible

KEPT = ("python", "platform", "versions", "git")
"""of environment.json, what a number may depend on"""


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    name: str
    runs: Sequence[Run]

    def scores(self, metric: str) -> list[float]:
        """The last known value of each run that has one."""
        return [value for run in self.runs if (value := run.last(metric)) is not None]


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, and in what their recipes differ."""

    groups: Sequence[Group]
    fields: dict[str, list[Any]]
    """field -> its value in each group"""
    surroundings: dict[str, list[Any]]
    """the same for versions and the like, run by run"""

    def to_json(self) -> dict[str, Any]:
        """As a table of plain values."""
        groups = [
            {
                "name": group.name,
                "runs": [
                    {
                        "path": str(run.path),
                        "seed": run.recipe.seed,
                        "steps": run.steps,
                        "budget": run.recipe.steps,
                        "seconds": run.seconds,
                        "findings": [finding.name for finding in run.findings],
                    }
                    for run in group.runs
                ],
                "scores": {metric: statistics(group.scores(metric)) for metric in self.metrics if group.scores(metric)},
            }
            for group in self.groups
        ]
        against = {metric: differences for metric in self.metrics if (differences := self.against_first(metric))}
        told = {"groups": groups, "differences": self.fields, "surroundings": self.surroundings, "against_first": against}
        return dict(finite(told))

    @property
    def metrics(self) -> list[str]:
        """By which they can be compared."""
        return [metric for metric in JUDGED if any(group.scores(metric) for group in self.groups)]

    def against_first(self, metric: str) -> dict[str, dict[str, Any]]:
        """Group -> difference of means from the first group and its interval, for groups that have the metric."""
        base = self.groups[0].scores(metric)
        return {
            group.name: {"difference": float(mean(scores) - mean(base)), "interval": list(difference_interval(scores, base))}
            for group in self.groups[1:]
            if base and (scores := group.scores(metric))
        }


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Put runs into groups and find what differs."""
    groups = grouped(runs)
    fields = differences_between([fields_of(group[0].recipe) for group in groups])
    named = [Group(_name(index, fields), group) for index, group in enumerate(groups)]
    kept = [dict(flat({key: run.environment[key] for key in KEPT if key in run.environment})) for run in runs]
    return Comparison(named, fields, differences_between(kept))


def _name(index: int, fields: dict[str, list[Any]]) -> str:
    """A letter; and the value where a single field tells groups apart."""
    letter = chr(ord("A") + index) if index < 26 else str(index + 1)
    if len(fields) != 1:
        return letter
    ((field, values),) = fields.items()
    return f"{letter} {field.rpartition('.')[2]}={brief(values[index])}"


def statistics(scores: Sequence[float]) -> dict[str, Any]:
    """Mean and interquartile mean, each with its interval, and every seed."""
    return {
        "mean": float(mean(scores)),
        "interval": list(bootstrap_interval(scores)),
        "iqm": float(interquartile_mean(scores)),
        "iqm_interval": list(bootstrap_interval(scores, interquartile_mean)),
        "each": list(scores),
    }


def difference_interval(scores: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """The percentile bootstrap interval of a difference of means: both groups are resampled, apart from each other."""
    ours, theirs = np.asarray(scores, float), np.asarray(base, float)
    # The same indices for both would pair seeds that have nothing to do with each other, where the counts are equal.
    drawn = np.random.default_rng(1).integers(0, len(theirs), (len(resampled(len(ours))), len(theirs)))
    low, high = middle(ours[resampled(len(ours))].mean(-1) - theirs[drawn].mean(-1))
    return float(low), float(high)


def told(comparison: Comparison) -> str:
    """As text for a terminal, which is Markdown too."""
    groups = comparison.groups
    lines = [_table(["group", "runs", "seeds", "state"], [_row(group) for group in groups])]
    if comparison.fields:
        common = {field: values for field, values in comparison.fields.items() if ABSENT not in values}
        rows = [[field, *map(brief, values)] for field, values in common.items()]
        lines += ["In what the recipes differ:", _table(["field", *(group.name for group in groups)], rows)]
        if len(common) < len(comparison.fields):
            lines.append(
                f"And {len(comparison.fields) - len(common)} fields that not all of these kinds have (--json tells them)."
            )
    elif len(groups) == 1:
        lines.append("The recipes differ in nothing but the seed.")
    for metric in comparison.metrics:
        lines += [f"{metric}, the last known:", _scores(comparison, metric)]
    lines.append(f"{how_sure(min(len(group.runs) for group in groups))}.")
    if comparison.surroundings:
        rows = [[name, ", ".join(dict.fromkeys(map(brief, values)))] for name, values in comparison.surroundings.items()]
        lines += ["What else differs, and may matter:", _table(["in environment.json", "values"], rows)]
    for group in groups:
        for run in group.runs:
            if run.changed:
                changed = "; ".join(map(visible, run.changed))
                lines.append(f"{visible(str(run.path))}: config.toml was changed since the checkpoint: {changed}")
            lines += [f"{visible(str(run.path))}: {finding.line}" for finding in run.findings if finding.severity != "note"]
    return "\n\n".join(lines)


def _row(group: Group) -> list[str]:
    states = dict.fromkeys(run.state for run in group.runs)
    seeds = [run.recipe.seed for run in group.runs]
    twice = " (a seed twice)" if len(set(seeds)) < len(seeds) else ""
    return [group.name, str(len(group.runs)), ", ".join(map(str, sorted(seeds))) + twice, "; ".join(states)]


def _scores(comparison: Comparison, metric: str) -> str:
    against = comparison.against_first(metric)
    rows = []
    for group in comparison.groups:
        scores = group.scores(metric)
        row = [group.name, *mean_and_interval(scores)]
        row += (
            [number(float(interquartile_mean(scores))), span(*bootstrap_interval(scores, interquartile_mean))]
            if scores
            else ["–", "–"]
        )
        if len(comparison.groups) > 1:
            found = against.get(group.name)
            row.append("–" if found is None else f"{number(found['difference'])} ({span(*found['interval'])})")
        rows.append([*row, each(scores)])
    more = [f"less {comparison.groups[0].name}"] if len(comparison.groups) > 1 else []
    return _table(["group", "mean", "95 % interval", "IQM", "95 % interval", *more, "each seed"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(header, [[cell.replace("|", "\\|") for cell in row] for row in rows])


def brief(value: Any) -> str:
    """A value of a recipe in few letters."""
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 48 else f"{text[:47]}…"
