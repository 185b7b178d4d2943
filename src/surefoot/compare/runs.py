"""Runs as they lie in their folders: recipe, metrics, samples, findings; and which of them differ in nothing but the seed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from surefoot.diagnostics.findings import Finding, findings_in
from surefoot.errors import SurefootError
from surefoot.files import parsed, read_table, read_toml
from surefoot.recipes.base import Recipe
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.runs.checkpoint import checkpoints_in
from surefoot.runs.folder import FREE as CHANGE_NOTHING
from surefoot.runs.folder import changed_since, check_is_run, samples_in
from surefoot.runs.trackers.metrics_jsonl import FILE, History, read_history
from surefoot.terminal import visible

JUDGED = (
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
"""metrics by which runs are compared, where they have them"""
FREE = ("seed", "device", "threads", *CHANGE_NOTHING, "checkpoint", "traces", "evaluation.seed", "evaluation.every")
"""fields in which runs of one group may differ: none of them changes what is learned from a given stream of randomness"""


@dataclass(frozen=True)
class Run:
    """One run, read and left as it is."""

    path: Path
    recipe: Recipe
    history: History
    """of metrics.jsonl, with one row or more"""
    environment: Mapping[str, Any]
    """environment.json; empty where it can't be read"""
    changed: Sequence[str] = ()
    """how config.toml differs from the recipe that the newest checkpoint was made by"""

    @cached_property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """One for each iteration."""
        return self.history.rows

    @property
    def name(self) -> str:
        """Its folder's, in one line."""
        return visible(self.path.resolve().name)

    @property
    def steps(self) -> int:
        """How far it is."""
        return int(self.rows[-1]["steps"])

    @property
    def state(self) -> str:
        """How far it is, in words."""
        if self.steps >= self.recipe.steps:
            return f"finished, {self.steps:,} steps"
        return f"at {self.steps:,} of {self.recipe.steps:,} steps"

    @property
    def seconds(self) -> float:
        """What its iterations took, evaluations and checkpoints aside."""
        return float(sum((row.get("seconds_collecting") or 0) + (row.get("seconds_learning") or 0) for row in self.rows))

    @cached_property
    def findings(self) -> list[Finding]:
        """What the doctor says."""
        return findings_in(self.history, self.recipe)

    def last(self, metric: str) -> float | None:
        """The last known value of a metric."""
        return next((row[metric] for row in reversed(self.rows) if row.get(metric) is not None), None)

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Steps and values where a metric is known."""
        known = [(row["steps"], row[metric]) for row in self.rows if row.get(metric) is not None]
        return [step for step, _ in known], [value for _, value in known]

    def samples(self) -> tuple[int, list[dict[str, Any]]] | None:
        """What was said at the last evaluation, and at which step; None where nothing was."""
        files = samples_in(self.path / "samples")
        if not files:
            return None
        file = files[-1]
        rows = []
        for line in file.read_text("utf-8", errors="replace").split(
            "\n"
        ):  # and not at other line ends, which a model may write
            try:
                row = parsed(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("response"), str):
                rows.append(row)
        return int(file.stem), rows


def read_run(path: Path) -> Run:
    """The run in a folder, finished or still going.

    Raises SurefootError when it is no run, or has no metrics yet.
    """
    check_is_run(path)
    recipe = make_recipe(read_toml(path / "config.toml"))
    history = read_history(path)
    if not history.rows:
        why = "has no metrics yet; wait for its first iteration"
        raise SurefootError(
            f"{path}: {why}" if history.fault is None else f"{path / FILE}: {history.fault}; nothing is left of it"
        )
    try:
        environment = read_table(path / "environment.json")
    except SurefootError:
        environment = {}
    checkpoint = next(reversed(checkpoints_in(path / "checkpoints")), None)
    return Run(path, recipe, history, environment, changed_since(checkpoint, recipe))


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as ``a.b.c`` and value; a table that is empty is a value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def fields_of(recipe: Recipe) -> dict[str, Any]:
    """The fields by which runs are told apart. Where patience may end a run, when it is judged and on what are among them."""
    free = tuple(name for name in FREE if recipe.evaluation.patience is None or not name.startswith("evaluation."))
    return {
        name: value
        for name, value in flat(to_table(recipe))
        if not any(name == other or name.startswith(f"{other}.") for other in free)
    }


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs whose recipes differ in their seed alone, together, in the order of their first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(fields_of(run.recipe), sort_keys=True, default=str), []).append(run)
    return list(groups.values())


ABSENT = "–"
"""what stands for a field that another kind of recipe has"""


def differences_between(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Field -> its value in each of some flat tables, ``ABSENT`` where it has none, for fields in which any two differ."""
    names = dict.fromkeys(name for table in tables for name in table)
    found = {name: [table.get(name, ABSENT) for table in tables] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}
