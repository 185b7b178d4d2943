"""Several ranks against one: how much faster, and whether they learn the same.

    python benchmarks/scale.py weak --repeats 5              weak scaling, on a quiet machine: the same work for each rank
    python benchmarks/scale.py curves --seeds 1 2 3 4 5      learning curves with the same global batch
    python benchmarks/scale.py table                         writes docs/benchmarks/scale.md from all results

Cells are lines of benchmarks/results/scale.jsonl. A finished cell is skipped and an interrupted run resumes, so repeat a
command until all cells exist. Every rank is a process with one torch thread, started as a user does: ``surefoot train --ranks
N``. Numbers of ranks take turns, so a change in the machine's load reaches all of them.

*weak*: each rank has 8 environments × 256 steps of HalfCheetah per iteration, or 256 answers of the sorting task. The rate is
that of the iterations after the first. The ratio of a repeat is its rate with N ranks over its rate with one; N is perfect.

*curves*: the presets ``cartpole`` and ``sorting`` (from an SFT start per seed), which keep their batch whatever the number of
ranks. Actions and responses differ between numbers of ranks as between seeds, so curves can only agree statistically.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from record import finished, read, write

from surefoot.compare.statistics import interval_text, markdown_table, mean_interval, number
from surefoot.demos.verifier import Sizes, write_data
from surefoot.store.metrics import read_metrics

HERE = Path(__file__).resolve().parent
RESULTS, RUNS, PAGE = HERE / "results" / "scale", HERE / "runs" / "scale", HERE.parent / "docs" / "benchmarks" / "scale.md"
TASKS = ("control", "language")
UNIT = {"control": "environment steps", "language": "responses"}
SCORE = {"cartpole": "episode_return", "sorting": "reward"}
GOAL = {"cartpole": 475.0, "sorting": 0.85}
"""a score whose first time is reported"""


def run_command(words: Sequence[str], ranks: int) -> None:
    """One ``surefoot`` command with this many ranks of one thread each."""
    more = ["--ranks", str(ranks)] if ranks > 1 else []
    command = [sys.executable, "-m", "surefoot", *words, "--quiet", *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def trained(run: Path, words: Sequence[str], ranks: int = 1) -> list[dict[str, Any]]:
    """The metrics of a run, which is started, continued, or finished already."""
    if not (run / "finished.json").exists():
        started = (run / "checkpoints").is_dir() and any((run / "checkpoints").iterdir())
        if not started:
            shutil.rmtree(run, ignore_errors=True)
        run_command(["resume", str(run)] if started else ["train", *words, "--run-dir", str(run), "--threads", "1"], ranks)
    return list(read_metrics(run / "metrics.jsonl"))


def sorting_start(seed: int) -> Path:
    """The folder of a seed with the data of the sorting task, and the model that SFT made from it."""
    folder = RUNS / f"sorting-{seed}"
    if not (folder / "data" / "test.jsonl").exists():
        shutil.rmtree(folder / "data", ignore_errors=True)
        write_data(folder / "data", "sorting", seed, Sizes())
    trained(folder / "sft", ["task_sft", "--seed", str(seed), "--data.train", str(folder / "data" / "demonstrations.jsonl")])
    return folder


def online(folder: Path, seed: int) -> list[str]:
    """The command that trains a seed's start on the sorting task."""
    words = ["sorting", "--seed", str(seed), "--model", str(folder / "sft")]
    return [*words, "--data.train", str(folder / "data" / "problems.jsonl")]


def weak_cell(task: str, ranks: int, repeat: int, iterations: int) -> dict[str, Any]:
    """The rate of one short run, and the share of the time in collecting."""
    if task == "control":
        each = 8 * 256
        words = ["HalfCheetah-v5", "--seed", str(repeat), "--rollout.environments", str(8 * ranks), "--rollout.steps", "256"]
        words += ["--evaluation.episodes", "0"]
    else:
        each = 256
        words = [*online(sorting_start(1), repeat), "--sampling.prompts", str(each * ranks), "--evaluation.rows", "0"]
    steps = each * ranks * iterations
    words += ["--steps", str(steps), "--checkpoint.every", str(steps)]
    run = RUNS / f"weak-{task}-{ranks}-{repeat}"
    shutil.rmtree(run, ignore_errors=True)  # an interrupted run has no rate
    rows = trained(run, words, ranks)[1:]
    seconds = [row["seconds_collecting"] + row["seconds_learning"] for row in rows]
    return {
        "task": task,
        "ranks": ranks,
        "repeat": repeat,
        "iterations": len(rows),
        "per_second": each * ranks * len(rows) / sum(seconds),
        "collecting": sum(row["seconds_collecting"] for row in rows) / sum(seconds),
    }


