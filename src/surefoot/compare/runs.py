"""Read finished or unfinished runs from their folders, group those that differ only in the seed, and compare the groups."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from surefoot.compare.statistics import finite, interquartile_mean, mean, mean_interval, score_interval
from surefoot.diagnostics.findings import findings_in, without_findings
from surefoot.errors import SurefootError
from surefoot.people.log import waits_for
from surefoot.recipes.base import Recipe
from surefoot.recipes.reading import flatten, set_fields
from surefoot.store.checkpoint import checkpoints_in
from surefoot.store.finding import Finding
from surefoot.store.folder import CHANGE_NOTHING, changed_since, recipe_of, sources_in
from surefoot.store.manifest import read_listed_table
from surefoot.store.metrics import FILE, read_history
from surefoot.store.reading import History, check_is_run, read_samples, samples_in
from surefoot.terminal import visible

SCORES = (
    "evaluation_return",
    "episode_return",
    "held_out_reward",
    "reward",
    "held_out_gold",
    "gold",
    "held_out_log_likelihood",
    "held_out_accuracy",
    "held_out_loss",
)
"""metrics by which runs are compared, if they have them"""
MAY_DIFFER = ("seed", "device", "threads", *CHANGE_NOTHING, "checkpoint", "traces", "evaluation.seed", "evaluation.every")
"""fields in which runs of one group may differ: none of them changes what a run learns from a given stream of randomness"""
ENVIRONMENT = ("python", "platform", "processor", "versions", "git", "ranks")
"""keys of environment.json that may affect the numbers"""
ABSENT = "–"
"""the value of a field that a kind of recipe doesn't have"""


@dataclass(frozen=True)
class SavedRun:
    """One run, read from its folder."""

    path: Path
    recipe: Recipe
    history: History
    """of metrics.jsonl; at least one row"""
    environment: Mapping[str, Any]
    """environment.json; empty if there is none"""
    changed: Sequence[str] = ()
    """how config.toml, and the code that it names, differ from those of the newest checkpoint"""
    sources: Mapping[str, str] = field(default_factory=dict)
    """the code of its newest checkpoint: files and packages, with their hashes and versions"""

    @cached_property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The metrics of each iteration."""
        return self.history.rows

    @property
    def name(self) -> str:
        """The name of the run folder, made printable on one line."""
        return visible(self.path.resolve().name)

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return int(self.rows[-1]["steps"])

    @property
    def state(self) -> str:
        """``finished, 1,000 steps`` or ``at 500 of 1,000 steps``."""
        if self.steps >= self.recipe.steps:
            return f"finished, {self.steps:,} steps"
        return f"at {self.steps:,} of {self.recipe.steps:,} steps"

    @property
    def seconds(self) -> float:
        """Duration of all iterations, without evaluations and checkpoints."""
        return float(sum((row.get("seconds_collecting") or 0) + (row.get("seconds_learning") or 0) for row in self.rows))

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings of all diagnostic checks."""
        return findings_in(self.history, self.recipe)

    @property
    def verdict(self) -> str:
        """What it means that there are no findings, in one line."""
        return without_findings(len(self.rows), self.steps)

    def last(self, metric: str) -> float | None:
        """The last known value of a metric."""
        return next((row[metric] for row in reversed(self.rows) if row.get(metric) is not None), None)

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric, in iterations that have a value."""
        points = [(row["steps"], row[metric]) for row in self.rows if row.get(metric) is not None]
        return [step for step, _ in points], [value for _, value in points]

    def samples(self) -> tuple[int, list[dict[str, Any]]] | None:
        """Step and sampled responses of the last evaluation that saved any; None if none did."""
        files = samples_in(self.path / "samples")
        if not files:
            return None
        return int(files[-1].stem), [row for row in read_samples(files[-1]) if isinstance(row.get("response"), str)]


def read_run(path: Path) -> SavedRun:
    """The run in a folder, finished or not.

    Raises SurefootError if it is not a run or has no metrics yet.
    """
    check_is_run(path)
    recipe, history = recipe_of(path), read_history(path)
    if not history.rows:
        why = f"has no metrics yet; wait for its first iteration, or continue it if it was stopped: surefoot resume {path}"
        why = waits_for(path) or why
        raise SurefootError(f"{path}: {why}" if history.fault is None else f"{path / FILE}: {history.fault}; no row is left")
    facts = path / "environment.json"
    environment = read_listed_table(facts) if facts.exists() else {}
    checkpoints = checkpoints_in(path / "checkpoints")
    return SavedRun(path, recipe, history, environment, changed_since(path, recipe), sources_in(checkpoints))


# ---- groups -----------------------------------------------------------------------------------------------------------


def distinguishing_fields(recipe: Recipe) -> dict[str, Any]:
    """The fields that separate groups of runs. With ``evaluation.patience`` they include when and how runs are evaluated."""
    free = tuple(name for name in MAY_DIFFER if recipe.evaluation.patience is None or not name.startswith("evaluation."))
    return {
        name: value
        for name, value in flatten(recipe.table)
        if not any(name == other or name.startswith(f"{other}.") for other in free)
    }


def distinguishing(run: SavedRun) -> dict[str, Any]:
    """The fields that separate a run's group from others, and the code that it rests on."""
    return distinguishing_fields(run.recipe) | {f"source of {name}": value for name, value in run.sources.items()}


