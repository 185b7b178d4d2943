"""REINFORCE by hand: the loss in four lines, on steps that the library samples.

python examples/own_loop_reinforce.py --steps 40000
"""

import argparse

import torch

import surefoot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40_000)
    args = parser.parse_args()

    loop = surefoot.Loop("CartPole-v1", surefoot.REINFORCE, steps=args.steps, seed=1)
    optimizer = torch.optim.Adam(loop.policy.parameters(), lr=3e-3)
    while not loop.done:
        rollout = loop.collect()
        ended = rollout.terminated | rollout.truncated
        returns, after = torch.zeros_like(rollout.rewards), torch.zeros(len(rollout.rewards))
        for t in reversed(range(returns.shape[1])):  # R_t = r_t + γ R_{t+1}, within an episode
            returns[:, t] = after = rollout.rewards[:, t] + 0.99 * after * ~ended[:, t]
        advantages = (returns - returns.mean()) / returns.std()
        log_probs = loop.policy(rollout.inputs, rollout.actions, rollout.mask).log_probs
        loss = -(log_probs * advantages)[rollout.mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.count(rollout)
    print(f"mean return {surefoot.evaluate(loop.result, episodes=20).mean_return:.0f} after {loop.state.steps:,} steps")


if __name__ == "__main__":
    main()
