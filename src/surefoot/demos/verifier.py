"""``surefoot demo verifier``: SFT on partly wrong demonstrations, then PPO and GRPO with a verifier as reward.

Every stage is an ordinary run from files that stay in the folder, so you can repeat each by hand.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.core.seeding import derived_seed
from surefoot.demos import Demo, Stage, command_here
from surefoot.errors import require_package
from surefoot.language import tasks
from surefoot.language.data.rows import write_rows
from surefoot.language.data.sources import read_rows
from surefoot.language.language_model import load_language_model
from surefoot.terminal import visible

TASK = "sorting"
SAMPLES = 8
"""attempts at each test problem, and answers that GRPO compares"""
LINES = (
    ("greedy_accuracy", "greedy accuracy"),
    ("sampled_accuracy", "sampled accuracy"),
    (str(SAMPLES), f"one of {SAMPLES} is right"),
    ("majority_accuracy", f"majority of {SAMPLES}"),
)


@dataclass(frozen=True)
class Sizes:
    """The number of rows of each file; every demonstration and training problem is used once."""

    demonstrations: int = 24_000
    problems: int = 10_240
    validation: int = 256
    test: int = 512


SIZES = Sizes()


def demo(sizes: Sizes = SIZES) -> Demo:
    """SFT, then PPO and GRPO from there. Raises SurefootError without ``transformers``."""
    require_package("transformers", "language", "demo verifier")  # before anything is written
    lines = (
        "1/3 SFT: a small model learns to sort five digits from demonstrations that often leave the last one in place.",
        "2/3 PPO: a program checks each answer; a critic estimates the expected reward.",
        f"3/3 GRPO: the same program, without a critic; {SAMPLES} answers to the same problem are compared.",
    )
    presets, rows = ("task_sft", "sorting"), (sizes.demonstrations, sizes.problems)
    write = partial(write_data, task=TASK, sizes=sizes)
    return Demo("demo-verifier", sft_then_online(presets, lines, rows, write, in_groups("GRPO")), report)


def sft_then_online(
    presets: tuple[str, str], lines: Sequence[str], rows: tuple[int, int], write: Callable[..., None], groups: dict[str, Any]
) -> tuple[Stage, ...]:
    """SFT, then PPO from there, and GRPO from there with the changes ``groups``.

    presets   of SFT, and of the other two
    lines     printed before each stage
    rows      demonstrations, and problems of each online stage
    write     writes the files of all stages into a folder for a ``seed``
    """
    sft, problem = presets
    files = {"train": "./data/problems.jsonl", "held_out": "./data/validation.jsonl"}
    online = {"model": "./sft", "steps": rows[1], "data": files}
    shown = {"steps": rows[0], "data": {"train": "./data/demonstrations.jsonl"}}
    return (
        Stage(sft, "sft", lines[0], lambda folder, seed: write(folder / "data", seed=seed), shown),
        Stage(problem, "ppo", lines[1], changes=online),
        Stage(problem, "grpo", lines[2], changes={**online, **groups}),
    )


def in_groups(algorithm: str) -> dict[str, Any]:
    """The recipe changes for an algorithm that compares answers, with as many responses per iteration as PPO."""
    return {"algorithm": algorithm, "sampling": {"prompts": 256 // SAMPLES, "samples": SAMPLES}}


def write_data(folder: Path, task: str, seed: int, sizes: Sizes) -> None:
    """Write demonstrations and problems for training, validation problems (they choose the best checkpoint) and a test set.

    The last three share no problem, not even in another order of its digits, and no held-out problem is in a demonstration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "demonstrations.jsonl", tasks.demonstrations(task, sizes.demonstrations, seed))
    write_rows(folder / "problems.jsonl", tasks.rows(task, sizes.problems, seed + 1))
    key = tasks.get_task(task).key
    held_out = tasks.rows(task, 3 * max(sizes.test, 2 * sizes.validation), seed, test=True)
    validates = [derived_seed("validation", key(row)) % 3 == 0 for row in held_out]
    for name, side, count in (("validation", True, sizes.validation), ("test", False, sizes.test)):
        write_rows(folder / f"{name}.jsonl", [row for row, of in zip(held_out, validates, strict=True) if of is side][:count])


def attempts_at(run: Path, test: Path) -> dict[str, Any]:
    """How often a run and its start solve the test problems, greedily and in several samples: {"start", "trained"}."""
    from surefoot.language.analysis.accuracy import Attempts
    from surefoot.language.analysis.evaluate import evaluate_run

    rows = len(read_rows(test))
    report: dict[str, Any] = evaluate_run(run, data=str(test), rows=rows, attempts=Attempts(SAMPLES, (1, SAMPLES)))["attempts"]
    return report


def report(folder: Path, seed: int, started: float) -> dict[str, Any]:
    """Print SFT and the trained models on unseen problems, some answers, and what to try next."""
    test, runs = folder / "data" / "test.jsonl", {"PPO": folder / "ppo", "GRPO": folder / "grpo"}
    results: dict[str, Any] = {}
    for name, run in runs.items():
        report = attempts_at(run, test)
        results |= {"SFT": report["start"], name: report["trained"]}
    rows = [row.columns for row in read_rows(test)]
    print(f"\n{f'{len(rows)} problems of unseen digits':30}" + "".join(f"{name:>8}" for name in results))
    for line, label in LINES:
        shares = (of["pass_at"][line] if line.isdigit() else of[line] for of in results.values())
        print(f"{label:30}" + "".join(f"{share:>8.1%}" for share in shares))
    print(f"{time.monotonic() - started:.0f} s in total; the runs are in {visible(str(folder))}/\n")
    shown = rows[:6]
    prompts = [row["prompt"] for row in shown]
    models = {"SFT": folder / "sft", **runs}
    responses = {
        name: load_language_model(str(run)).generate(prompts, max_tokens=8, greedy=True) for name, run in models.items()
    }
    columns = {name: [row[name] for row in shown] for name in ("answer", "task")}
    right = {name: tasks.verify(prompts, answers, **columns) for name, answers in responses.items()}
    for number, prompt in enumerate(prompts):
        answers = (f"{name}: {responses[name][number]:8} {'right' if right[name][number] else 'wrong'}" for name in models)
        print(f"  {prompt}   " + "    ".join(answers))
    likely, able = results["SFT"]["sampled_accuracy"], results["SFT"]["pass_at"][str(SAMPLES)]
    print(
        f"\nTraining makes right answers that the model already samples more likely: at first {likely:.0%} of samples were\n"
        f"right, and at least one of {SAMPLES} on {able:.0%} of the problems. If none is right, a verifier rewards nothing."
    )
    here, (ppo, shown_folder) = command_here(), (visible(str(path)) for path in (runs["PPO"], folder))
    print("\nTry next:")
    print(f"  {here} inspect {ppo}       # every token and its arithmetic, in a browser")
    print(f"  {here} generate {ppo} --prompt '52814=' --samples 5")
    print(f"  {here} evaluate {ppo} --data {shown_folder}/data/test.jsonl --samples {SAMPLES}")
    print(f"  {here} train sorting --algorithm DAPO --sampling.prompts 32 --model {shown_folder}/sft \\")
    print(f"    --data.train {shown_folder}/data/problems.jsonl --data.held-out {shown_folder}/data/validation.jsonl")
    return {"seconds": time.monotonic() - started, **results}
