"""CPU seconds of whole commands with the eager and the compiled engine: what ``engine = "auto"`` is decided by.

    python benchmarks/engines.py run --task HalfCheetah-v5 --set rollout.environments=8 rollout.steps=256 --steps 8192 98304
    python benchmarks/engines.py table

A cell is one command, ``surefoot train``, in a fresh process: eager; compiled with an empty cache (the programs are compiled);
compiled with the programs in the cache. CPU seconds are those of the process and of the compilers that it starts, so they mean
something beside other work too. Cells are lines of ``benchmarks/results/engines.jsonl``; finished ones are skipped.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import finished, made_with, read, write

from surefoot.compare.statistics import markdown_table
from surefoot.store.metrics import read_metrics

RESULTS = Path(__file__).parent / "results" / "engines"
ENGINES = ("eager", "compiled, empty cache", "compiled, full cache")


def command(task: str, steps: int, seed: int, settings: list[str], engine: str, run: Path) -> list[str]:
    """The command line of a cell."""
    flags = [word for setting in settings for word in (f"--{setting.partition('=')[0]}", setting.partition("=")[2])]
    shared = ["--steps", str(steps), "--seed", str(seed), "--engine", engine, "--run-dir", str(run), "--quiet"]
    return [sys.executable, "-m", "surefoot", "train", task, *shared, *flags]


def measured(words: list[str], cache: str) -> float:
    """CPU seconds of a command and of all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "SUREFOOT_CACHE": cache, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_cells(args: argparse.Namespace) -> None:
    """Measure what is not measured yet, the engines in turn."""
    for steps in args.steps:
        name = "-".join([args.task.replace("/", "_"), str(steps), *args.set, str(args.seed)])
        path = RESULTS / name
        if finished(path):
            continue
        result: dict[str, Any] = {"task": args.task, "steps": steps, "seed": args.seed, "changed": args.set}
        with tempfile.TemporaryDirectory() as folder:
            for engine in ENGINES:
                run = Path(folder) / engine.replace(", ", "-").replace(" ", "-")
                words = command(args.task, steps, args.seed, args.set, engine.partition(",")[0], run)
                result[engine] = measured(words, folder)
                last = read_metrics(run / "metrics.jsonl")[-1]
                result |= {"updates": last["updates"], f"{engine}, return": last["episode_return"]}
                print(f"{name}, {engine}: {result[engine]:.1f} CPU s", flush=True)
        write(path, {**result, "made_with": made_with()})


def table() -> str:
    """All cells as a Markdown table."""
    rows = []
    for result in sorted(read(RESULTS).values(), key=lambda result: (result["task"], result["changed"], result["steps"])):
        seconds = [result[engine] for engine in ENGINES]
        what = f"{result['task']} {' '.join(result['changed'])}".strip()
        ratios = [f"{x:.1f} ({x / seconds[0]:.2f})" for x in seconds[1:]]
        rows.append([what, f"{result['steps']:,}", f"{result['updates']:,}", f"{seconds[0]:.1f}", *ratios])
    header = ["task", "steps", "updates", "eager, CPU s", "compiled, empty cache (of eager)", "compiled, full cache (of eager)"]
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "table"])
    parser.add_argument("--task", default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, nargs="+", default=[8192, 98304])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe fields")
    args = parser.parse_args()
    if args.verb == "table":
        print(table())
    else:
        run_cells(args)


if __name__ == "__main__":
    main()
