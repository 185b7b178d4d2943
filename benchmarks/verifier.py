"""Algorithms against a verifier, from one SFT start: cells (task x algorithm x seed), a line of JSON each.

    python benchmarks/verifier.py demo --seeds 1 2 3 4 5                  surefoot demo verifier, as a user runs it
    python benchmarks/verifier.py train --seeds 1 2 3                     all algorithms on sorting
    python benchmarks/verifier.py train --task addition --algorithms PPO_CLIP --seeds 1 2 3
    python benchmarks/verifier.py table                                   writes docs/benchmarks/verifier.md from all results

A finished cell is skipped and an interrupted one resumes, so repeat each command until all cells exist. Two commands with
different seeds may run at once. On sorting, each algorithm uses the better of two learning rates on the validation problems
of a seed that is not reported; those cells run first. All other settings are those of ``surefoot train
sorting --algorithm NAME``, with the same number of responses: 10,240. DPO trains on pairs of a right and a wrong answer from
the same number of samples of the start.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from record import read, write

from surefoot.compare.statistics import markdown_table
from surefoot.demos.verifier import Sizes, in_groups, write_data
from surefoot.language import tasks
from surefoot.language.analysis.best_of import BestOfSettings, best_of_n
from surefoot.language.data.rows import write_rows
from surefoot.language.data.sources import read_rows
from surefoot.language.language_model import load_language_model
from surefoot.language.metrics import pass_at_k
from surefoot.language.rewards.terms import load_flag_reward
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.runs.display import Display
from surefoot.store.metrics import read_metrics

HERE = Path(__file__).resolve().parent
RESULTS, RUNS, PAGE = (
    HERE / "results" / "verifier",
    HERE / "runs" / "verifier",
    HERE.parent / "docs" / "benchmarks" / "verifier.md",
)
GROUPS = ("RLOO", "GRPO", "DR_GRPO", "DAPO", "GSPO", "CISPO", "KL_COV", "ONLINE_DPO")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO_MASKED": ("GRPO", {"objective": {"reuse": {"epochs": 2, "minibatches": 4}, "drop_above_kl": 0.05}}),
    "ONLINE_DPO": ("ONLINE_DPO", {"sampling": {"prompts": 128, "samples": 2}}),
}
"""an algorithm in groups, and its other settings: eight updates per batch, in which θ leaves θ_old; two answers per pair"""
OFFLINE = ("DPO", "KTO", "SIMPO", "ORPO")
FAMILY = (
    *("PPO_CLIP", "GRPO", "REINFORCE_BASELINE", "A2C", "PPO_PENALTY", "RLOO", "DR_GRPO", "DAPO", "GSPO"),
    *("CISPO", "KL_COV", "REINFORCE_PLUS_PLUS", *VARIANTS, *OFFLINE, "PROCESS_REWARD"),
)
SECOND: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "ONLINE_DPO": ("objective", "pair_beta", (0.5, 2.0)),
    "KTO": ("reference", "beta", (0.1, 2.0)),
    "SIMPO": ("reference", "beta", (2.0, 10.0)),
}
"""a second setting to choose: section, name, values"""
OWN = {"A2C": {"objective": {"gae_lambda": 0.95, "value_coefficient": 0.5}}}
"""settings of an algorithm that differ from the preset's"""
RATES = {
    **dict.fromkeys(("SIMPO", "ORPO"), (1e-4,)),
    **dict.fromkeys(("DPO", "KTO"), (1e-4, 3e-4)),
    **dict.fromkeys((*VARIANTS, "KL_COV", "PROCESS_REWARD"), (3e-4,)),
}
"""learning rates to choose from, if not ``USUAL``; one where the smaller one was better for all others"""
USUAL = (3e-4, 1e-3)
TUNED_ON = 11
TAUGHT: dict[str, dict[str, Any]] = {"sorting": {}, "addition": {"steps": 240_000, "data": {"batch": 32}}}
"""changes to ``task_sft`` for a task's start: addition needs ten passes in small batches, not one"""
LAMBDA = 0.1
"""ORPO's λ, as in its paper"""
BETA = 2.0
"""DPO's β: with 0.1, samples on TUNED_ON's validation problems got worse than the start's, and with 0.5 they improved less"""
SAMPLES, PAIRED = 8, 4
"""attempts at a test problem; samples of the start per problem for DPO's pairs"""


