"""Memory of a long text run: its slope over the last 600 of 1,000 iterations, which must stay below 1 MB per 100 iterations.

    python benchmarks/run_memory.py [--iterations 1000] [--algorithm GRPO]

Besides the process, it prints what glibc's heap has in use and free, and Python's objects: which of them grows names the cause.
"""

import argparse
import ctypes
import gc
import tempfile
from pathlib import Path

import numpy as np
import psutil

import surefoot
from surefoot.language import tasks
from surefoot.language.data.rows import write_rows

LIMIT = 1.0
"""MB per 100 iterations"""
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Heap(ctypes.Structure):
    """The result of glibc's ``mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def main() -> None:
    """Train the pocket model to sort digits, and measure after every tenth iteration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--algorithm", default="GRPO")
    options = parser.parse_args()
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = Heap
    process, rows = psutil.Process(), []

    def measure(metrics: dict[str, float | None]) -> None:
        iteration = int(metrics["iteration"] or 0)
        if iteration % 10 == 0:
            heap = mallinfo2()
            sizes = (process.memory_info().rss / 1e6, heap.uordblks / 1e6, heap.fordblks / 1e6, len(gc.get_objects()))
            rows.append((iteration, *sizes))
            if iteration % 100 == 0:
                print(
                    "iteration {:5d}: {:.1f} MB, heap {:.1f} used and {:.1f} free, {:,} objects".format(*rows[-1]), flush=True
                )

    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder) / "problems.jsonl", tasks.rows("sorting", 512, 1))
        surefoot.train(
            "language",
            options.algorithm,
            model="pocket",
            data=str(Path(folder) / "problems.jsonl"),
            reward="surefoot.language.tasks:verify",
            sampling={"prompts": 4, "samples": 4, "max_tokens": 8},
            steps=16 * options.iterations,
            run_dir=Path(folder) / "run",
            callback=measure,
            display=False,
        )
    last = np.array([row for row in rows if row[0] > 0.4 * options.iterations])
    slope = 100 * np.polyfit(last[:, 0], last[:, 1], 1)[0]
    print(f"slope over the last {0.6 * options.iterations:.0f} iterations: {slope:+.2f} MB per 100")
    if slope >= LIMIT:
        raise SystemExit(f"the slope is {slope:.2f} MB per 100 iterations, and at most {LIMIT:g} is allowed")


if __name__ == "__main__":
    main()
