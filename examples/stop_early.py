"""A callback gets the metrics of every iteration and may stop the run by returning True.

    python examples/stop_early.py --target 200 --steps 100000

The run is written to a folder. The stop is saved like any other end, so `surefoot resume` can continue it.
"""

import argparse
from pathlib import Path

import surefoot


class StopAt:
    """Stop once the mean return of the last 100 training episodes reaches a target."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.reached: int | None = None

    def __call__(self, metrics: dict[str, float | None]) -> bool:
        score = metrics["episode_return"]
        if score is not None and score >= self.target:
            self.reached = int(metrics["steps"])
        return self.reached is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/stop-early"))
    args = parser.parse_args()

    stop = StopAt(args.target)
    surefoot.train("CartPole-v1", steps=args.steps, seed=1, run_dir=args.run_dir, callback=stop)
    if stop.reached is None:
        print(f"{args.target:g} was not reached within {args.steps:,} steps")
    else:
        print(f"{args.target:g} was reached after {stop.reached:,} steps; continue with: surefoot resume {args.run_dir}")


if __name__ == "__main__":
    main()