def start(task: str, seed: int) -> Path:
    """The folder of a task and seed, with its data and the SFT run that is the start of all algorithms."""
    folder = RUNS / f"{task}-{seed}"
    if not (folder / "data" / "test.jsonl").exists():
        write_data(folder / "data", task, seed, Sizes())
    more = TAUGHT[task]
    data = {"train": str(folder / "data" / "demonstrations.jsonl"), **more.get("data", {})}
    finished(folder / "sft", "task_sft", {**more, "seed": seed, "data": data})
    return folder


def finished(run: Path, recipe: str, changes: dict[str, Any]) -> float | None:
    """Train, continue, or skip a finished run. Returns the user seconds of a complete run, None if only part of it ran here."""
    whole, started = not (run / "config.toml").exists(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    if whole:
        api.start(find_recipe(recipe, changes), run, display=Display())
    elif not (run / "finished.json").exists():
        api.resume(run)
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - started if whole else None


def cell(task: str, algorithm: str, seed: int, rate: float | None, second: float | None) -> dict[str, Any]:
    """Train one cell and evaluate it and its start on problems that no stage was trained on."""
    folder = start(task, seed)
    run, data = folder / "-".join(str(x) for x in (algorithm, rate, second) if x is not None), folder / "data"
    changes: dict[str, Any] = {"seed": seed, "model": str(folder / "sft")}
    if rate is not None:
        changes["optimizer"] = {"learning_rate": rate}
    if algorithm in OFFLINE:
        rows = answers(folder, seed) if algorithm == "KTO" else pairs(folder, seed)
        changes |= {"data": {"train": str(rows), "max_length": 24}, "preference": {"loss": algorithm.lower()}}
        changes |= {"steps": Sizes().problems, "reference": {"beta": LAMBDA if algorithm == "ORPO" else BETA}}
    elif algorithm == "PROCESS_REWARD":
        terms = [{"model": str(process_reward(folder, seed)), "per": "step", "separator": ""}]
        changes |= {"algorithm": "PPO_CLIP", "reward": {"terms": terms, "missing_eos": "penalty", "missing_eos_value": -5.0}}
        changes |= {"data": {"train": str(data / "problems.jsonl"), "held_out": str(data / "validation.jsonl")}}
    else:
        base, own = VARIANTS.get(algorithm, (algorithm, OWN.get(algorithm, {})))
        changes |= {"data": {"train": str(data / "problems.jsonl"), "held_out": str(data / "validation.jsonl")}}
        changes |= {**(in_groups(base) if base in GROUPS else {"algorithm": base}), **own}
    if second is not None:
        section, name, _ = SECOND[algorithm]
        changes[section] = {**changes.get(section, {}), name: second}
    seconds = finished(run, "dpo" if algorithm in OFFLINE else task, changes)
    metrics = read_metrics(run / "metrics.jsonl")
    return {
        "task": task,
        "algorithm": algorithm,
        "seed": seed,
        "learning_rate": rate,
        **({} if second is None else {SECOND[algorithm][1]: second}),
        "steps": metrics[-1]["steps"],
        "user_seconds": seconds,
        "validation": evaluated(run, data / "validation.jsonl", seed),
        "start": evaluated_start(folder, seed),
        "trained": evaluated(run, data / "test.jsonl", seed),
        "curve": [[row["steps"], row["reward"], row.get("held_out_reward")] for row in metrics if "reward" in row],
    }


def selected(folder: Path) -> list[dict[str, Any]]:
    """The problems to which the start gives ``PAIRED`` answers each; 10,240 in total."""
    return [row.columns for row in read_rows(folder / "data" / "problems.jsonl")[: Sizes().problems // PAIRED]]


def answers(folder: Path, seed: int) -> Path:
    """Write every one of those answers that ended, with its label."""
    path, rows = folder / "answers.jsonl", selected(folder)
    if not path.exists():
        rows = [row for row in rows for _ in range(PAIRED)]
        prompts = [row["prompt"] for row in rows]
        model = load_language_model(str(folder / "sft"))
        given, ended = model.generate_ended(prompts[::PAIRED], samples=PAIRED, max_tokens=8, seed=seed)
        columns = {name: [row[name] for row in rows] for name in ("answer", "task")}
        right = tasks.verify(prompts, given, **columns)
        labelled = zip(prompts, given, right, ended, strict=True)
        write_rows(path, [{"prompt": p, "completion": each, "label": x == 1} for p, each, x, whole in labelled if whole])
    return path


def process_reward(folder: Path, seed: int) -> Path:
    """The run of a reward model that learned from those answers which of their digits are right, from the same start."""
    path, run = folder / "steps.jsonl", folder / "process_reward"
    if not path.exists():
        sorted_digits = {row["prompt"]: row["answer"] for row in selected(folder)}
        rows = []
        for row in (row.columns for row in read_rows(answers(folder, seed))):
            digits, wanted = list(row["completion"]), sorted_digits[row["prompt"]]
            labels = [digit == wanted[place : place + 1] for place, digit in enumerate(digits)]
            if digits and not any(digit.isspace() for digit in digits):  # white space is no step
                rows.append({"prompt": row["prompt"], "completions": digits, "labels": labels})
        write_rows(path, rows)
    changes = {"model": str(folder / "sft"), "steps": Sizes().problems, "seed": seed, "optimizer": {"learning_rate": 1e-3}}
    preference = {"loss": "steps", "separator": ""}
    finished(run, "reward", {**changes, "data": {"train": str(path), "max_length": 24}, "preference": preference})
    return run


def pairs(folder: Path, seed: int) -> Path:
    """Write a right and a wrong of those answers per problem that has both."""
    path = folder / "pairs.jsonl"
    if path.exists():
        return path
    write_rows(folder / "selected.jsonl", selected(folder))
    drawing = BestOfSettings(PAIRED, max_tokens=8, seed=seed)
    kept = best_of_n(
        load_language_model(str(folder / "sft")),
        folder / "selected.jsonl",
        load_flag_reward(["surefoot.language.tasks:verify"]),
        drawing,
        worst=True,
    )
    write_rows(path, kept.rows)
    return path


@torch.no_grad()
def evaluated(run: Path, test: Path, seed: int) -> dict[str, float]:
    """Greedy and sampled accuracy and pass@8; a truncated answer is scored like any other."""
    model, rows = load_language_model(str(run)), [row.columns for row in read_rows(test)]

    def right(each: int, greedy: bool) -> torch.Tensor:
        repeated = [row for row in rows for _ in range(each)]
        prompts = [row["prompt"] for row in rows]
        responses = model.generate(prompts, samples=each, max_tokens=8, greedy=greedy, seed=seed)
        columns = {name: [row[name] for row in repeated] for name in ("answer", "task")}
        return torch.tensor(tasks.verify([row["prompt"] for row in repeated], responses, **columns)).view(-1, each)

    sampled = right(SAMPLES, greedy=False)
    return {
        "greedy": float(right(1, greedy=True).mean()),
        "sampled": float(sampled.mean()),
        "pass_at_8": float(pass_at_k(sampled.sum(-1).long(), SAMPLES, SAMPLES).mean()),
        "rows": len(rows),
    }


def evaluated_start(folder: Path, seed: int) -> dict[str, float]:
    """The start of a folder on its test problems, evaluated once."""
    path = folder / "start.json"
    if not path.exists():
        path.write_text(json.dumps(evaluated(folder / "sft", folder / "data" / "test.jsonl", seed)) + "\n", "utf-8")
    result: dict[str, float] = json.loads(path.read_text())
    return result


def made(task: str, algorithm: str, seed: int, rate: float | None, second: float | None) -> dict[str, Any]:
    """A cell's result, from its file or computed now."""
    chosen = () if seed != TUNED_ON else (rate, second)
    name = "-".join(str(x) for x in (algorithm, seed, *chosen) if x is not None)
    path = RESULTS / task / name
    if path.name not in read(path.parent):
        started, result = time.monotonic(), cell(task, algorithm, seed, rate, second)
        write(path, result)
        print(f"{task} {name}: greedy {result['trained']['greedy']:.3f} in {time.monotonic() - started:.0f} s", flush=True)
    return read(path.parent)[name]


def best_settings(task: str, algorithm: str) -> tuple[float | None, float | None]:
    """The rate and the second setting with most right samples on the validation problems of ``TUNED_ON``; None for addition,
    whose preset sets the rate.
    """
    if task != "sorting":
        return None, None
    _, name, values = SECOND.get(algorithm, ("", "", (None,)))
    settings = list(product(RATES.get(algorithm, USUAL), values))
    if len(settings) == 1:
        return settings[0]
    tried = [made(task, algorithm, TUNED_ON, *setting) for setting in settings]
    best = max(tried, key=lambda result: result["validation"]["sampled"])
    return best["learning_rate"], best.get(name)


def demo(seed: int) -> None:
    """Run ``surefoot demo verifier`` in its own process, and record its total user seconds."""
    path = RESULTS / "demo" / str(seed)
    if path.name in read(path.parent):
        return
    folder = RUNS / f"demo-{seed}-{time.time_ns()}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "surefoot", "demo", "verifier", "--seed", str(seed), "--run-dir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    demo = json.loads((folder / "demo-verifier" / "demo.json").read_text())
    write(path, {"seed": seed, "user_seconds": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, **demo})
    print(json.dumps(read(path.parent)[path.name]), flush=True)


def cells(folder: str) -> list[dict[str, Any]]:
    """The reported results: all but those of the seed that learning rates were chosen on."""
    return [result for result in read(RESULTS / folder).values() if result["seed"] != TUNED_ON]


def spread(values: list[float]) -> str:
    """The mean, and each value if there are several."""
    each = f" ({', '.join(f'{value:.3f}' for value in values)})" if len(values) > 1 else ""
    return f"{mean(values):.3f}{each}"


def demo_table() -> str:
    """One row per stage: mean and standard deviation over seeds (n − 1)."""
    lines = []
    for stage in ("SFT", "PPO", "GRPO"):
        found = [result[stage] for result in cells("demo")]
        columns = [[of["greedy_accuracy"], of["sampled_accuracy"], of["pass_at"]["8"]] for of in found]
        lines.append([stage, *(f"{mean(each):.3f} ± {stdev(each):.3f}" for each in zip(*columns, strict=True))])
    return markdown_table(["stage", "greedy", "sampled", "pass@8"], lines)


def family_table(task: str) -> Iterator[list[str]]:
    """One row per algorithm, below that of the start."""
    records = cells(task)
    starts = {result["seed"]: result["start"] for result in records}
    for algorithm in ("SFT", *FAMILY):
        results = [result for result in records if result["algorithm"] == algorithm]
        evaluated = list(starts.values()) if algorithm == "SFT" else [result["trained"] for result in results]
        if evaluated:
            rate = results[0]["learning_rate"] if results else None
            greedy, sampled = (spread([each[kind] for each in evaluated]) for kind in ("greedy", "sampled"))
            some = f"{mean(each['pass_at_8'] for each in evaluated):.3f}"
            name = SECOND.get(algorithm, ("", "", ()))[1]
            second = f", {name} {results[0][name]:g}" if name and results else ""
            yield [algorithm, f"{rate:g}{second}" if rate else "", greedy, sampled, some]


def write_page() -> None:
    """Write every table of the page that has results."""
    header = ["algorithm", "learning rate", "greedy (each seed)", "sampled (each seed)", "pass@8"]
    tables = {"demo": demo_table()} | {
        task: markdown_table(header, list(family_table(task))) for task in ("sorting", "addition")
    }
    text = PAGE.read_text("utf-8")
    for name, table in tables.items():
        begin, end = f"<!-- begin: {name} -->\n", "<!-- end -->"
        before, _, rest = text.partition(begin)
        if rest and cells(name):
            text = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["demo", "train", "table"])
    parser.add_argument("--task", choices=["sorting", "addition"], default="sorting")
    parser.add_argument("--algorithms", nargs="+", choices=FAMILY, default=FAMILY)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    if args.verb == "demo":
        for seed in args.seeds:
            demo(seed)
    elif args.verb == "train":
        for seed, algorithm in product(args.seeds, args.algorithms):
            made(args.task, algorithm, seed, *best_settings(args.task, algorithm))
    else:
        write_page()


if __name__ == "__main__":
    main()
