"""Results of cells, with the code and the hardware that made them: a line each in the file of their experiment.

The path ``results/EXPERIMENT/CELL`` stands for the line of ``results/EXPERIMENT.jsonl`` with that ``cell``.
"""

import fcntl
import functools
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Result = dict[str, Any]
CPUINFO = Path("/proc/cpuinfo")


def made_with() -> dict[str, Any]:
    """Version and source of Surefoot, Python, PyTorch and the CPU model.

    ``source`` is git's hash of ``src/surefoot``, which is the same in every commit with the same files; ``+`` marks changes
    that are in no commit. It is None outside a checkout.
    """
    import torch

    import surefoot

    return {
        "version": surefoot.__version__,
        "source": _source(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
    }


def _source() -> str | None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD:src/surefoot") + (
            "+" if git("status", "--porcelain", "src/surefoot") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def read(experiment: Path) -> dict[str, Result]:
    """The finished cells of an experiment by name, sorted; none before the first."""
    file = experiment.with_name(f"{experiment.name}.jsonl")
    return dict(_lines(file, file.stat().st_mtime_ns)) if file.exists() else {}


@functools.lru_cache
def _lines(file: Path, modified: int) -> dict[str, Result]:
    rows = (json.loads(line) for line in file.read_text("utf-8").splitlines())
    return {row["cell"]: row for row in rows}


def finished(cell: Path) -> Result | None:
    """The result of ``EXPERIMENT/CELL``; None before it is finished."""
    return read(cell.parent).get(cell.name)


def write(cell: Path, result: Result) -> None:
    """Keep the result of ``EXPERIMENT/CELL``: the complete line or nothing, also beside other processes that write."""
    file = cell.parent.with_name(f"{cell.parent.name}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = sorted((read(cell.parent) | {cell.name: {"cell": cell.name, **result}}).items())
        partial = file.with_suffix(".partial")
        partial.write_text("".join(f"{json.dumps(row)}\n" for _, row in rows), "utf-8")
        partial.rename(file)
    finally:
        os.close(folder)
