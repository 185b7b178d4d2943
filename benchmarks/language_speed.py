"""Rows per second of PPO, GRPO, SFT and DPO beside TRL: the same 2.0 M-parameter Llama, alternately, on one core, with scores.

    taskset -c 0 python benchmarks/language_speed.py run --ppo TRL112/bin/python --trl TRL/bin/python --rounds 5
    python benchmarks/language_speed.py table

Each round trains every cell once, Surefoot and TRL by turns, each in a process of its own with one torch thread. A first
training of one iteration warms up; the second is timed from its start to its last update, without loading models. For DPO that
includes the reference's log-probabilities: Surefoot computes them once for each row, TRL in each step. Finished cells (lines
of benchmarks/results/language_speed.jsonl) are skipped. Run it on an otherwise idle machine; elsewhere compare CPU time:
``--clock cpu``.

The models have random weights and learn at 1e-5, so that all do the same work: PPO 64 episodes of 48 tokens, 4 epochs of one
minibatch, with a policy, a critic, a reference and a reward model; GRPO 8 prompts x 8 responses of 48 tokens, one update; SFT
32 rows of 64 tokens; DPO 32 pairs of 64 tokens. The scores are means over the iterations of a cell: of the reward in PPO and
GRPO, of the loss in SFT and DPO.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import finished, read, write

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "language_speed"
PAGE = HERE.parent / "docs" / "benchmarks" / "language.md"
BEGIN, END = "<!-- begin: benchmarks/language_speed.py -->\n", "\n<!-- end: benchmarks/language_speed.py -->"
ROWS = {"ppo": 64, "grpo": 64, "sft": 32, "dpo": 32}
"""rows of an iteration"""
ONLINE: dict[str, Any] = {"data": {"max_length": 64}, "reference": {"beta": 0.05}}
PPO: dict[str, Any] = {
    **ONLINE,
    "kind": "language",
    "sampling": {"prompts": 64, "max_tokens": 48},
    "objective": {"reuse": {"epochs": 4, "minibatches": 1}, "value_coefficient": 0.1},
}
GRPO: dict[str, Any] = {
    **ONLINE,
    "kind": "language",
    "algorithm": "GRPO",
    "reference": {"beta": 0.0},
    "sampling": {"prompts": 8, "samples": 8, "max_tokens": 48},
    "objective": {"reuse": {"epochs": 1, "minibatches": 1}, "reference_coefficient": 0.0},
}
SFT: dict[str, Any] = {"kind": "sft", "data": {"max_length": 128, "batch": 32}}
DPO: dict[str, Any] = {"kind": "dpo", "data": {"max_length": 128, "batch": 32}, "reference": {"beta": 0.1}}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo, own critic": {**PPO, "critic": {"own_model": True}},
    "ppo, shared trunk": PPO,
    "grpo": GRPO,
    "sft": SFT,
    "dpo": DPO,
}
"""the settings of each cell of Surefoot"""
BF16 = {f"{name}, bf16": {**settings, "precision": "bfloat16"} for name, settings in SETTINGS.items()}
"""the same with matrix products in bfloat16, which TRL's cell does not use"""
SCORE = {"ppo": "reward", "grpo": "reward", "sft": "policy_loss", "dpo": "policy_loss"}


