"""Rewards of steps: PPO, which learns from each reward at its step, compared with GRPO, which learns from their sum.

    python benchmarks/dense.py                      8 and 20 digits, seeds 1 to 3; then docs/benchmarks/dense.md
    python benchmarks/dense.py --digits 8 --seeds 1 some of them
    python benchmarks/dense.py table                only writes the page

Each cell (digits, method, learning rate, seed) is a line in benchmarks/results/dense; an existing one is skipped. The
task is ``surefoot.language.tasks.successors``: replace each digit by its successor. The starting model has about half of
its digits right. For each seed, all methods start from the same model, use the same reward function and sample the same
number of responses.
"""

import argparse
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from record import finished, read, write

from surefoot.compare.statistics import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "benchmarks" / "dense.md", ROOT / "benchmarks" / "results" / "dense"
RESPONSES, BATCH, EVALUATIONS = 5_120, 128, 8
PPO: dict[str, Any] = {
    "algorithm": "PPO_CLIP",
    "sampling": {"prompts": BATCH, "samples": 1},
    "objective": {"gae_lambda": 0.95, "value_coefficient": 0.1},
}
METHODS: dict[str, dict[str, Any]] = {
    "PPO_CLIP": PPO,
    "PPO_CLIP, γ = 0": {**PPO, "objective": {**PPO["objective"], "gamma": 0.0}},
    "GRPO": {"algorithm": "GRPO", "sampling": {"prompts": BATCH // 8, "samples": 8}},
}
STEPS, WHOLE = "surefoot.language.tasks.successors:steps", "surefoot.language.tasks:verify"


def start(folder: Path, seed: int, digits: int) -> Path:
    """Train a model on demonstrations of a teacher that guesses every other digit."""
    import surefoot
    from surefoot.language import tasks
    from surefoot.language.data.rows import write_rows

    write_rows(folder / "demonstrations.jsonl", tasks.demonstrations("successors", 16_000, seed, digits, sloppy=1.0))
    write_rows(folder / "train.jsonl", tasks.rows("successors", 4_000, seed, digits))
    write_rows(folder / "test.jsonl", tasks.rows("successors", 256, seed, digits, test=True))
    surefoot.train(
        "sft",
        model="pocket",
        seed=seed,
        steps=16_000,
        run_dir=folder / "sft",
        data={"train": str(folder / "demonstrations.jsonl"), "max_length": 2 * digits + 16, "batch": 64},
        optimizer={"learning_rate": 2e-3, "schedule": "cosine"},
    )
    return folder / "sft"


def cell(folder: Path, sft: Path, method: str, seed: int, learning_rate: float, digits: int) -> dict[str, Any]:
    """Train one cell; returns held-out accuracy by steps and by whole answers, over the number of responses."""
    import surefoot
    from surefoot.store.metrics import read_metrics

    started = time.process_time()
    run = folder / named(method, learning_rate)
    surefoot.train(
        "language",
        METHODS[method]["algorithm"],
        model=str(sft),
        seed=seed,
        steps=RESPONSES,
        run_dir=run,
        data={"train": str(folder / "train.jsonl"), "held_out": str(folder / "test.jsonl"), "max_length": 2 * digits + 16},
        sampling={**METHODS[method]["sampling"], "max_tokens": digits + 2},
        reward={"terms": [{"function": STEPS, "weight": 1 / digits}], "missing_eos": "none", "gold": WHOLE},
        reference={"beta": 0.0},
        objective={**METHODS[method].get("objective", {}), "reuse": {"epochs": 1, "minibatches": 2}},
        optimizer={"learning_rate": learning_rate, "schedule": "linear"},
        evaluation={"rows": 256, "every": RESPONSES // EVALUATIONS},
    )
    evaluations = [row for row in read_metrics(run / "metrics.jsonl") if row.get("held_out_reward") is not None]
    curve = [[row["steps"], row["held_out_reward"], row["held_out_gold"]] for row in evaluations]
    return {
        "digits": digits,
        "method": method,
        "seed": seed,
        "learning_rate": learning_rate,
        "cpu_seconds": time.process_time() - started,
        "curve": curve,
    }


def named(method: str, learning_rate: float) -> str:
    """The part of a file name for a method and learning rate."""
    return f"{method.replace(', γ = ', '_gamma_')}-{learning_rate:g}"


def before(folder: Path, sft: Path, digits: int) -> dict[str, Any]:
    """Accuracy of the starting model's samples."""
    from surefoot.language.analysis.accuracy import measure_accuracy
    from surefoot.language.language_model import load_language_model
    from surefoot.language.rewards.terms import FunctionReward

    model, rows = load_language_model(str(sft)), folder / "test.jsonl"
    accuracies = [
        measure_accuracy(model, rows, FunctionReward(name, w), prompts=256, max_tokens=digits + 2)
        for name, w in ((STEPS, 1 / digits), (WHOLE, 1))
    ]
    return {"steps": accuracies[0].sampled, "whole": accuracies[1].sampled}


def fill(lengths: list[int], seeds: list[int], learning_rates: list[float]) -> None:
    """Run every missing cell."""
    for digits, seed in product(lengths, seeds):
        results = RESULTS / str(digits)
        chosen = {f"{named(method, rate)}-{seed}": (method, rate) for method in METHODS for rate in learning_rates}
        missing = {name: what for name, what in chosen.items() if not finished(results / name)}
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            sft = start(folder, seed, digits)
            began = before(folder, sft, digits)
            for name, (method, rate) in missing.items():
                result = cell(folder, sft, method, seed, rate, digits) | {"start": began}
                write(results / name, result)
                print(digits, name, began, result["curve"][-1], f"{result['cpu_seconds']:.0f} s", flush=True)


def spread(values: list[float]) -> str:
    """The mean, and each value."""
    return f"{mean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})"


def table() -> str:
    """One row per length, learning rate and method: means over seeds at the end, and each seed."""
    cells: dict[tuple[int, float, int], list[dict[str, Any]]] = {}
    for result in (result for file in sorted(RESULTS.glob("*.jsonl")) for result in read(file.with_suffix("")).values()):
        key = (result["digits"], -result["learning_rate"], list(METHODS).index(result["method"]))
        cells.setdefault(key, []).append(result)
    rows = []
    for (digits, rate, method), records in sorted(cells.items()):
        ends = [one["curve"][-1] for one in records]
        steps, whole = (spread([end[at] for end in ends]) for at in (1, 2))
        rows.append([str(digits), f"{-rate:g}", list(METHODS)[method], steps, whole])
    return markdown_table(["digits", "learning rate", "method", "steps (each seed)", "whole (each seed)"], rows)


def main() -> None:
    """Parse arguments, run missing cells, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "table"], default="all")
    parser.add_argument("--digits", type=int, nargs="+", default=[8, 20])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-3, 3e-4])
    args = parser.parse_args()
    if args.what == "all":
        fill(args.digits, args.seeds, args.learning_rates)
    text = PAGE.read_text("utf-8")
    begin, end = "<!-- begin: benchmarks/dense.py -->", "<!-- end -->"
    PAGE.write_text(f"{text.partition(begin)[0]}{begin}\n{table()}\n{end}{text.partition(end)[2]}", "utf-8")


if __name__ == "__main__":
    main()
