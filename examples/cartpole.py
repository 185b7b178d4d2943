"""Train PPO on CartPole-v1, print a few metrics during training, and evaluate the agent.

    python examples/cartpole.py --steps 100000

The default budget is small, so the script ends in seconds; the tuned recipe uses 100,000 steps.
"""

import argparse

import surefoot


def show(metrics: dict[str, float | None]) -> None:
    """Print a line every ten iterations. The run continues, because the callback returns nothing."""
    if metrics["iteration"] % 10 == 0 and metrics["episode_return"] is not None:
        print(f"{metrics['steps']:>7,} steps   return {metrics['episode_return']:6.1f}   kl {metrics['kl']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    agent = surefoot.train("CartPole-v1", surefoot.PPO_CLIP, steps=args.steps, seed=args.seed, callback=show)
    result = surefoot.evaluate(agent, episodes=10, seed=0)
    print(f"greedy return {result.mean_return:.1f} ± {result.std_return:.1f} over {result.episodes} episodes")


if __name__ == "__main__":
    main()
