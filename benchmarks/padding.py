"""Time and memory of updates on rows of different lengths: padded, and end to end without padding.

    taskset -c 0 python benchmarks/padding.py --rounds 3

SFT and DPO of a 1.9 M-parameter Llama on rows of 20 to 400 tokens, 32 rows an update, with one thread. "padded" pads to the
longest row of the batch, "sorted" to the longest of a micro-batch of at most 4,096 tokens in rows of similar length.
"end to end" is ``padding_free = true``, and "one mask" the same with the mask of all tokens by all tokens that
``transformers`` makes. "compiled" is with ``engine = "compiled"``, whose programs are made in the update that warms up. Each
runs in a process of its own, ``--rounds`` times by turns: an update to warm up, then ``--updates`` that are timed, in CPU time.
Memory is the peak of the process above what it had before the first update. The loss is that of the last update.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "sorted": {"optimizer": {"micro_batch_tokens": 4096}},
    "end to end": {"padding_free": True},
    "end to end, micro-batches": {"padding_free": True, "optimizer": {"micro_batch_tokens": 4096}},
    "one mask": {"padding_free": True},
    "padded, compiled": {"engine": "compiled"},
    "end to end, compiled": {"engine": "compiled", "padding_free": True},
}
LENGTHS = (20, 400)
BATCH = 32


def make_work(folder: Path) -> None:
    """The model and the rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from surefoot.language.models.pocket import ALPHABET, character_tokenizer

    tokenizer = character_tokenizer(context=512)
    shape = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 560}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **shape, **ids))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(1)

    def text() -> str:
        return "".join(draw.choice(ALPHABET[:62]) for _ in range(draw.randint(*LENGTHS) - 1))

    tables = {
        "sft": [{"text": text()} for _ in range(512)],
        "dpo": [{"prompt": "a", "chosen": text()[1:], "rejected": text()[1:]} for _ in range(512)],
    }
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measured(kind: str, way: str, work: Path, updates: int) -> dict[str, float]:
    """CPU seconds and real tokens of the timed updates, peak memory in MB, and the loss of the last."""
    import torch

    from surefoot.core.credit import assign_credit
    from surefoot.core.rollout import LearnerState
    from surefoot.language.models.padding_free import Reading
    from surefoot.recipes.reading import make_recipe
    from surefoot.runs.factory import make_learner, make_world

    torch.set_num_threads(1)
    data = {"train": str(work / f"{kind}.jsonl"), "max_length": 512, "batch": BATCH}
    steps = BATCH * (updates + 1)
    recipe = make_recipe({"kind": kind, "model": str(work / "model"), "steps": steps, "data": data, **WAYS[way]})
    world = make_world(recipe)
    if way == "one mask":
        Reading.laid_out = lambda self: nullcontext()  # type: ignore[method-assign, assignment, return-value]
    learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, recipe.steps)
    rollouts = [world.collector.collect(state) for _ in range(updates + 1)]
    before, seconds, tokens, metrics = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0, 0.0, {}
    for number, rollout in enumerate(rollouts):
        credit, started = assign_credit(rollout, recipe.objective), time.process_time()
        metrics = learner.update(rollout, credit, state)
        if number:
            seconds += time.process_time() - started
            tokens += float(world.policy.costs(rollout.inputs, rollout.mask).sum())
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = metrics["policy_loss"]
    assert loss is not None
    return {"seconds": seconds, "tokens": tokens, "megabytes": (after - before) / 1e3, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", choices=["sft", "dpo"], default=["sft", "dpo"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    for hidden in ("--way", "--work"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measured(args.kinds[0], args.way, Path(args.work), args.updates)))
        return
    found: dict[tuple[str, str], list[dict[str, float]]] = {(kind, way): [] for kind in args.kinds for way in args.ways}
    with tempfile.TemporaryDirectory() as folder:
        make_work(Path(folder))
        for _ in range(args.rounds):
            for (kind, way), each in found.items():
                command = [sys.executable, __file__, "--kinds", kind, "--way", way, "--work", folder]
                command += ["--updates", str(args.updates)]
                each.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
                print(kind, way, each[-1], file=sys.stderr, flush=True)
    print("| kind | rows | tokens/s | beside padded | peak, MB | loss |")
    print("|---|---|---|---|---|---|")
    for (kind, way), each in found.items():
        rates = [one["tokens"] / one["seconds"] for one in each]
        first = [one["tokens"] / one["seconds"] for one in found[kind, args.ways[0]]]
        ratios = [a / b for a, b in zip(rates, first, strict=True)]
        peak, loss = (statistics.median(one[name] for one in each) for name in ("megabytes", "loss"))
        rate = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        print(f"| {kind} | {way} | {rate} | {ratio} | {peak:,.0f} | {loss:.5f} |")


if __name__ == "__main__":
    main()
