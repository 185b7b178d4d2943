"""Climb the ladder: the six algorithms on CartPole-v1, each one switch above the one before.

    python examples/ladder.py --steps 20000

All six share seed, network, learning rate and discount. On a small budget some rungs learn little; the
four lowest make one update per batch.
"""

import argparse
from dataclasses import replace

import surefoot

REUSE = surefoot.Reuse(epochs=10, minibatches=4)
SETTINGS = {"rollout": {"environments": 8, "steps": 32}, "optimizer": {"learning_rate": 1e-3}, "evaluation": {"episodes": 0}}


def rung(algorithm: surefoot.Objective) -> surefoot.Objective:
    """The rung with this task's discount, and with the same reuse for every rung that reuses its batches."""
    return replace(algorithm, gamma=0.98, reuse=REUSE if algorithm.reuse else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_500, help="environment steps for each of the six")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    names = {algorithm: name for name, algorithm in surefoot.ALGORITHMS.items()}
    print(f"{'algorithm':<20}{'updates':>9}{'return, last 100':>18}{'largest ratio':>15}")
    for algorithm in surefoot.LADDER:
        rows: list[dict[str, float | None]] = []
        surefoot.train("CartPole-v1", rung(algorithm), steps=args.steps, seed=args.seed, callback=rows.append, **SETTINGS)
        largest = max(row["ratio_max"] for row in rows)
        print(f"{names[algorithm]:<20}{rows[-1]['updates']:>9,}{rows[-1]['episode_return']:>18.1f}{largest:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
