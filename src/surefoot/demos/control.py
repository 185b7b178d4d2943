"""``surefoot demo control``: CartPole-v1 with PPO."""

import time
from pathlib import Path
from typing import Any

from surefoot.demos import Demo, Stage, command_here
from surefoot.terminal import visible

SOLVED = 475.0
"""the return at which CartPole-v1 counts as solved (Gymnasium's reward threshold)"""


def demo() -> Demo:
    """Train, evaluate over 20 greedy episodes, and print what to try next."""
    return Demo("demo", (Stage("cartpole"),), report)


def report(folder: Path, seed: int, started: float) -> dict[str, Any]:
    """Print the greedy return, and those of training."""
    from surefoot.runs import api
    from surefoot.store.metrics import read_metrics

    seconds = time.monotonic() - started
    result = api.evaluate(api.load(folder), episodes=20, seed=seed)
    shown = visible(str(folder))
    verdict = "solved" if result.mean_return >= SOLVED else "NOT solved"
    scored = f"greedy return {result.mean_return:.1f} ± {result.std_return:.1f} over 20 episodes"
    print(f"\nCartPole-v1: {scored}; {verdict} ({SOLVED:.0f} or more).")
    rows = read_metrics(folder / "metrics.jsonl")
    steps, returns = rows[-1]["steps"], [row["episode_return"] for row in rows if row["episode_return"] is not None]
    print(f"Training return: first {returns[0]:.1f}, best {max(returns):.1f}, last {returns[-1]:.1f}.")
    print(f"{steps:,} steps in {seconds:.0f} s; the run is in {shown}/")
    here = command_here()
    print("Try next:")
    print(f"  {here} inspect {shown}                         # every step and its arithmetic, in a browser")
    print(f"  {here} evaluate {shown} --episodes 100 --json")
    print(f"  {here} train CartPole-v1 --algorithm REINFORCE     # the same task without PPO's five fixes")
    print(f"  {here} train Acrobot-v1 --name swing               # a harder one; kill it, then: {here} resume runs/swing")
    return {"seconds": seconds, "return": result.mean_return}
