"""Best-of-n distillation: of n answers to a prompt, the model learns the one with the largest reward.

python examples/own_loop_best_of_n.py --steps 4096
"""

import argparse
from dataclasses import replace

import torch

import surefoot


def digits(prompts: list[str], responses: list[str]) -> list[float]:
    """The share of digits."""
    return [sum(c.isdigit() for c in response) / max(1, len(response)) for response in responses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4096)
    args = parser.parse_args()

    prompts = [{"prompt": f"{n} plus {n} is "} for n in range(100)]
    loop = surefoot.Loop(
        "language", surefoot.GRPO, model="pocket", data=prompts, reward=digits, steps=args.steps, seed=1,
        sampling={"prompts": 16, "samples": 8, "max_tokens": 16}, optimizer={"learning_rate": 1e-3}, reference={"beta": 0.0},
    )  # fmt: skip
    while not loop.done:
        rollout = loop.collect()
        scores = (rollout.rewards * rollout.mask).sum(-1)
        best = torch.zeros_like(scores, dtype=torch.bool)
        for group in rollout.group.unique():
            best[torch.where(rollout.group == group, scores, -torch.inf).argmax()] = True
        kept = rollout.mask & best.unsqueeze(-1)
        ones = kept.to(scores.dtype)  # advantage 1 for the best, no other is trained: cross-entropy, as in SFT
        loop.update(replace(rollout, mask=kept), surefoot.Credit(ones, ones))
        print(f"step {loop.state.steps:,}: mean {scores.mean():.3f}, best of {len(scores) // 16} {scores[best].mean():.3f}")


if __name__ == "__main__":
    main()
