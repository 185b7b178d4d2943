"""Train cells (library x task x seed), one JSON file each, and make the table of docs/benchmarks from them.

    python benchmarks/control.py train --library surefoot --task HalfCheetah-v5 --seeds 1 2 3 --steps 1000000
    python benchmarks/control.py train --library stable-baselines3 --python PEER/bin/python --task ... (the same)
    python benchmarks/control.py table --task HalfCheetah-v5

A cell that has its file is skipped, and an interrupted Surefoot cell resumes, so the command can be repeated until all is
there. The score is the mean return of the last 100 training episodes (actions sampled, rewards as the task gives them).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.compare.statistics import bootstrap_interval, markdown_table

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def cell_file(library: str, task: str, seed: int, steps: int) -> Path:
    """Where a cell's result is."""
    return RESULTS / f"{task}-{steps}" / f"{library}-{seed}.json"


def train_surefoot(task: str, seed: int, steps: int, greedy_episodes: int, engine: str, out: Path) -> None:
    """One Surefoot cell, in the recipe that the task's id brings; the final agent is judged greedily besides."""
    import surefoot
    from surefoot.run.folder import RunFolder
    from surefoot.run.tracking import read_metrics

    run = HERE / "runs" / f"{task}-{steps}-{seed}"
    if (run / "config.toml").exists():
        agent = surefoot.resume(run)
    else:
        agent = surefoot.train(task, steps=steps, seed=seed, run_dir=run, engine=engine, evaluation={"episodes": 0})
    greedy = surefoot.evaluate(agent, episodes=greedy_episodes, seed=seed)
    rows = read_metrics(run / "metrics.jsonl")
    seconds = sum(row["seconds_collecting"] + row["seconds_learning"] for row in rows)
    recipe = RunFolder(run).recipe()
    rollout = recipe.rollout
    result = {
        "library": "surefoot",
        "version": surefoot.__version__,
        "task": task,
        "seed": seed,
        "steps": steps,
        "engine": recipe.engine,
        "environments": rollout.environments,
        "horizon": rollout.steps,
        "last_100_mean": rows[-1]["episode_return"],
        "greedy_mean": greedy.mean_return,
        "greedy_worst": min(greedy.returns),
        "greedy_episodes": greedy_episodes,
        "seconds": seconds,
        "steps_per_second": rows[-1]["steps"] / seconds,
        "curve": [[row["steps"], row["episode_return"]] for row in rows[:: max(1, len(rows) // 200)]],
    }
    write(out, result)


def write(out: Path, result: dict[str, Any]) -> None:
    """Whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(out)


def table(task: str, steps: int) -> str:
    """The cells of a task as a Markdown table."""
    folder = RESULTS / f"{task}-{steps}"
    by_library: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        by_library.setdefault(f"{result['library']} {result['version']}", []).append(result)
    rows = []
    for library, results in by_library.items():
        scores = [result["last_100_mean"] for result in results]
        low, high = bootstrap_interval(scores)
        each = ", ".join(f"{score:,.0f}" for score in scores)
        greedy = ", ".join(f"{result['greedy_mean']:,.0f}" for result in results if "greedy_mean" in result) or "–"
        rows.append([library, str(len(scores)), f"{np.mean(scores):,.0f}", f"{low:,.0f} to {high:,.0f}", each, greedy])
    return markdown_table(["library", "seeds", "mean", "95 % interval", "each seed", "greedy, each seed"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["train", "table"])
    parser.add_argument("--library", choices=["surefoot", "stable-baselines3"], default="surefoot")
    parser.add_argument("--python", default=sys.executable, help="the Python of the peer's environment")
    parser.add_argument("--task", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--engine", choices=["eager", "compiled"], default="eager", help="Surefoot's")
    parser.add_argument("--greedy-episodes", type=int, default=20)
    args = parser.parse_args()
    if args.verb == "table":
        print(table(args.task, args.steps))
        return
    for seed in args.seeds:
        out = cell_file(args.library, args.task, seed, args.steps)
        if out.exists():
            continue
        begun = time.monotonic()
        if args.library == "surefoot":
            train_surefoot(args.task, seed, args.steps, args.greedy_episodes, args.engine, out)
        else:
            peer = [args.python, str(HERE / "peers" / "sb3.py"), "--task", args.task, "--seed", str(seed)]
            subprocess.run([*peer, "--steps", str(args.steps), "--out", str(out)], check=True)
        print(f"{out.name}: {json.loads(out.read_text())['last_100_mean']:.1f} in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
