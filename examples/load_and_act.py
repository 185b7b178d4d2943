"""Save an agent, load it as another program would, and step an environment by hand.

    python examples/load_and_act.py

`surefoot.load` also reads a run's folder (its best checkpoint, else its latest) or one checkpoint in it.
"""

import argparse
import tempfile
from pathlib import Path

import gymnasium

import surefoot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3_000)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        surefoot.train("CartPole-v1", steps=args.steps, seed=1).save(Path(folder) / "agent")
        agent = surefoot.load(Path(folder) / "agent")

    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=7)
    total, over = 0.0, False
    print(f"V at the start: {agent.value(observation):.2f} (discounted, γ = {agent.recipe.objective.gamma})")
    while not over:
        action, _ = agent.predict(observation, deterministic=True)
        observation, reward, terminated, truncated, _ = environment.step(action)
        total += float(reward)
        over = terminated or truncated
    print(f"return of one greedy episode: {total:.0f}")
    environment.close()


if __name__ == "__main__":
    main()
