"""What the demos share: a folder that is new, stages that are ordinary runs, and how to type ``surefoot`` here."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.recipes.base import Recipe
from surefoot.recipes.presets import find_recipe
from surefoot.runs.display import Display

DisplayFor = Callable[[Recipe, Path], Display]


@dataclass(frozen=True)
class Stages:
    """Runs of one demo, one after the other, each a folder of its own in ``folder``.

    seed  of every stage
    """

    folder: Path
    seed: int
    display_for: DisplayFor
    begun: float = field(default_factory=time.monotonic)

    def run(self, name: str, recipe: str, changes: Mapping[str, Any]) -> Path:
        """Train by a preset with changes laid over it, and return the run's folder."""
        from surefoot.runs import api

        found, folder = find_recipe(recipe, {"seed": self.seed, **changes}), self.folder / name
        print(flush=True)
        api.start(found, folder, display=self.display_for(found, folder))
        return folder

    @property
    def seconds(self) -> float:
        """Since the demo began, by the clock on the wall."""
        return time.monotonic() - self.begun


def free_folder(run_dir: Path, name: str) -> Path:
    """``run_dir/name``, or ``name-2`` and so on where that is taken: no demo writes into another's folder.

    Raises SurefootError where a launcher has started several processes.
    """
    from surefoot.core.distributed import check_single_process

    folder, number = run_dir / name, 2
    check_single_process(folder)
    while folder.exists():
        folder, number = run_dir / f"{name}-{number}", number + 1
    return folder


def command_here() -> str:
    """What to type for ``surefoot``: its path, where the shell doesn't find it by name, as after ``make demo``."""
    called = Path(sys.argv[0])
    return "surefoot" if called.name != "surefoot" or shutil.which("surefoot") else str(called)
