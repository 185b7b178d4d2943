"""Memory and time of an iteration against environments, horizon, width and epochs; and the memory of a long run.

    python benchmarks/cost.py sweep
    python benchmarks/cost.py growth --steps 2000000
    python benchmarks/cost.py table

A cell of the sweep is a training of ``tensor/CartPole-v1`` in a fresh process with one torch thread, which changes one size of
64 environments x 64 steps, two 64-64 networks, 4 epochs x 4 minibatches. Its time is the median CPU time of the counted
iterations, so it means something beside other work too; its memory is the highest that the process ever had, less that of the
same process before it made the run. Growth is the resident memory of a run of ``CartPole-v1`` with its preset, checkpoints,
evaluations, traces and metrics, by its own metric ``memory_gb``. Cells are lines of ``benchmarks/results/cost.jsonl``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import finished, made_with, read, write

from surefoot.compare.statistics import markdown_table

RESULTS = Path(__file__).parent / "results" / "cost"
BASE = {"environments": 64, "steps": 64, "width": 64, "epochs": 4}
SIZES = {
    "environments": (1, 4, 16, 64, 256, 1024, 4096),
    "steps": (16, 64, 256, 1024),
    "width": (16, 64, 128, 256, 512),
    "epochs": (1, 2, 4, 8, 16),
}
WARM, COUNTED = 2, 5
GROWTH = "growth"


def cell(sizes: dict[str, int]) -> dict[str, Any]:
    """Train in this process: CPU seconds of an iteration, and megabytes."""
    import surefoot
    import surefoot.runs.api  # torch and Gymnasium

    marks: list[float] = []
    batch = sizes["environments"] * sizes["steps"]
    before = peak_megabytes()
    surefoot.train(
        "tensor/CartPole-v1",
        preset="none",
        steps=batch * (WARM + COUNTED),
        seed=1,
        rollout={"environments": sizes["environments"], "steps": sizes["steps"]},
        network={"hidden": [sizes["width"], sizes["width"]]},
        objective={"reuse": {"epochs": sizes["epochs"], "minibatches": 4}},
        evaluation={"episodes": 0},
        callback=lambda _: marks.append(time.process_time()),
        display=False,
    )
    seconds = statistics.median(np.diff(marks)[WARM - 1 :])
    return {**sizes, "seconds": seconds, "megabytes": peak_megabytes() - before}


def peak_megabytes() -> float:
    """The most resident memory that this process has had; getrusage would begin with that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def sweep() -> None:
    """Measure every cell that is missing, in a fresh process each."""
    for name, values in SIZES.items():
        for value in values:
            path = RESULTS / f"{name}-{value}"
            if finished(path):
                continue
            sizes = {**BASE, name: value}
            done = subprocess.run(
                [sys.executable, __file__, "cell", json.dumps(sizes)], check=True, capture_output=True, text=True
            )
            write(path, {**json.loads(done.stdout.splitlines()[-1]), "made_with": made_with()})
            print(path.name, done.stdout.splitlines()[-1], flush=True)


def growth(steps: int) -> None:
    """Train CartPole-v1, and keep its resident memory over the run."""
    from surefoot.store.metrics import read_metrics

    run = Path(__file__).parent / "runs" / f"cost-growth-{steps}"
    command = [sys.executable, "-m", "surefoot"]
    if (run / "config.toml").exists():
        command += ["resume", str(run), "--quiet"]
    else:
        command += ["train", "CartPole-v1", "--steps", str(steps), "--seed", "1", "--run-dir", str(run), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = read_metrics(run / "metrics.jsonl")
    tenths = [rows[min(len(rows) - 1, round(len(rows) * share / 10))] for share in range(1, 11)]
    memory = [[row["steps"], row["memory_gb"] * 1000] for row in tenths]
    last = rows[-1]
    write(
        RESULTS / GROWTH, {"steps": last["steps"], "iterations": last["iteration"], "memory": memory, "made_with": made_with()}
    )


def tables() -> str:
    """All sweeps, each with the line through its ends, and the growth."""
    parts, cells = [], read(RESULTS)
    for name, values in SIZES.items():
        if not (results := [cells[key] for value in values if (key := f"{name}-{value}") in cells]):
            continue
        rows = []
        x = np.array([result[name] for result in results], float)
        y = np.array([result["seconds"] for result in results])
        slope, intercept = np.polyfit(x, y, 1, w=1 / y)
        for result, line in zip(results, intercept + slope * x, strict=True):
            times = [f"{result['seconds']:.3f}", f"{result['seconds'] / line:.2f}"]
            rows.append([f"{result[name]:,}", *times, f"{result['megabytes']:,.0f}"])
        parts.append(markdown_table([name, "CPU s", "of the line", "MB"], rows))
    if result := cells.get(GROWTH):
        rows = [[f"{steps:,}", f"{megabytes:.1f}"] for steps, megabytes in result["memory"]]
        parts.append(markdown_table(["steps", "resident memory, MB"], rows))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["sweep", "growth", "table", "cell"])
    parser.add_argument("sizes", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=2_000_000, help="of growth")
    args = parser.parse_args()
    if args.verb == "cell":
        print(json.dumps(cell(json.loads(args.sizes))))
    elif args.verb == "sweep":
        sweep()
    elif args.verb == "growth":
        growth(args.steps)
    else:
        print(tables())


if __name__ == "__main__":
    main()