def make_work(folder: Path) -> None:
    """The model, the reward model and the rows that both libraries read."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from surefoot.language.models.pocket import ALPHABET, character_tokenizer

    tokenizer = character_tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "intermediate_size": 560,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    print(f"the model has {sum(p.numel() for p in model.parameters()):,} parameters")
    scorer = LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=1))
    for name, made in (("model", model), ("reward", scorer)):
        made.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    draw = random.Random(1)

    def text(length: int) -> str:
        return "".join(draw.choice(ALPHABET[:62]) for _ in range(length))

    tables = {
        "prompts": [{"prompt": text(16)} for _ in range(2048)],
        "texts": [{"text": text(63)} for _ in range(2048)],
        "pairs": [{"prompt": text(16), "chosen": text(47), "rejected": text(47)} for _ in range(2048)],
    }
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text("def distinct(responses):\n    return [float(len(set(text))) for text in responses]\n")


def surefoot_cell(cell: str, work: Path, iterations: int, seed: int) -> dict[str, Any]:
    """Train twice with Surefoot in this process; the second training is timed."""
    import time

    import surefoot

    settings = (SETTINGS | BF16)[cell]
    kind, what = settings["kind"], cell.split(",")[0]
    file = {"ppo": "prompts", "grpo": "prompts", "sft": "texts", "dpo": "pairs"}[what]
    settings = {name: value for name, value in settings.items() if name != "kind"}
    settings |= {"data": {**settings["data"], "train": str(work / f"{file}.jsonl")}, "model": str(work / "model")}
    settings |= {"optimizer": {"learning_rate": 1e-5, "max_grad_norm": 1.0}, "traces": {"rows": 0}, "run_dir": None}
    if kind == "language":
        term = {"model": str(work / "reward")} if what == "ppo" else {"function": f"{work}/rewards.py:distinct"}
        settings["reward"] = {"terms": [term], "missing_eos": None}
    times: list[tuple[float, float]] = []
    scores: list[float] = []

    class Clock(surefoot.Callback):
        def on_start(self, run: Any) -> None:
            times.append((time.perf_counter(), time.process_time()))

        def on_iteration(self, run: Any, metrics: dict[str, Any]) -> None:
            times.append((time.perf_counter(), time.process_time()))
            scores.append(metrics[SCORE[what]])

    for count in (1, iterations):
        times, scores = [], []
        steps = count * ROWS[what]
        surefoot.train(kind, steps=steps, seed=seed, callbacks=[Clock()], display=None, evaluation={"rows": 0}, **settings)
    wall, cpu = (after - before for after, before in zip(times[-1], times[0], strict=True))
    return {"version": surefoot.__version__, "seconds": wall, "cpu_seconds": cpu, "scores": scores}


def run_cell(cell: str, library: str, python: str, work: Path, iterations: int, seed: int) -> None:
    """Train a cell in a fresh Python, unless it is finished."""
    path = RESULTS / f"{cell.replace(', ', '-').replace(' ', '-')}-{library}-{seed}"
    if finished(path):
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cell.json"
        if library == "trl":
            what = cell.split(",")[0]
            command = [python, str(HERE / "peers" / "trl_cell.py"), "--what", what, "--work", str(work), "--out", str(out)]
        else:
            command = [sys.executable, __file__, "cell", "--cell", cell, "--work", str(work), "--out", str(out)]
        command += ["--iterations", str(iterations), "--seed", str(seed)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(out.read_text())
    write(path, {**result, "work": cell, "library": library, "seed": seed, "iterations": iterations})
    print(f"{cell}, {library}, round {seed}: {result['seconds']:.1f} s", flush=True)


def table(clock: str) -> str:
    """The rates and ratios of all finished rounds."""
    from surefoot.compare.statistics import markdown_table

    cells = {(one["work"], one["library"], one["seed"]): one for one in read(RESULTS).values()}
    name = "seconds" if clock == "wall" else "cpu_seconds"
    lines = []
    for cell in (*SETTINGS, *BF16):
        what = cell.split(",")[0]
        both = [seed for (c, library, seed) in cells if c == cell and library == "surefoot" and (what, "trl", seed) in cells]
        if not both:
            continue
        sides = [[cells[key] for key in ((cell, "surefoot", seed), (what, "trl", seed))] for seed in sorted(both)]
        rates = [[ROWS[what] * one["iterations"] / one[name] for one in pair] for pair in sides]
        ours, theirs = ([pair[side] for pair in rates] for side in (0, 1))
        ratios = [a / b for a, b in rates]
        scores = [statistics.mean(statistics.mean(pair[side]["scores"]) for pair in sides) for side in (0, 1)]
        spans = [f"{min(each):.1f}–{max(each):.1f}" for each in (ours, theirs)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        lines.append([cell, sides[0][1]["version"], *spans, spread, *(f"{score:.3f}" for score in scores), str(len(both))])
    head = ["work", "TRL", "Surefoot, rows/s", "TRL, rows/s", "ratio", "score, Surefoot", "score, TRL", "rounds"]
    return markdown_table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "cell"])
    parser.add_argument("--ppo", help="Python of an environment with TRL 1.12.0")
    parser.add_argument("--trl", help="Python of an environment with TRL 1.16.0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--cells", nargs="+", default=[*SETTINGS, *BF16], choices=[*SETTINGS, *BF16])
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--page", action="store_true", help="write the table into docs/benchmarks/language.md")
    for hidden in ("--cell", "--out", "--work"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "cell":
        Path(args.out).write_text(json.dumps(surefoot_cell(args.cell, Path(args.work), args.iterations, args.seed)))
        return
    if args.what == "run":
        if not (args.ppo and args.trl):
            parser.error("run needs --ppo and --trl, the Pythons of both versions of TRL")
        with tempfile.TemporaryDirectory() as folder:
            make_work(Path(folder))
            for seed in range(1, args.rounds + 1):
                for cell in args.cells:
                    what = cell.split(",")[0]
                    python = args.ppo if what == "ppo" else args.trl
                    shared = Path(folder), args.iterations * (1 if what in ("ppo", "grpo") else 4), seed
                    run_cell(cell, "surefoot", sys.executable, *shared)
                    run_cell(what, "trl", python, *shared)
    text = table(args.clock)
    if args.page:
        page = PAGE.read_text()
        PAGE.write_text(page[: page.index(BEGIN) + len(BEGIN)] + text + page[page.index(END) :])
    print(text)


if __name__ == "__main__":
    main()
