"""Environment steps per second while learning, beside other libraries: the same work, alternately, with returns.

    taskset -c 0 python benchmarks/speed.py run --python PEER/bin/python --cleanrl CLEANRL/cleanrl --rounds 3
    python benchmarks/speed.py table

PEER has stable-baselines3, sb3-contrib, sbx-rl, gymnasium[mujoco], ale-py, opencv-python-headless, tyro and tensorboard;
CLEANRL is a checkout of CleanRL. A cell is a fresh process with one torch thread that trains twice. The first training counts
from the start of the process, with imports and with the loading or compiling of programs; the second counts from its first
environment step to its last update. Surefoot's programs are compiled once per setting in advance, in a process whose time is
kept beside. Cells are lines of ``benchmarks/results/speed.jsonl``; finished ones are skipped, so an interrupted run continues.
Run it on an otherwise idle core; elsewhere only the ratios within a round are meaningful.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "speed"
CACHES = HERE / "runs" / "speed"
"""compiled programs, by setting"""
PAGE = HERE.parent / "docs" / "benchmarks" / "control.md"
BEGIN, END = "<!-- begin: benchmarks/speed.py -->\n", "\n<!-- end: benchmarks/speed.py -->"

PPO_PEERS = ("stable-baselines3", "sbx", "sbx, learning on", "cleanrl")
"""SBX compiles again for each new model; "learning on" is one model after its first iteration"""
WORK: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5, 8 x 256": {"task": "HalfCheetah-v5", "environments": 8, "horizon": 256, "peers": PPO_PEERS},
    "HalfCheetah-v5, 1 x 2048": {"task": "HalfCheetah-v5", "environments": 1, "horizon": 2048, "peers": PPO_PEERS},
    "CartPole-v1, 8 x 32": {"task": "CartPole-v1", "environments": 8, "horizon": 32, "setting": "cartpole", "peers": PPO_PEERS},
    "Breakout, 8 x 128": {
        "task": "ALE/Breakout-v5",
        "environments": 8,
        "horizon": 128,
        "setting": "atari",
        "steps": 10_240,
        "peers": ("stable-baselines3",),
    },
    "CartPole without velocities, LSTM, 8 x 128": {
        "task": "positions",
        "environments": 8,
        "horizon": 128,
        "setting": "memory",
        "steps": 20_480,
        "peers": ("sb3-contrib",),
    },
    "HalfCheetah-v5, TRPO, 1 x 2048": {
        "task": "HalfCheetah-v5",
        "environments": 1,
        "horizon": 2048,
        "setting": "trpo",
        "peers": ("sb3-contrib",),
    },
}
"""``setting`` is the settings' name in peers/sb3.py; without it, those of the PPO paper for MuJoCo"""
STEPS = 40_960
"""of work that names no other number"""
ENGINES = ("eager", "compiled")
"""of work that names no others; the last one is compared with the rest"""


def train_surefoot(work: dict[str, Any], engine: str, seed: int) -> float | None:
    """Train with Surefoot in this process; the mean return of the last 100 episodes."""
    import surefoot

    task: Any = work["task"]
    settings: dict[str, Any] = {}
    if work["setting"] == "memory":
        sys.path.insert(0, str(HERE.parent / "examples"))
        from memory import RECIPE, Positions

        task, settings = Positions, {**RECIPE, "network": {"hidden": [32], "lstm": 32}}
    if work["setting"] == "trpo":
        settings = {"algorithm": "TRPO"}
    returns: list[float | None] = []
    settings["rollout"] = {"environments": work["environments"], "steps": work["horizon"]}
    settings |= {"engine": engine, "evaluation": {"episodes": 0}}
    surefoot.train(
        task,
        steps=work["steps"],
        seed=seed,
        run_dir=None,
        callback=lambda metrics: returns.append(metrics["episode_return"]),
        **settings,
    )
    return returns[-1]


def train_twice(cell: dict[str, Any], out: Path) -> None:
    """Train twice in this process; write the seconds of both."""
    import torch

    torch.set_num_threads(1)
    work, engine, seed = cell["work"], cell["contestant"], cell["seed"]
    train_surefoot(work, engine, seed)
    first = time.time() - cell["started"]
    start = time.perf_counter()
    last = train_surefoot(work, engine, seed)
    out.write_text(json.dumps({"first_seconds": first, "seconds": time.perf_counter() - start, "last_100_mean": last}))


def complete(work: dict[str, Any]) -> dict[str, Any]:
    """A work with its setting and its steps."""
    return {"setting": "paper", "steps": STEPS, **work}


