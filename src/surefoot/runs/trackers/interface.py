"""The trackers, what every one of them does, and the run that it opens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from surefoot.recipes.base import Recipe
from surefoot.store.events import Sample
from surefoot.store.finding import Finding

TRACKERS = {"tensorboard": "TensorBoard", "wandb": "WandB", "trackio": "Trackio"}
"""name in a recipe, which is that of its module here, of the package that it needs and of the extra with it -> the class, which
opens a ``TrackedRun``"""

NOTHING = -1
"""``last_step`` of a run without a row"""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker opens it."""

    recipe: Recipe
    table: Mapping[str, Any]
    """the recipe as plain tables, without arguments that may be secret"""
    folder: Path
    steps: int
    """of the last row in metrics.jsonl when this process began; 0 without one"""
    name: str
    group: str
    saved: dict[str, Any]
    """what the tracker returned as ``identity`` when the run began; empty then"""


class Tracker(Protocol):
    """One run at one tracker. Every method may raise anything: the tracker then stops, and training continues."""

    identity: dict[str, Any]
    """plain values by which a resumed run finds its earlier part; kept in trackers.json"""
    last_step: int
    """steps of the newest row that the tracker has; ``NOTHING`` without one"""

    def log(self, steps: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Add the row of an iteration, with the samples of its evaluation. Steps only rise."""
        ...

    def log_video(self, steps: int, path: Path) -> None:
        """Add a video at the newest row."""
        ...

    def log_finding(self, steps: int, finding: Finding) -> None:
        """Add a finding, as an alert where there are alerts."""
        ...

    def close(self, failed: bool) -> None:
        """Finish: everything logged is in the store when this returns."""
        ...


def columns_of(samples: Sequence[Sample]) -> list[str]:
    """The keys of all samples, in the order in which they appear."""
    return list(dict.fromkeys(key for sample in samples for key in sample))
