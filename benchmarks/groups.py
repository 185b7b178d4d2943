"""Time of updates on groups of responses: padded, end to end, and with each prompt read once for all its responses.

    taskset -c 0 python benchmarks/groups.py --rounds 3

GRPO's update of a 1.9 M-parameter Llama on 4 prompts with 8 responses each, with one thread, in micro-batches of at most 4,096
tokens. Responses have half to one and a half times their mean length. "padded" sorts rows by length, "end to end" reads every
row's prompt, and "prompts once" is ``padding_free = true``. For every ratio the three take turns, ``--rounds`` times, after an
update to warm up; times are CPU time. The norm is that of the last update's gradient: it shows that all take the same steps.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from padding import make_work

from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.language.data.batches import right_padded
from surefoot.language.models.loading import load_model
from surefoot.language.models.policy import LanguagePolicy
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner

WAYS = {"padded": False, "end to end": True, "prompts once": True}
RATIOS = {"1:4": (64, 256), "1:1": (160, 160), "4:1": (256, 64)}
"""tokens of a prompt, and of a response in the mean"""
PROMPTS, SAMPLES = 4, 8


def responses(prompt: int, response: int) -> Rollout:
    """Groups of responses with random tokens and rewards."""
    draw = torch.Generator().manual_seed(1)
    count = PROMPTS * SAMPLES
    prompts = torch.randint(2, 60, (PROMPTS, prompt), generator=draw).repeat_interleave(SAMPLES, 0)
    lengths = torch.randint(response // 2, response * 3 // 2 + 1, (count,), generator=draw).tolist()
    actions, mask = right_padded([torch.randint(2, 60, (length,), generator=draw).tolist() for length in lengths], 0)
    mask = mask.bool()
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    zeros = torch.zeros(mask.shape)
    return Rollout(
        inputs={"prompt": prompts, "prompt_mask": torch.ones_like(prompts, dtype=torch.bool)},
        actions=actions,
        mask=mask,
        old_log_probs=None,
        values=zeros,
        next_values=zeros,
        rewards=last * torch.rand(count, 1, generator=draw),
        terminated=last,
        truncated=torch.zeros_like(mask),
        unit="row",
        group=torch.arange(PROMPTS).repeat_interleave(SAMPLES),
    )


def update_of(way: str, work: Path, rollout: Rollout) -> Any:
    """A function that makes an update and returns its CPU seconds and the norm of its gradient."""
    table: dict[str, Any] = {"kind": "language", "model": str(work / "model"), "steps": 10_000, "algorithm": "GRPO"}
    table |= {"data": {"train": "unused.jsonl"}, "reward": {"terms": [{"function": "unused:unused"}]}}
    table |= {"sampling": {"prompts": PROMPTS, "samples": SAMPLES}}
    table["objective"] = {"reuse": {"epochs": 1, "minibatches": 1}, "reference_coefficient": 0}
    recipe: Any = make_recipe({**table, "optimizer": {"micro_batch_tokens": 4096, "learning_rate": 1e-5}})
    model, tokenizer = load_model(str(work / "model"))
    policy = LanguagePolicy(model, None, int(tokenizer.pad_token_id), padding_free=WAYS[way])
    policy.prompts_once = way == "prompts once"
    learner, state = make_learner(recipe, policy), LearnerState.seeded(1, recipe.steps)
    credit = assign_credit(rollout, recipe.objective)

    def update() -> tuple[float, float]:
        started = time.process_time()
        metrics = learner.update(rollout, credit, state)
        seconds, norm = time.process_time() - started, metrics["gradient_norm_policy"]
        assert norm is not None
        return seconds, norm

    return update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ratios", nargs="+", choices=RATIOS, default=list(RATIOS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| prompt : response | rows | seconds an update | beside padded | gradient norm |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_work(Path(folder))
        for ratio in args.ratios:
            rollout = responses(*RATIOS[ratio])
            updates = {way: update_of(way, Path(folder), rollout) for way in WAYS}
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for number in range(args.rounds + 1):
                for way, update in updates.items():
                    made = update()
                    found[way] += [made] if number else []
                    print(ratio, way, *made, file=sys.stderr, flush=True)
            for way, each in found.items():
                seconds = [one for one, _ in each]
                ratios = [a / b for (a, _), b in zip(found["padded"], seconds, strict=True)]
                times = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"
                beside = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
                print(f"| {ratio} | {way} | {times} | {beside} | {each[-1][1]:.5f} |", flush=True)


if __name__ == "__main__":
    main()
