"""Findings while a run goes on: each is told once, when it first holds. Notes, which alarm nobody, are left to reports."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from surefoot.diagnostics.finding import Finding
from surefoot.diagnostics.findings import diagnose
from surefoot.diagnostics.history import Story
from surefoot.errors import cause_of
from surefoot.recipes.base import Recipe

LOOKS = 20
"""how often in a run one looks"""


class Watch:
    """Who looks after a run.

    recipe   of the run
    say      told a line
    """

    def __init__(self, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.recipe, self.say = recipe, say
        self.story = Story(budget=recipe.steps)
        self.told: set[str] = set()
        self.looked = 0
        self.failed = False

    def begin(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take in what a resumed run has done before; what held then has been told."""
        for row in rows:
            self.story.add(row)
        self.looked = self._look()
        self.told = {finding.name for finding in self._alarms()}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """One more iteration; every twentieth of the budget a look at all of them."""
        self.story.add(metrics)
        if self._look() == self.looked:
            return
        self.looked = self._look()
        for finding in self._alarms():
            if finding.name not in self.told:
                self.told.add(finding.name)
                self.say(f"! step {self.story.steps:,}, {finding.line}")

    def end(self, folder: Path | None) -> None:
        """What holds in the end, in short; nothing where all is well."""
        names = [finding.name.replace("_", " ") for finding in self._alarms()]
        if names:
            more = "" if folder is None else f"; more: surefoot check {folder}"
            self.say(f"findings: {', '.join(names)}{more}")

    def _alarms(self) -> list[Finding]:
        try:
            found = diagnose(self.story, self.recipe)
        except Exception as error:  # who looks after a run must never be what ends it
            found = []
            if not self.failed:
                self.failed = True
                self.say(f"! findings are not complete, a rule failed ({cause_of(error)})")
        return [finding for finding in found if finding.severity != "note"]

    def _look(self) -> int:
        return LOOKS * self.story.steps // self.recipe.steps
