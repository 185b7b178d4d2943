"""``surefoot plan`` against measurement: the time of a rank's phases on this machine, with 1, 2 and 4 ranks.

    python benchmarks/plan.py                      every configuration; writes docs/scale.md
    python benchmarks/plan.py --only ppo-2-full    some of them

Each configuration is a line of benchmarks/results/plan.jsonl; an existing one is skipped. The machine's rates (matrices,
memory, small operations, exchanges) and the run are measured one after the other in the same cell; the page is calculated from
these rates by the present formulas. Both are seconds of CPU of
one process (``time.process_time``), so other load on the machine, and ranks that share a core, count less. A rank that waits
for another uses no CPU. ``--clock wall`` measures elapsed seconds instead, for a quiet machine with a core for every rank.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from memory import built, online, rows_in
from record import finished, write

from surefoot.compare.statistics import markdown_table
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.language.memory.check import workload_of
from surefoot.language.memory.layout import Layout
from surefoot.language.speed.machines import cpu_machine, measured_machine
from surefoot.language.speed.plan import iteration_time
from surefoot.ranks.collectives import exchange, rank
from surefoot.ranks.launching import join_ranks, leave_ranks
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner, make_world

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "scale.md", ROOT / "benchmarks" / "results" / "plan"
PROMPT, ANSWER, ROWS = 48, 16, 8
"""tokens of a prompt and of a response, and responses of a rank"""
WIDTH = 512
CELLS = [(kind, ranks, sharding) for kind in ("sft", "ppo") for ranks, sharding in ((1, "none"), (2, "none"), (2, "full"))]
CELLS += [("sft", 4, "none"), ("ppo", 4, "full")]
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
RATES = ("flops", "bandwidth", "launch", "latency", "link", "few_rows")
"""of the machine, which are measured"""
ITERATIONS = 2
"""measured, after one that is not"""


def table_of(folder: Path, kind: str, ranks: int, sharding: str) -> dict[str, Any]:
    """The recipe table: a Llama of width 512 and 6 layers (27.7 M parameters with 8,192 tokens)."""
    files = rows_in(folder, prompt=PROMPT, answer=ANSWER, count=256)
    model = folder / "model"
    if not model.exists():
        built(model, "llama", width=WIDTH, layers=6, vocabulary=8192)
    if kind == "ppo":
        sampling = {"prompts": ROWS * ranks, "max_tokens": ANSWER}
        table = online(model, files, critic={"own_model": True}, sampling=sampling, steps=1024)
    else:
        data = {"train": files["demonstrations"], "max_length": 128, "batch": ROWS * ranks}
        table = {
            "kind": "sft",
            "model": str(model),
            "steps": 1024,
            "threads": 1,
            "data": data,
            "optimizer": {"learning_rate": 1e-5},
        }
    return {**table, "sharding": sharding, "check_memory": False}


def on_rank(folder: Path, kind: str, ranks: int, sharding: str, clock_name: str) -> None:
    """Run iterations on this rank, and write the mean seconds of each phase over all ranks."""
    torch.set_num_threads(1)
    join_ranks()
    clock = CLOCKS[clock_name]
    recipe = make_recipe(table_of(folder, kind, ranks, sharding))
    world = make_world(recipe)
    learner = make_learner(recipe, world.policy)
    learner.auxiliary_loss = world.auxiliary_loss
    state = LearnerState.seeded(recipe.seed, recipe.steps)
    seconds: dict[str, list[float]] = {}
    collector: Any = world.collector
    sampled = [0.0]
    if hasattr(collector, "respond"):
        respond = collector.respond

        def timed(*args: Any) -> Any:
            started = clock()
            output = respond(*args)
            sampled[0] = clock() - started
            return output

        collector.respond = timed
    for _ in range(1 + ITERATIONS):
        started = clock()
        rollout = collector.collect(state)
        collected = clock()
        learner.update(rollout, assign_credit(rollout, learner.objective), state)
        state.steps += rollout.steps
        times = {"learning": clock() - collected}
        if kind == "ppo":
            times |= {"sampling": sampled[0], "scoring": collected - started - sampled[0]}
        for name, value in times.items():
            seconds.setdefault(name, []).append(value)
    everyone = exchange({name: min(values[1:]) for name, values in seconds.items()})
    if rank() == 0:
        means = {name: sum(one[name] for one in everyone) / len(everyone) for name in everyone[0]}
        (folder / "measured.json").write_text(json.dumps(means))
    leave_ranks()


def measured(kind: str, ranks: int, sharding: str, clock: str) -> dict[str, Any]:
    """Measure the machine and a run in new processes, and calculate the same."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        table_of(folder, kind, ranks, sharding)  # makes the files before the ranks read them
        machine = measured_machine(WIDTH, WIDTH * 11 // 4, ROWS * (PROMPT + ANSWER), ROWS, ranks, CLOCKS[clock], seconds=2.0)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [__file__, "--rank-of", str(folder), kind, str(ranks), sharding, clock]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        seconds = json.loads((folder / "measured.json").read_text())
    about = {"kind": kind, "ranks": ranks, "sharding": sharding, "clock": clock}
    return {**about, "machine": {name: getattr(machine, name) for name in RATES}, "measured": seconds}


def calculated(cell: dict[str, Any]) -> dict[str, float]:
    """The seconds of each phase by the present formulas, from the rates that were measured with the run."""
    ranks = cell["ranks"]
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(table_of(Path(folder), cell["kind"], ranks, cell["sharding"]))
        workload = workload_of(recipe, prompt=PROMPT, response=ANSWER)
    rates = cell["machine"]
    machine = cpu_machine(ranks, **{name: rates[name] for name in RATES})
    layout = Layout(ranks, recipe.sharding, ranks, gpu=False)
    return iteration_time(replace(workload, layout=layout), machine).seconds


def lines(cell: dict[str, Any]) -> list[list[str]]:
    """Rows of the table: each phase, and all together."""
    both = [(name, seconds, cell["measured"][name]) for name, seconds in calculated(cell).items()]
    if len(both) > 1:
        both.append(("all", sum(c for _, c, _ in both), sum(m for _, _, m in both)))
    title = f"{cell['kind']}, {cell['ranks']} x {cell['sharding']}"
    return [[title, name, f"{c:.2f}", f"{m:.2f}", f"{c / m - 1:+.0%}"] for name, c, m in both]


def main() -> None:
    """Measure missing configurations, and write the page from all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["-".join(map(str, cell)) for cell in CELLS]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        folder, kind, ranks, sharding, clock = options.rank_of
        on_rank(Path(folder), kind, int(ranks), sharding, clock)
        return
    files = {name: RESULTS / f"{name}{'-wall' * (options.clock == 'wall')}" for name in names}
    for name, cell in zip(names, CELLS, strict=True):
        if name in options.only and not finished(files[name]):
            write(files[name], measured(*cell, options.clock))
            print(finished(files[name]), flush=True)
    cells = [cell for path in files.values() if (cell := finished(path))]
    header = ["run", "phase", "calculated, s", "measured, s", "error"]
    table = markdown_table(header, [line for cell in cells for line in lines(cell)])
    print(table)
    text = PAGE.read_text("utf-8") if PAGE.exists() else ""
    begin, end = f"<!-- begin: benchmarks/plan.py {options.clock} -->", "<!-- end -->"
    before, found, rest = text.partition(begin)
    if found:
        PAGE.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}", "utf-8")


if __name__ == "__main__":
    main()