def group_runs(runs: Sequence[SavedRun]) -> list[list[SavedRun]]:
    """Groups of runs whose recipes differ only in the seed, in the order of their first run."""
    groups: dict[str, list[SavedRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(distinguishing(run), sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def differences_between(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Field -> its value in each flat table (``ABSENT`` if it has none), for fields in which any two differ."""
    names = dict.fromkeys(name for table in tables for name in table)
    values_of = {name: [table.get(name, ABSENT) for table in tables] for name in names}
    return {name: values for name, values in values_of.items() if any(value != values[0] for value in values)}


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed."""

    name: str
    runs: Sequence[SavedRun]

    def of_seeds(self, metric: str) -> list[float | None]:
        """The last known value of each run; None for a run that has none."""
        return [run.last(metric) for run in self.runs]

    def scores(self, metric: str) -> list[float]:
        """The last known value of each run that has one."""
        return [value for value in self.of_seeds(metric) if value is not None]


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, and the differences between their recipes."""

    groups: Sequence[Group]
    fields: dict[str, list[Any]]
    """field -> its value in each group"""
    environments: dict[str, list[Any]]
    """key of environment.json -> its value in each run, for keys in which any two differ"""

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain values that JSON can represent."""
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
                "scores": {metric: score_statistics(group.scores(metric)) for metric in self.metrics if group.scores(metric)},
            }
            for group in self.groups
        ]
        against = {metric: differences for metric in self.metrics if (differences := self.against_first(metric))}
        table = {"groups": groups, "differences": self.fields, "surroundings": self.environments, "against_first": against}
        return dict(finite(table))

    @property
    def metrics(self) -> list[str]:
        """The scores that any run has."""
        return [metric for metric in SCORES if any(group.scores(metric) for group in self.groups)]

    def against_first(self, metric: str) -> dict[str, dict[str, Any]]:
        """Group -> difference of its mean from the first group's, with its interval, for groups that have the metric."""
        base = self.groups[0].scores(metric)
        return {
            group.name: {"difference": float(mean(scores) - mean(base)), "interval": list(mean_interval(scores, base))}
            for group in self.groups[1:]
            if base and (scores := group.scores(metric))
        }


def compare_runs(runs: Sequence[SavedRun]) -> Comparison:
    """Group the runs and list the differences between their recipes and environments."""
    groups = group_runs(runs)
    fields = differences_between([distinguishing(group[0]) for group in groups])
    named = [Group(_group_name(index, fields), group) for index, group in enumerate(groups)]
    environments = [dict(flatten({k: run.environment[k] for k in ENVIRONMENT if k in run.environment})) for run in runs]
    return Comparison(named, fields, differences_between(environments))


def _group_name(index: int, fields: dict[str, list[Any]]) -> str:
    """A letter, followed by the value if the groups differ in a single field."""
    letter = chr(ord("A") + index) if index < 26 else str(index + 1)
    if len(fields) != 1:
        return letter
    ((field, values),) = fields.items()
    return f"{letter} {field.rpartition('.')[2]}={short_text(values[index])}"


def score_statistics(scores: Sequence[float]) -> dict[str, Any]:
    """Mean and interquartile mean, each with its interval, and the score of every seed."""
    return {
        "mean": float(mean(scores)),
        "interval": list(score_interval(scores)),
        "iqm": float(interquartile_mean(scores)),
        "iqm_interval": list(score_interval(scores, interquartile_mean)),
        "each": list(scores),
    }


def full_text(value: Any) -> str:
    """A value of a recipe in printable characters."""
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(set_fields(value))
    return "".join(c if c.isprintable() else "?" for c in text)


def short_text(value: Any) -> str:
    """A value of a recipe in at most 48 printable characters; of a path the end, where paths differ."""
    text = full_text(value)
    if len(text) <= 48:
        return text
    is_path = "/" in text and not re.search(r"[\s{\[]", text)
    return f"…{text[-47:]}" if is_path else f"{text[:47]}…"
