"""Runs to be looked at: the demos' stored metrics, and runs that are trained here, most of them made sick on purpose."""

import csv
from pathlib import Path
from typing import Any

from surefoot.diagnostics.findings import findings_of
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.store.finding import Finding

TABLES = Path(__file__).parent / "tables"


def stored(name: str) -> list[dict[str, Any]]:
    """The rows of a demo's metrics.jsonl, what no rule reads left out, in five digits."""
    with (TABLES / f"{name}.csv").open(encoding="utf-8") as file:
        return [{key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)]


def trained(what: str, task: Any = None, **fields: Any) -> dict[str, Finding]:
    """Train by a recipe, and what is found, by name."""
    rows: list[dict[str, Any]] = []
    recipe = find_recipe(what, {"evaluation": {"rows": 0} if what == "language" else {"episodes": 0}, **fields})
    api.start(recipe, None, task, callback=lambda metrics: rows.append(dict(metrics)))
    return {finding.name: finding for finding in findings_of(rows, recipe)}