def in_its_own_process(cell: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train in a fresh Python, so that no library warms up another's caches."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cell.json"
        if cell["contestant"] in ENGINES:
            command = [sys.executable, str(HERE / "speed.py"), "cell"]
        elif cell["contestant"] == "cleanrl":
            command = [args.python, str(HERE / "peers" / "clean.py")]
        else:
            command = [args.python, str(HERE / "peers" / "sb3.py"), "--cell"]
        cache = CACHES / slug(cell["name"])
        if not cell["seed"]:
            shutil.rmtree(cache, ignore_errors=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SUREFOOT_CACHE": str(cache)}
        environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        cell = {**cell, "started": time.time(), "cleanrl": args.cleanrl}
        subprocess.run(
            [*command, json.dumps(cell), str(out)], check=True, stdout=subprocess.DEVNULL, env=environment, cwd=folder
        )
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def slug(*words: Any) -> str:
    """Words as a file's name."""
    return "-".join(str(word).replace("/", "_").replace(",", "").replace(" ", "_") for word in words)


def run(args: argparse.Namespace) -> None:
    """Run the missing cells, round by round."""
    from record import finished, made_with, write

    for seed in range(args.rounds + 1):
        for name, work in WORK.items():
            if args.only and not any(word in name for word in args.only):
                continue
            peers = [peer for peer in work["peers"] if args.python and (peer != "cleanrl" or args.cleanrl)]
            for contestant in (*ENGINES, *peers) if seed else ENGINES[-1:]:  # round 0 compiles the programs
                path = RESULTS / slug(name, contestant, seed)
                if finished(path):
                    continue
                whole = complete(work)
                if not seed:
                    whole["steps"] = 2 * work["environments"] * work["horizon"]
                cell = {"name": name, "work": whole, "contestant": contestant, "seed": seed}
                result = in_its_own_process(cell, args)
                write(path, {**cell, **result, "made_with": made_with()})
                speed = whole["steps"] / result["seconds"]
                print(
                    f"{name}, {contestant}, round {seed}: {speed:,.0f} steps/s; first {result['first_seconds']:.1f} s",
                    flush=True,
                )


def span(numbers: list[float], digits: int = 0) -> str:
    """The smallest and the largest number."""
    low, high = (f"{number:,.{digits}f}" for number in (min(numbers), max(numbers)))
    return low if low == high else f"{low}–{high}"


def row_of(name: str, work: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Steps per second of every contestant, and in brackets how much faster the compiled engine is."""

    def cells(contestant: str) -> dict[int, dict[str, Any]]:
        return {seed: kept[key] for seed in range(1, 100) if (key := slug(name, contestant, seed)) in kept}

    row, ours = [name], cells(ENGINES[-1])
    for contestant in CONTESTANTS:
        theirs = cells(contestant) if contestant in (*ENGINES, *work["peers"]) else {}
        speeds = [cell["work"]["steps"] / cell["seconds"] for cell in theirs.values()]
        slower = [cell["seconds"] / ours[seed]["seconds"] for seed, cell in theirs.items() if seed in ours]
        beside = f" ({span(slower, 2)})" if slower and contestant != ENGINES[-1] else ""
        row.append(f"{span(speeds)}{beside}" if speeds else "")
    return row


CONTESTANTS = (*ENGINES[::-1], *dict.fromkeys(peer for work in WORK.values() for peer in work["peers"]))


def table() -> str:
    """The finished cells as a Markdown table."""
    from record import read

    from surefoot.compare.statistics import markdown_table

    kept = read(RESULTS)
    made = []
    for name in WORK:
        if cell := kept.get(slug(name, "compiled", 0)):
            made.append(f"{name} {cell['first_seconds']:.0f} s")
    table = [["work", *CONTESTANTS], *(row_of(name, work, kept) for name, work in WORK.items())]
    header, *rows = map(list, zip(*(column for column in zip(*table, strict=True) if any(column[1:])), strict=True))
    return f"{markdown_table(header, rows)}\n\nCompiling, once per setting and machine: {'; '.join(made)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run the missing cells")
    runs.add_argument("--python", help="Python of the other libraries' environment; without it only Surefoot runs")
    runs.add_argument("--cleanrl", help="folder with CleanRL's scripts; without it CleanRL does not run")
    runs.add_argument("--rounds", type=int, default=3)
    runs.add_argument("--only", nargs="+", metavar="WORD", help="only work whose name has one of these words")
    commands.add_parser("table", help="write the table into docs/benchmarks/control.md")
    one = commands.add_parser("cell")
    one.add_argument("cell", type=json.loads)
    one.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        for name in ("python", "cleanrl"):
            path = getattr(args, name)
            if path and not Path(path).exists():
                parser.error(f"--{name} {path}: does not exist")
            setattr(args, name, path and os.path.abspath(path))  # the cells run in a folder of their own
        run(args)
    elif args.command == "cell":
        train_twice(args.cell, args.out)
    else:
        page = PAGE.read_text("utf-8")
        before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        PAGE.write_text(before + table() + after, "utf-8")


if __name__ == "__main__":
    main()
