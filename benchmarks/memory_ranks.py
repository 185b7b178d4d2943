"""Peak memory of one of several ranks, phase by phase, compared with the estimate made before a run starts.

    python benchmarks/memory_ranks.py                       every configuration; writes docs/benchmarks/memory.md
    python benchmarks/memory_ranks.py --only sft-2-full     some of them

Each configuration is a line of benchmarks/results/memory_ranks.jsonl; an existing one is skipped. Ranks are processes of this
machine with gloo, one torch thread each. *In use* is what is allocated by malloc, counted every millisecond, of the rank with
the larger peak. The profiler's records, which ``memory.py`` reads, do not serve here: they have what the main thread allocates
for gloo, and not what gloo's threads free. *RssAnon* is what the kernel counts as the process's own memory: it includes pages
that were freed but not returned. Both are above what they were after a run of a tiny model, which has imported everything, and
exclude weights that are mapped from files.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from memory import ANSWER, PHASES, PROMPT, Watched, built, online, rows_in
from record import finished, write

from surefoot.compare.statistics import markdown_table
from surefoot.language.memory import estimate
from surefoot.language.memory.check import running_peak, workload_of
from surefoot.language.memory.layout import Layout
from surefoot.language.memory.probe import HeapTracker
from surefoot.ranks.collectives import exchange, rank
from surefoot.ranks.launching import join_ranks, leave_ranks
from surefoot.recipes.reading import make_recipe

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "benchmarks" / "memory.md", ROOT / "benchmarks" / "results" / "memory_ranks"
KINDS = {"sft": "SFT", "ppo": "PPO, three models"}
SHARDED: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"sharding": "full"},
    "full-kept": {"sharding": "full", "reshard_after_forward": False},
    "full-bf16": {"sharding": "full", "precision": "bfloat16"},
}
CELLS = [("sft", 1, "none"), ("sft", 2, "none"), ("sft", 2, "full"), ("sft", 2, "full-kept"), ("sft", 2, "full-bf16")]
CELLS += [("ppo", 1, "none"), ("ppo", 2, "none"), ("ppo", 2, "full"), ("ppo", 2, "full-bf16")]
"""kind, ranks, and how they share the models"""


def table_of(folder: Path, kind: str, sharded: str, tiny: bool = False) -> dict[str, Any]:
    """The recipe table of a configuration: a Llama of 112 M parameters, and for PPO a critic and a reference of that size."""
    files = rows_in(folder, prompt=PROMPT, answer=ANSWER)
    model = folder / ("tiny" if tiny else "model")
    if kind == "ppo":
        table = online(model, files, critic={"own_model": True})
    else:
        data = {"train": files["demonstrations"], "max_length": 128, "batch": 16}
        table = {"kind": "sft", "model": str(model), "steps": 64, "data": data, "optimizer": {"learning_rate": 1e-5}}
    return {**table, **SHARDED[sharded], "check_memory": False}


@contextmanager
def peak_of_process() -> Iterator[list[int]]:
    """The largest RssAnon in bytes, above that at the beginning, as the only number of the list."""
    peak, over = [0], threading.Event()

    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    before = now()

    def poll() -> None:
        while not over.is_set():
            peak[0] = max(peak[0], now() - before)
            time.sleep(0.01)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def on_rank(folder: Path, kind: str, sharded: str) -> None:
    """Measure this rank, and write the largest peaks of all ranks."""
    torch.set_num_threads(1)
    join_ranks()
    Watched(make_recipe(table_of(folder, kind, sharded, tiny=True)), tracker=HeapTracker()).run()
    gc.collect()
    watched = Watched(make_recipe(table_of(folder, kind, sharded)), tracker=HeapTracker())
    with peak_of_process() as process:
        watched.run()
    everyone = exchange((watched.peaks, process[0]))
    if rank() == 0:
        phases = {phase: max(peaks[phase] for peaks, _ in everyone) for phase in watched.peaks}
        result = {"phases": phases, "process": max(peak for _, peak in everyone)}
        (folder / "measured.json").write_text(json.dumps(result))
    leave_ranks()


def measured(kind: str, ranks: int, sharded: str) -> dict[str, Any]:
    """Measure one configuration in new processes, and estimate it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        table = table_of(folder, kind, sharded)
        built(folder / "model", "llama", width=768, layers=12, vocabulary=16384)
        built(folder / "tiny", "llama", width=64, layers=2, vocabulary=128)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [__file__, "--rank-of", str(folder), kind, sharded]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        peaks = json.loads((folder / "measured.json").read_text())
        recipe = make_recipe(table)
        layout = Layout(ranks, recipe.sharding, ranks, recipe.reshard_after_forward, gpu=False)
        planned = estimate(replace(workload_of(recipe, prompt=PROMPT, response=ANSWER), layout=layout))
    phases = {
        phase: {"estimate": planned.at(phase), "in_use": peak}
        for phase, peak in peaks["phases"].items()
        if phase in planned.phases
    }
    about = {"kind": kind, "ranks": ranks, "sharding": sharded, "stays": planned.permanent}
    return {**about, "phases": phases, "estimate": running_peak(planned), "process": peaks["process"]}


def line(cell: dict[str, Any]) -> list[str]:
    """A row of the table: what stays, and for each phase what is in use at its peak, with the error of the estimate."""
    shown = {
        phase: f"{peaks['in_use'] / 1e6:,.0f} ({peaks['estimate'] / peaks['in_use'] - 1:+.1%})"
        for phase, peaks in cell["phases"].items()
    }
    title = f"{KINDS[cell['kind']]}, {cell['ranks']} x {cell['sharding']}"
    return [title, f"{cell['stays'] / 1e6:,.0f}", *(shown.get(phase, "") for phase in PHASES)]


def main() -> None:
    """Measure missing configurations, and write the page from all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["-".join(map(str, cell)) for cell in CELLS]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--rank-of", nargs=3, metavar=("FOLDER", "KIND", "SHARDING"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        on_rank(Path(options.rank_of[0]), *options.rank_of[1:])
        return
    for name, cell in zip(names, CELLS, strict=True):
        if name in options.only and not finished(RESULTS / name):
            write(RESULTS / name, measured(*cell))
            print(finished(RESULTS / name), flush=True)
    cells = [cell for name in names if (cell := finished(RESULTS / name))]
    table = markdown_table(["run", "stays", *PHASES], [line(cell) for cell in cells])
    print(table)
    text = PAGE.read_text("utf-8")
    begin, end = "<!-- begin: benchmarks/memory_ranks.py -->", "<!-- end -->"
    before, found, rest = text.partition(begin)
    if found:
        PAGE.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}", "utf-8")


if __name__ == "__main__":
    main()
