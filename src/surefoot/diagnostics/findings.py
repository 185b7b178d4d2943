"""The doctor: pure functions from a run's metrics to findings in plain words, with cause, evidence and what to try.

from surefoot.diagnostics.findings import findings_of, of_run
for finding in of_run("runs/mine"):
    print(finding.line)
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from surefoot.diagnostics.finding import SEVERITIES, Evidence, Finding
from surefoot.diagnostics.history import Story
from surefoot.diagnostics.reward_findings import REWARD_RULES
from surefoot.diagnostics.update_findings import UPDATE_RULES
from surefoot.files import read_toml
from surefoot.recipes.base import Recipe
from surefoot.recipes.reading import make_recipe
from surefoot.runs.folder import check_is_run
from surefoot.runs.trackers.metrics_jsonl import FILE, History, read_history

RULES = (*REWARD_RULES, *UPDATE_RULES)
"""every rule: a story and a recipe (or None) in, a finding or None out"""
HIDES = {"no_reward_signal": ("return_flat",), "reward_hacked": ("entropy_collapsed",)}
"""findings that say all that others would say again"""


def diagnose(story: Story, recipe: Recipe | None = None) -> list[Finding]:
    """All that there is to say about a run, the worst first; nothing about a healthy one."""
    found = [finding for rule in RULES if (finding := rule(story, recipe)) is not None]
    hidden = {name for finding in found for name in HIDES.get(finding.name, ())}
    return sorted((f for f in found if f.name not in hidden), key=lambda finding: SEVERITIES.index(finding.severity))


def findings_of(rows: Iterable[Mapping[str, Any]], recipe: Recipe | None = None) -> list[Finding]:
    """The findings of the rows of a metrics.jsonl. With its recipe they know the budget and can name its fields' values."""
    return diagnose(Story(rows, None if recipe is None else recipe.steps), recipe)


def of_run(folder: str | Path) -> list[Finding]:
    """The findings of a run's folder, finished or still going.

    Raises SurefootError when it is no run.
    """
    path = Path(folder)
    check_is_run(path)
    return findings_in(read_history(path), make_recipe(read_toml(path / "config.toml")))


def findings_in(history: History, recipe: Recipe | None = None) -> list[Finding]:
    """The findings of a run's metrics, whether they are what it wrote among them."""
    found = findings_of(history.rows, recipe)
    if history.fault is None:
        return found
    damaged = Finding(
        "metrics_damaged",
        "warning",
        f"{FILE} {history.fault}",
        "it was edited, copied in part, or changed on the disk",
        (),
        ("copy it again from where it is whole", "do without what is missing: resuming a run needs none of it"),
    )
    return sorted([damaged, *found], key=lambda finding: SEVERITIES.index(finding.severity))


__all__ = ["Evidence", "Finding", "Story", "diagnose", "findings_in", "findings_of", "of_run"]
