"""A curriculum: short episodes first, longer ones once the agent survives them. The agent and its optimizer's recipe stay.

python examples/own_loop_curriculum.py --steps 20000
"""

import argparse

import surefoot

LENGTHS = (50, 150, 500)
"""steps of an episode in each stage"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="at most, in each stage")
    args = parser.parse_args()

    agent = None
    for length in LENGTHS:
        loop = surefoot.Loop(
            "CartPole-v1", steps=args.steps, seed=length, environment={"max_episode_steps": length}, start=agent
        )
        reached = None
        while not loop.done and (reached or 0) < 0.9 * length:
            reached = loop.update(loop.collect())["episode_return"]
        agent = loop.result
        print(f"episodes of {length} steps: return {reached or 0:.0f} after {loop.state.steps:,} steps")
        loop.close()
    print(f"mean return {surefoot.evaluate(agent, 'CartPole-v1', episodes=20).mean_return:.0f}")


if __name__ == "__main__":
    main()
