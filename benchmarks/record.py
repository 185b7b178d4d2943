"""Write the result of a cell: the complete file or nothing, with the code and the hardware that made it."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
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


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the complete file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result) + "\n", "utf-8")
    partial.rename(path)
