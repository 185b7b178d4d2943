"""``surefoot demo verifier``: SFT on a sloppy teacher's answers, then PPO and GRPO against a program that knows what is right.

Every stage is an ordinary run from files that stay in the folder, so each can be repeated by hand.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core.seeding import derived_seed
from surefoot.demos import DisplayFor, Stages, command_here, free_folder
from surefoot.files import write_text
from surefoot.language import tasks
from surefoot.language.data.rows import read_rows, write_rows
from surefoot.language.extras import require_transformers
from surefoot.language.models.language_model import load_language_model

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
    """How many rows there are of each; every demonstration and training problem is read once."""

    demonstrations: int = 24_000
    problems: int = 10_240
    validation: int = 256
    test: int = 512


def verifier_demo(run_dir: Path, seed: int, display_for: DisplayFor, sizes: Sizes | None = None) -> dict[str, Any]:
    """SFT, and from there PPO and GRPO with as many answers each: prints what came of them, and returns the numbers."""
    require_transformers("demo verifier")  # before anything is written
    sizes = sizes or Sizes()
    stages = Stages(free_folder(run_dir, "demo-verifier"), seed, display_for)
    data = stages.folder / "data"
    write_data(data, TASK, seed, sizes)
    print("1/3 SFT: a small model learns to sort five digits from a teacher who often leaves the last one where it was.")
    sft = stages.run("sft", "task_sft", {"steps": sizes.demonstrations, "data": {"train": str(data / "demonstrations.jsonl")}})
    print("\n2/3 PPO: a program says of each answer whether it is right; a critic tells what was to be expected.")
    online = {
        "model": str(sft),
        "steps": sizes.problems,
        "data": {"train": str(data / "problems.jsonl"), "held_out": str(data / "validation.jsonl")},
    }
    ppo = stages.run("ppo", "sorting", online)
    print(f"\n3/3 GRPO: the same program, without a critic; {SAMPLES} answers to one problem are compared.")
    grpo = stages.run("grpo", "sorting", {**online, **in_groups("GRPO")})
    told = compare(sft, {"PPO": ppo, "GRPO": grpo}, data / "test.jsonl", stages)
    write_text(stages.folder / "demo.json", json.dumps(told, indent=1))
    return told


def in_groups(algorithm: str, responses: int = 256) -> dict[str, Any]:
    """An algorithm that compares answers to one problem, at as many responses per iteration as PPO has."""
    return {"algorithm": algorithm, "sampling": {"prompts": responses // SAMPLES, "samples": SAMPLES}}


def write_data(folder: Path, task: str, seed: int, sizes: Sizes) -> None:
    """Demonstrations and problems to train on, problems that choose the best checkpoint, and problems that judge it.

    No problem is in two of the last three, in another order of its digits neither, nor is a held-out one demonstrated.
    """
    folder.mkdir(parents=True)
    write_rows(folder / "demonstrations.jsonl", tasks.demonstrations(task, sizes.demonstrations, seed))
    write_rows(folder / "problems.jsonl", tasks.rows(task, sizes.problems, seed + 1))
    key = tasks.find(task).key
    held_out = tasks.rows(task, 3 * max(sizes.test, 2 * sizes.validation), seed, test=True)
    chooses = [derived_seed("validation", key(row)) % 3 == 0 for row in held_out]
    for name, side, count in (("validation", True, sizes.validation), ("test", False, sizes.test)):
        write_rows(folder / f"{name}.jsonl", [row for row, of in zip(held_out, chooses, strict=True) if of is side][:count])


def attempts_at(run: Path, test: Path) -> dict[str, Any]:
    """How often a run and its start solve test problems, greedily and in several samples: {"start", "trained"}."""
    from surefoot.language.analysis.attempts import Attempts
    from surefoot.language.analysis.evaluate import evaluate_run

    rows = len(read_rows(test))
    told: dict[str, Any] = evaluate_run(run, data=str(test), rows=rows, attempts=Attempts(SAMPLES, (1, SAMPLES)))["attempts"]
    return told


def compare(sft: Path, runs: Mapping[str, Path], test: Path, stages: Stages) -> dict[str, Any]:
    """Before and after on problems that no stage has seen, as a table with some answers; what to try next."""
    told: dict[str, Any] = {}
    for name, run in runs.items():
        judged = attempts_at(run, test)
        told |= {"SFT": judged["start"], name: judged["trained"]}
    rows = [row.columns for row in read_rows(test)]
    print(f"\n{f'{len(rows)} problems of unseen digits':30}" + "".join(f"{name:>8}" for name in told))
    for line, label in LINES:
        shares = (of["pass_at"][line] if line.isdigit() else of[line] for of in told.values())
        print(f"{label:30}" + "".join(f"{share:>8.1%}" for share in shares))
    print(f"{stages.seconds:.0f} s in all, {stages.folder}/\n")
    asked = rows[:6]
    prompts = [row["prompt"] for row in asked]
    models = {"SFT": sft, **runs}
    said = {name: load_language_model(str(run)).generate(prompts, max_tokens=8, greedy=True) for name, run in models.items()}
    columns = {name: [row[name] for row in asked] for name in ("answer", "task")}
    right = {name: tasks.verify(prompts, answers, **columns) for name, answers in said.items()}
    for number, prompt in enumerate(prompts):
        answers = (f"{name}: {said[name][number]:8} {'right' if right[name][number] else 'wrong'}" for name in models)
        print(f"  {prompt}   " + "    ".join(answers))
    likely, able = told["SFT"]["sampled_accuracy"], told["SFT"]["pass_at"][str(SAMPLES)]
    print(
        f"\nThis makes likely what a model can do already: {likely:.0%} of its samples were right before, and one\n"
        f"of {SAMPLES} at {able:.0%} of the problems. Where next to no sample is right, a verifier has nothing to reward."
    )
    ppo, folder = runs["PPO"], stages.folder
    here = command_here()
    print("\nTry next:")
    print(f"  {here} inspect {ppo}       # every token and its arithmetic, in a browser")
    print(f"  {here} generate {ppo} --prompt '52814=' --samples 5")
    print(f"  {here} evaluate {ppo} --data {test} --samples {SAMPLES}")
    print(f"  {here} train sorting --algorithm DAPO --sampling.prompts 32 --model {sft} \\")
    print(f"    --data.train {folder / 'data' / 'problems.jsonl'} --data.held-out {folder / 'data' / 'validation.jsonl'}")
    return {"seconds": stages.seconds, **told}