def curve_cell(task: str, ranks: int, seed: int) -> dict[str, Any]:
    """The learning curve of one run."""
    words = ["cartpole", "--seed", str(seed)]
    if task == "sorting":
        words = online(sorting_start(seed), seed)
    rows = trained(RUNS / f"curve-{task}-{ranks}-{seed}", [*words, "--evaluation.every", "1_000_000"], ranks)
    points = [[row["steps"], row[SCORE[task]]] for row in rows if row.get(SCORE[task]) is not None]
    return {"task": task, "ranks": ranks, "seed": seed, "points": points}


def make(name: str, compute: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """Compute a cell unless it is finished."""
    if finished(RESULTS / name):
        return
    write(RESULTS / name, compute(*arguments))
    print(f"{name}: done", flush=True)


def cells(kind: str, task: str) -> list[dict[str, Any]]:
    """The finished cells of a kind and task."""
    return [result for name, result in read(RESULTS).items() if name.startswith(f"{kind}-{task}-")]


# ---- tables -------------------------------------------------------------------------------------------------------------


def weak_table() -> str:
    """One row for each task and number of ranks."""
    lines = []
    for task in TASKS:
        results = cells("weak", task)
        rates = {(each["ranks"], each["repeat"]): each["per_second"] for each in results}
        for ranks in sorted({each["ranks"] for each in results}):
            own = {repeat: rate for (count, repeat), rate in rates.items() if count == ranks}
            ratios = [rate / rates[1, repeat] for repeat, rate in own.items() if (1, repeat) in rates]
            about = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "–"
            average = f"{mean(ratios):.2f}" if ratios else "–"
            lines.append([f"{task} ({UNIT[task]})", str(ranks), f"{mean(own.values()):,.0f}", average, about, str(len(own))])
    return markdown_table(["task", "ranks", "per second", "ratio to one rank", "smallest to largest", "repeats"], lines)


def score_at(points: Sequence[Sequence[float]], steps: float) -> float:
    """The score of the last point up to ``steps``, or of the first."""
    return next((score for at, score in reversed(points) if at <= steps), points[0][1])


def reached(points: Sequence[Sequence[float]], goal: float) -> float | None:
    """The steps at which a curve first reaches a score."""
    return next((at for at, score in points if score >= goal), None)


def curve_table(task: str) -> str:
    """Scores along the curves of one and of two ranks, and the interval of their difference."""
    results = cells("curve", task)
    seeds = set.intersection(*({r["seed"] for r in results if r["ranks"] == ranks} for ranks in (1, 2)))
    curves = {ranks: [r["points"] for r in results if r["ranks"] == ranks and r["seed"] in seeds] for ranks in (1, 2)}
    if not seeds:
        return ""
    budget = max(points[-1][0] for points in curves[1])
    measures: dict[str, Callable[[Any], float | None]] = {
        f"score at {round(budget * part):,} steps": lambda points, part=part: score_at(points, budget * part)
        for part in (0.25, 0.5, 1.0)
    }
    measures[f"steps to a score of {GOAL[task]:g}"] = lambda points: reached(points, GOAL[task])
    lines = []
    for name, measure in measures.items():
        one, two = ([measure(points) for points in curves[ranks]] for ranks in (1, 2))
        if None in one or None in two:
            counts = [sum(x is not None for x in values) for values in (one, two)]
            lines.append([name, f"{counts[0]} of {len(one)} seeds", f"{counts[1]} of {len(two)} seeds", "–", "–"])
            continue
        each = [f"{number(mean(values))} ± {number(stdev(values) if len(values) > 1 else 0.0)}" for values in (one, two)]
        lines.append([name, *each, number(mean(two) - mean(one)), interval_text(*mean_interval(two, one))])
    header = [f"{task}, {len(seeds)} seeds", "1 rank", "2 ranks", "difference", "95 % interval"]
    return markdown_table(header, lines)


def write_page() -> None:
    """Print every table that has results, and write those that the page has a place for."""
    tables = {"weak": weak_table() if any(cells("weak", task) for task in TASKS) else ""}
    tables |= {task: curve_table(task) if cells("curve", task) else "" for task in SCORE}
    text = PAGE.read_text("utf-8") if PAGE.exists() else ""
    for name, table in tables.items():
        print(table, end="\n\n" if table else "")
        begin, end = f"<!-- begin: {name} -->\n", "<!-- end -->"
        before, _, rest = text.partition(begin)
        if rest and table:
            text = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    if text:
        PAGE.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["weak", "curves", "table"])
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, *SCORE], help="Some of them. [default: all of the verb]")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=8, help="Of a run of weak; the first does not count.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    args = parser.parse_args()
    if args.verb == "weak":
        for repeat, task, ranks in product(range(1, args.repeats + 1), args.tasks or TASKS, args.ranks):
            make(f"weak-{task}-{ranks}-{repeat}", weak_cell, task, ranks, repeat, args.iterations)
    elif args.verb == "curves":
        for seed, task, ranks in product(args.seeds, args.tasks or SCORE, args.ranks):
            make(f"curve-{task}-{ranks}-{seed}", curve_cell, task, ranks, seed)
    if args.verb != "curves":
        write_page()


if __name__ == "__main__":
    main()
