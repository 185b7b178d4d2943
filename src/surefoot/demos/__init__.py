"""``surefoot demo``: a demo is a list of presets, trained one after the other. Each stage is an ordinary run.

A demo that people take part in ends until they have labelled, and goes on in its folder when the command is repeated.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import Interrupted, SurefootError
from surefoot.files import read_toml, write_text
from surefoot.recipes.base import Recipe
from surefoot.recipes.presets import find_recipe, presets
from surefoot.store.checkpoint import checkpoints_in
from surefoot.store.reading import FINISHED
from surefoot.terminal import visible

if TYPE_CHECKING:
    from surefoot.store.events import Listener

REPORT = "demo.json"
DisplayFor = Callable[[Recipe, Path], "Listener"]
"""makes the display of a run from its recipe and folder"""


@dataclass(frozen=True)
class Stage:
    """One run of a demo."""

    preset: str = ""
    name: str = ""
    """of the run's folder inside the demo's; the only stage of a demo may have the demo's own folder"""
    line: str = ""
    """printed before it"""
    prepare: Callable[[Path, int], None] = lambda folder, seed: None
    """writes files that the stage reads into the demo's folder, for a seed"""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """fields of the recipe; see ``in_folder``"""
    work: Callable[[Path, int, DisplayFor], bool] | None = None
    """done in place of training a preset, in the demo's folder with a seed; whether the demo goes on at once"""


@dataclass(frozen=True)
class Demo:
    """The stages of a demo, and what it prints about them."""

    folder: str
    stages: tuple[Stage, ...]
    report: Callable[[Path, int, float], dict[str, Any] | None]
    """prints the results, from the demo's folder, the seed and the monotonic time of the start; what it returns is written to
    ``demo.json``"""


def run_demo(demo: Demo, run_dir: Path, seed: int, display_for: DisplayFor) -> dict[str, Any] | None:
    """Train the stages in a new folder, print the results, and return the numbers; None if people must label first."""
    from surefoot.ranks.collectives import on_first
    from surefoot.runs import api

    folder, started = on_first(lambda: free_folder(run_dir, demo.folder)), time.monotonic()
    for number, stage in enumerate(demo.stages):
        begun = on_first(partial(_begin, stage, folder, seed, first=number == 0))
        if begun is None:
            continue
        if stage.work is not None:
            if not stage.work(folder, seed, display_for):
                return None
            continue
        recipe = find_recipe(stage.preset, {"seed": seed, **in_folder(stage.changes, folder)})
        act = api.resume if begun else partial(api.start, recipe)
        try:
            act(folder / stage.name, display=display_for(recipe, folder / stage.name))
        except Interrupted as stop:
            stop.args = (f"{stop}; or repeat this command, which goes on with all stages",)
            raise

    def reported() -> dict[str, Any] | None:
        report = demo.report(folder, seed, started)
        if report is not None:
            write_text(folder / REPORT, json.dumps(report, indent=1))
        return report

    return on_first(reported)


def _begin(stage: Stage, folder: Path, seed: int, first: bool) -> bool | None:
    """Print the line of a stage, and write its files if it has not begun; whether it has, None if it is finished.

    Raises SurefootError if it has begun with another seed, or is no run of this stage.
    """
    run = folder / stage.name
    begun = bool(stage.preset) and (run / "config.toml").is_file()
    if begun:
        before, preset = read_toml(run / "config.toml"), presets()[stage.preset]
        if any(before.get(name) != preset.get(name) for name in ("kind", "task") if name in preset):
            raise SurefootError(f"{run}: is a run of something else; choose another --run-dir")
        if before["seed"] != seed:
            raise SurefootError(
                f"seed={seed}: {folder} was begun with {before['seed']}; repeat that, or choose another --run-dir"
            )
        reached = max((int(each.name) for each in checkpoints_in(run / "checkpoints")), default=0)
        if (run / FINISHED).is_file() or ("kind" not in preset and reached >= before["steps"]):
            return None
    if stage.line:
        print("\n" * (not first) + stage.line, end="\n\n", flush=True)
    if not begun:
        stage.prepare(folder, seed)
    return begun


def in_folder(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A table whose texts that begin with ``./`` are paths in a folder."""

    def placed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return in_folder(value, folder)
        if isinstance(value, list):
            return [placed(part) for part in value]
        return str(folder / value) if isinstance(value, str) and value.startswith("./") else value

    return {name: placed(value) for name, value in table.items()}


def free_folder(run_dir: Path, name: str) -> Path:
    """``run_dir/name``, or ``name-2`` and so on if a demo has finished there: one that was stopped goes on."""
    folder, number = run_dir / name, 2
    while (folder / REPORT).exists():
        folder, number = run_dir / f"{name}-{number}", number + 1
    return folder


def command_here() -> str:
    """The command to type for ``surefoot``: its path if the shell doesn't find the name, as after ``make demo``."""
    called = Path(sys.argv[0])
    return "surefoot" if called.name != "surefoot" or shutil.which("surefoot") else visible(str(called))
