"""``surefoot demo``: the demo of control, and what the demos share. Each stage of a demo is an ordinary run."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.recipes.base import Recipe
from surefoot.recipes.presets import find_recipe
from surefoot.terminal import visible

if TYPE_CHECKING:
    from surefoot.store.events import Listener

SOLVED = 475.0
"""the return at which CartPole-v1 counts as solved (Gymnasium's reward threshold)"""
DisplayFor = Callable[[Recipe, Path], "Listener"]


@dataclass(frozen=True)
class Stages:
    """The runs of a demo, one after the other, each in its own folder inside ``folder``.

    seed          of every stage
    display_for   makes the display of a run from its recipe and folder
    """

    folder: Path
    seed: int
    display_for: DisplayFor
    started: float = field(default_factory=time.monotonic)

    def run(self, name: str, recipe: str, changes: Mapping[str, Any]) -> Path:
        """Train a preset with some changes; returns the run's folder."""
        from surefoot.runs import api

        resolved, folder = find_recipe(recipe, {"seed": self.seed, **changes}), self.folder / name
        print(flush=True)
        api.start(resolved, folder, display=self.display_for(resolved, folder))
        return folder

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the demo began."""
        return time.monotonic() - self.started


def free_folder(run_dir: Path, name: str) -> Path:
    """``run_dir/name``, or ``name-2`` and so on if that exists: no demo writes into another's folder."""
    from surefoot.ranks.collectives import on_first

    def free() -> Path:
        folder, number = run_dir / name, 2
        while folder.exists():
            folder, number = run_dir / f"{name}-{number}", number + 1
        return folder

    return on_first(free)


def command_here() -> str:
    """The command to type for ``surefoot``: its path if the shell doesn't find the name, as after ``make demo``."""
    called = Path(sys.argv[0])
    return "surefoot" if called.name != "surefoot" or shutil.which("surefoot") else visible(str(called))


def control_demo(run_dir: Path, seed: int, display_for: DisplayFor) -> None:
    """Train on CartPole-v1, evaluate over 20 greedy episodes, and print what to try next."""
    from surefoot.ranks.collectives import on_first
    from surefoot.runs import api
    from surefoot.store.metrics import read_metrics

    recipe = find_recipe("cartpole", {"seed": seed})
    folder = free_folder(run_dir, "demo")
    started = time.monotonic()
    api.start(recipe, folder, display=display_for(recipe, folder))
    seconds = time.monotonic() - started
    result = on_first(lambda: api.evaluate(api.load(folder), episodes=20, seed=seed))
    shown = visible(str(folder))
    verdict = "solved" if result.mean_return >= SOLVED else "NOT solved"
    print()
    scored = f"greedy return {result.mean_return:.1f} ± {result.std_return:.1f} over 20 episodes"
    print(f"CartPole-v1: {scored}; {verdict} ({SOLVED:.0f} or more).")
    rows = on_first(lambda: read_metrics(folder / "metrics.jsonl"))
    steps, returns = rows[-1]["steps"], [row["episode_return"] for row in rows if row["episode_return"] is not None]
    print(f"Training return: first {returns[0]:.1f}, best {max(returns):.1f}, last {returns[-1]:.1f}.")
    print(f"{steps:,} steps in {seconds:.0f} s; the run is in {shown}/")
    here = command_here()
    print("Try next:")
    print(f"  {here} inspect {shown}                         # every step and its arithmetic, in a browser")
    print(f"  {here} evaluate {shown} --episodes 100 --json")
    print(f"  {here} train CartPole-v1 --algorithm REINFORCE     # the same task without PPO's five fixes")
    print(f"  {here} train Acrobot-v1 --name swing               # a harder one; kill it, then: {here} resume runs/swing")
