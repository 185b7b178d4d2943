"""``surefoot demo``: a real agent learns CartPole-v1 while one watches."""

import time
from pathlib import Path

from surefoot.demos.stages import DisplayFor, command_here, free_folder
from surefoot.recipes.presets import find_recipe

SOLVED = 475.0
"""the return at which CartPole-v1 counts as solved (Gymnasium's reward threshold)"""


def control_demo(run_dir: Path, seed: int, display_for: DisplayFor) -> None:
    """Train, judge over 20 greedy episodes, and say what to try next."""
    from surefoot.runs import api
    from surefoot.runs.trackers.metrics_jsonl import read_metrics

    recipe = find_recipe("cartpole", {"seed": seed})
    folder = free_folder(run_dir, "demo")
    begun = time.monotonic()
    api.start(recipe, folder, display=display_for(recipe, folder))
    seconds = time.monotonic() - begun
    result = api.evaluate(api.load(folder), episodes=20, seed=seed)
    verdict = "reached" if result.mean_return >= SOLVED else "NOT reached"
    print()
    print(f"CartPole-v1: greedy return {result.mean_return:.1f} ± {result.std_return:.1f} over 20 episodes.")
    steps = read_metrics(folder / "metrics.jsonl")[-1]["steps"]
    print(f"{SOLVED:.0f} was {verdict}, with {steps:,} steps in {seconds:.0f} s. The run is in {folder}/")
    here = command_here()
    print("Try next:")
    print(f"  {here} inspect {folder}                         # every step and its arithmetic, in a browser")
    print(f"  {here} evaluate {folder} --episodes 100 --json")
    print(f"  {here} train CartPole-v1 --algorithm REINFORCE     # the same task without PPO's five fixes")
    print(f"  {here} train Acrobot-v1 --name swing               # a harder one; kill it, then: {here} resume runs/swing")
