"""Train cells (library x task x seed), a line of JSON each, and print the tables of docs/benchmarks from them.

    python benchmarks/control.py train --recipe mujoco --task Hopper-v5 Swimmer-v5 --seeds 1 2 3 --steps 1000000 --jobs 2
    python benchmarks/control.py train --recipe mujoco --library stable-baselines3 --python PEER/bin/python --task ...
    python benchmarks/control.py table --recipe mujoco --task Hopper-v5 Swimmer-v5
    python benchmarks/control.py table --bar 200 --task LunarLander-v3

A task is trained with the tuned recipe of its id, or with --recipe (for the other library's settings, see peers/sb3.py).
Every cell runs in its own process, ``--jobs`` of them at a time. A finished cell is skipped, and an interrupted
Surefoot cell resumes, so repeat the command until all cells exist. The score is the mean return of the last 100
training episodes (actions sampled, unnormalised rewards).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from record import finished, made_with, read, write

from surefoot.compare.statistics import markdown_table, mean_interval

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def cells(task: str, args: argparse.Namespace) -> str:
    """The name of the experiment that the cells of a task share: task, steps, preset, algorithm and changed settings."""
    changed = [setting.translate({ord(each): None for each in ' "'}) for setting in args.set]
    return "-".join([task, str(args.steps), *([Path(args.recipe).stem] if args.recipe else []), *args.algorithm, *changed])


def changes_for(task: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """What a cell changes in its preset."""
    changes: dict[str, Any] = {"task": task, "steps": args.steps, "seed": seed, "engine": args.engine}
    settings = tomllib.loads("\n".join(["evaluation.episodes = 0", *args.set]))
    return {**changes, **({"algorithm": args.algorithm[0]} if args.algorithm else {}), **settings}


def cell_file(library: str, task: str, seed: int, args: argparse.Namespace) -> Path:
    """The name of a cell's result."""
    return RESULTS / cells(task, args) / f"{library}-{seed}"


