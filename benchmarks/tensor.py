"""Steps per second of training on tensor environments, beside a peer: the same task, network and batch, alternately.

    taskset -c 0 python benchmarks/tensor.py --python PEER/bin/python --rounds 3
    taskset -c 0 python benchmarks/tensor.py --python PEER/bin/python --rounds 3 --iterations 100 --solve -300
    PUREJAXRL=FOLDER taskset -c 0 python benchmarks/tensor.py --task tensor/CartPole-v1 --python JAX/bin/python --rounds 3

Pendulum beside rsl_rl, CartPole beside PureJaxRL; 4,096 environments x 32 steps, two 64-64 tanh networks, 4 epochs x 4
minibatches, one thread. A cell is one training in a fresh process: some iterations that are not counted (they load or compile
programs), then the counted ones. PureJaxRL's one program is compiled and run once before. With ``--solve`` the table shows the
steps and CPU seconds, first iterations included, after which the last 100 episodes of training had that mean return.
Cells are lines of ``benchmarks/results/tensor.jsonl``; finished ones are skipped, so an interrupted benchmark continues. Run it
on an otherwise idle machine; elsewhere only the ratios of CPU seconds within a round are meaningful.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import finished, write

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "tensor"
PEERS = {"tensor/Pendulum-v1": ("rsl_rl", "rsl_rl compiled"), "tensor/CartPole-v1": ("PureJaxRL",)}
SCRIPTS = {"rsl_rl": "rsl.py", "rsl_rl compiled": "rsl.py", "PureJaxRL": "purejax.py"}
MICRO_BATCH = 4096
ITERATIONS = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "tensor/Pendulum-v1": {"objective": {"gamma": 0.9, "normalise_advantages": "batch"}, "epsilon": 1e-8},  # as rsl_rl
    "tensor/CartPole-v1": {
        "objective": {"gamma": 0.99, "normalise_advantages": "minibatch", "value_clip": 0.2},  # as PureJaxRL
        "epsilon": 1e-5,
    },
}


def train_surefoot(cell: dict[str, Any]) -> dict[str, Any]:
    """Train once with Surefoot in this process."""
    import surefoot

    marks: list[tuple[float, float]] = []
    returns: list[float | None] = []
    begin = (time.perf_counter(), time.process_time())

    def mark(metrics: dict[str, float | None]) -> None:
        marks.append((time.perf_counter(), time.process_time()))
        returns.append(metrics["episode_return"])

    batch, settings = cell["environments"] * cell["steps"], SETTINGS[cell["task"]]
    surefoot.train(
        cell["task"],
        preset="none",
        steps=batch * (cell["warm"] + cell["iterations"]),
        seed=cell["seed"],
        run_dir=None,
        engine=cell["contestant"],
        rollout={"environments": cell["environments"], "steps": cell["steps"]},
        objective={**settings["objective"], "gae_lambda": 0.95, "reuse": {"epochs": 4, "minibatches": 4}},
        optimizer={"learning_rate": 1e-3, "epsilon": settings["epsilon"], "micro_batch": min(MICRO_BATCH, batch // 4)},
        normalise={"actions": False},
        evaluation={"episodes": 0},
        callback=mark,
    )
    return {"begin": begin, "marks": marks, "returns": returns}


def run_cell(python: str, cell: dict[str, Any]) -> dict[str, Any]:
    """The result of a cell: kept from before, or trained in a fresh process."""
    name = "-".join(str(cell[key]).replace(" ", "_") for key in ("contestant", "environments", "steps", "seed"))
    name = name if cell["task"] == "tensor/Pendulum-v1" else f"{cell['task'].partition('/')[2]}-{name}"
    name += f"-{cell['iterations']}" if cell["iterations"] != ITERATIONS else ""
    if kept := finished(RESULTS / name):
        return kept
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        if script := SCRIPTS.get(cell["contestant"]):
            cell = cell | ({"compile": "default"} if cell["contestant"] == "rsl_rl compiled" else {})
            command = [python, str(HERE / "peers" / script), json.dumps(cell), out.name]
        else:
            command = [sys.executable, __file__, "--cell", json.dumps(cell), out.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = {**cell, **summary(cell, json.loads(Path(out.name).read_text()))}
    write(RESULTS / name, result)
    return result


def summary(cell: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Speeds of the counted iterations, and the learning curve over CPU seconds."""
    marks, whole = np.array(result["marks"]), "begin" not in result  # PureJaxRL's program is one call
    wall, cpu = marks[-1] - marks[0 if whole else cell["warm"] - 1]
    batch = cell["environments"] * cell["steps"]
    speeds = {"steps_per_second": batch * cell["iterations"] / wall, "steps_per_cpu_second": batch * cell["iterations"] / cpu}
    returns = result["returns"]
    if whole:
        return {**speeds, "last_100_mean": returns[-1]}
    curve = [[round(seconds - result["begin"][1], 2), mean] for (_, seconds), mean in zip(marks, returns, strict=True)]
    return {**speeds, "last_100_mean": returns[-1], "curve": curve}


def solved(cell: dict[str, Any], bar: float) -> str:
    """The steps and CPU seconds after which the mean return first reached ``bar``."""
    if "curve" not in cell:  # PureJaxRL's, and those of before
        return "the cell has no curve"
    for index, (seconds, mean) in enumerate(cell["curve"], 1):
        if mean is not None and mean >= bar:
            return f"{index * cell['environments'] * cell['steps']:,} steps, {seconds:.1f} CPU s"
    return "never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="tensor/Pendulum-v1", choices=PEERS)
    parser.add_argument("--python", help="Python of the peer's environment; without it only Surefoot runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=int, nargs="+", default=[4096])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--solve", type=float, metavar="RETURN", help="show the time to this mean return as well")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of 1 … ROUNDS")
    parser.add_argument("--contestants", nargs="+", choices=("eager", "compiled", *SCRIPTS))
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        Path(args.cell[1]).write_text(json.dumps(train_surefoot(json.loads(args.cell[0]))))
        return
    contestants = args.contestants or ["eager", "compiled", *(PEERS[args.task] if args.python else ())]
    peer = PEERS[args.task][0]
    print(f"| environments | contestant | steps/s, wall | steps/s, CPU | beside {peer}, CPU | return, last 100 |")
    print("|---" * 6 + "|", flush=True)
    for count in args.environments:
        cells: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
        for seed in args.seeds or range(1, args.rounds + 1):
            for name in contestants:
                cell = {"task": args.task, "contestant": name, "environments": count, "steps": args.steps, "seed": seed}
                cells[name].append(run_cell(args.python, cell | {"warm": args.warm, "iterations": args.iterations}))
        for name in contestants:
            wall, cpu = ([cell[key] for cell in cells[name]] for key in ("steps_per_second", "steps_per_cpu_second"))
            peers = [cell["steps_per_cpu_second"] for cell in cells.get(peer, [])]
            ratios = ", ".join(f"{mine / peer:.2f}" for mine, peer in zip(cpu, peers, strict=False)) or "–"
            returns = ", ".join(f"{cell['last_100_mean']:,.0f}" for cell in cells[name])
            spans = (f"{min(speeds):,.0f}–{max(speeds):,.0f}" for speeds in (wall, cpu))
            print(f"| {count:,} | {name} | {' | '.join(spans)} | {ratios} | {returns} |", flush=True)
            if args.solve is not None:
                texts = [solved(cell, args.solve) for cell in cells[name]]
                print(f"\n{name}, to a mean return of {args.solve:g}: {'; '.join(texts)}\n", flush=True)


if __name__ == "__main__":
    main()