def train_surefoot(task: str, seed: int, args: argparse.Namespace) -> None:
    """Train one Surefoot cell; also evaluate the final agent greedily."""
    import surefoot
    from surefoot.compare.cells import summary
    from surefoot.recipes.presets import find_recipe
    from surefoot.recipes.reading import to_table
    from surefoot.runs.api import start
    from surefoot.store.checkpoint import latest_checkpoint
    from surefoot.store.folder import RunFolder, recipe_differences
    from surefoot.store.metrics import read_metrics

    run = HERE / "runs" / f"{cells(task, args)}-{seed}"
    wanted = find_recipe(args.recipe or task, changes_for(task, seed, args))
    if (run / "config.toml").exists():
        if changed := recipe_differences(to_table(RunFolder(run).recipe()), wanted):
            sys.exit(f"{run}: was started with another recipe ({'; '.join(changed)}); move it away")
        newest = latest_checkpoint(run / "checkpoints")
        over = newest is not None and int(newest.name) >= args.steps  # killed during the evaluation
        agent = surefoot.load(newest) if over else surefoot.resume(run)
    else:
        agent = start(wanted, run)
    greedy = surefoot.evaluate(agent, episodes=args.greedy_episodes, seed=seed)
    rows = read_metrics(run / "metrics.jsonl")
    seconds = sum(row["seconds_collecting"] + row["seconds_learning"] for row in rows)
    recipe = RunFolder(run).recipe()
    rollout = recipe.rollout
    result = {
        "library": "surefoot",
        "version": surefoot.__version__,
        "task": task,
        "seed": seed,
        "steps": args.steps,
        "recipe": args.recipe or "the id's own",
        "algorithm": recipe.algorithm,
        "changed": args.set,
        "engine": recipe.engine,
        "environments": rollout.environments,
        "horizon": rollout.steps,
        "last_100_mean": rows[-1]["episode_return"],
        "average_return": summary(rows)["average_return"],
        "greedy_mean": greedy.mean_return,
        "greedy_worst": min(greedy.returns),
        "greedy_episodes": args.greedy_episodes,
        "seconds": seconds,
        "steps_per_second": rows[-1]["steps"] / seconds,
        "curve": [[row["steps"], row["episode_return"]] for row in rows[:: max(1, len(rows) // 200)]],
    }
    write(cell_file("surefoot", task, seed, args), {**result, "made_with": made_with()})


def results_of(task: str, args: argparse.Namespace, library: str = "") -> list[dict[str, Any]]:
    """The finished cells of a task; exits if there is none."""
    found = [result for result in read(RESULTS / cells(task, args)).values() if library in ("", result["library"])]
    if not found:
        sys.exit(f"{cells(task, args)}: no finished cell; train it first")
    return found


def table(args: argparse.Namespace) -> str:
    """The cells of some tasks as a Markdown table."""
    rows = []
    for task in args.task:
        by_library: dict[str, list[dict[str, Any]]] = {}
        for result in results_of(task, args):
            by_library.setdefault(f"{result['library']} {result['version']}", []).append(result)
        largest = max((abs(result["last_100_mean"]) for results in by_library.values() for result in results), default=0.0)
        digits = 0 if largest >= 100 else 1
        for library, results in by_library.items():
            scores = [result["last_100_mean"] for result in results]
            low, high = mean_interval(scores)
            each = ", ".join(f"{score:,.{digits}f}" for score in scores)
            greedy = ", ".join(f"{result['greedy_mean']:,.{digits}f}" for result in results if "greedy_mean" in result) or "–"
            interval = f"{low:,.{digits}f} to {high:,.{digits}f}"
            rows.append([task, library, str(len(scores)), f"{np.mean(scores):,.{digits}f}", interval, each, greedy])
    return markdown_table(["task", "library", "seeds", "mean", "95 % interval", "each seed", "greedy, each seed"], rows)


def score_table(args: argparse.Namespace) -> str:
    """Surefoot's final agents on some tasks, evaluated greedily, beside the return that counts as solved."""
    rows = []
    for task in args.task:
        results = results_of(task, args, "surefoot")
        greedy = [result["greedy_mean"] for result in results]
        spread = f" ± {np.std(greedy, ddof=1):,.1f}" if len(greedy) > 1 else ""
        each = (
            ", ".join(f"{result[key]:,.1f}" for result in results) for key in ("greedy_mean", "greedy_worst", "last_100_mean")
        )
        mean, worst, trained = each
        over = f"{sum(score >= args.bar for score in greedy)} of {len(greedy)}"
        rows.append([task, f"{args.steps:,}", f"{args.bar:g}", mean, f"{np.mean(greedy):,.1f}{spread}", worst, trained, over])
    header = ["task", "steps", "bar", "greedy mean, each seed", "mean ± standard deviation over seeds"]
    header += ["worst greedy episode, each seed", "last 100 training episodes, each seed", "seeds over the bar"]
    return markdown_table(header, rows)


def run_cell(library: str, task: str, seed: int, args: argparse.Namespace) -> str:
    """Run one cell in its own process; returns a line for the log."""
    out = cell_file(library, task, seed, args)
    if finished(out):
        return f"{task} {out.name}: exists"
    if not (peer := library != "surefoot"):
        command = [sys.executable, __file__, "cell", "--engine", args.engine, "--greedy-episodes", str(args.greedy_episodes)]
        command += ["--task", task, "--seeds", str(seed), "--steps", str(args.steps), "--recipe", args.recipe]
        command += ["--algorithm", *args.algorithm, *(word for setting in args.set for word in ("--set", setting))]
    else:
        command = [args.python, str(HERE / "peers" / "sb3.py"), "--task", task, "--seed", str(seed), "--steps", str(args.steps)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        theirs = Path(folder) / "cell.json"
        done = subprocess.run([*command, "--out", str(theirs)] if peer else command, capture_output=True, text=True)
        if theirs.exists():
            write(out, json.loads(theirs.read_text()))
    if done.returncode:
        return f"{task} {out.name}: failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
    return f"{task} {out.name}: {read(out.parent)[out.name]['last_100_mean']:.1f} in {time.monotonic() - started:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["train", "table", "cell"], help="cell: one cell, in this process")
    parser.add_argument("--library", nargs="+", choices=["surefoot", "stable-baselines3"], default=["surefoot"])
    parser.add_argument("--python", default=sys.executable, help="Python of the other library's environment")
    parser.add_argument("--task", nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--engine", choices=["eager", "compiled"], default="eager", help="Surefoot's engine")
    parser.add_argument("--greedy-episodes", type=int, default=20)
    parser.add_argument("--recipe", default="", help="Surefoot's preset, instead of the one tuned for the task's id")
    parser.add_argument("--algorithm", nargs="*", default=[], help="Surefoot's algorithm, instead of the preset's")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a recipe field, as a line of TOML; repeatable"
    )
    parser.add_argument("--bar", type=float, help="table: the return that greedy agents must reach; prints each agent's result")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; at most one per core, and 1 to measure speed")
    args = parser.parse_args()
    if args.verb == "table":
        print(table(args) if args.bar is None else score_table(args))
        return
    if args.verb == "cell":
        (task,), (seed,) = args.task, args.seeds
        train_surefoot(task, seed, args)
        return
    with ThreadPoolExecutor(args.jobs) as pool:  # threads that wait for processes
        submitted = [
            pool.submit(run_cell, library, task, seed, args)
            for task, seed, library in product(args.task, args.seeds, args.library)
        ]
        failures = 0
        for cell in submitted:
            print(line := cell.result(), flush=True)
            failures += ": failed: " in line
    sys.exit(int(failures > 0))


if __name__ == "__main__":
    main()
