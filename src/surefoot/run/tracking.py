"""Where metrics go: metrics.jsonl, always flushed, and TensorBoard."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.rollout import Metrics


class Tracker:
    """Appends one JSON object per iteration, and the same scalars for TensorBoard.

    ``iteration`` is the last one to keep: what an interrupted run wrote beyond its checkpoint is cut off.
    """

    def __init__(self, folder: Path, iteration: int, step: int) -> None:
        self.path = folder / "metrics.jsonl"
        cut_back(self.path, iteration)
        self.file = self.path.open("a", encoding="utf-8")
        from torch.utils.tensorboard import SummaryWriter

        self.board: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, metrics: Metrics, step: int) -> None:
        """One iteration's metrics."""
        try:
            self.file.write(json.dumps(metrics) + "\n")
            self.file.flush()
        except OSError as error:
            raise SurefootError(f"{self.path}: can't be written ({error.strerror}); free space and resume") from None
        for name, value in metrics.items():
            if value is not None:
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush everything to the disk; of one that is full now the run has complained already."""
        for part in (self.file, self.board):
            with contextlib.suppress(OSError):
                part.close()


def cut_back(path: Path, iteration: int) -> None:
    """Drop the lines of iterations after ``iteration``, and a line that a kill left unfinished."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["iteration"] <= iteration]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), "utf-8")
    os.replace(temporary, path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The iterations in a metrics.jsonl, up to the first line that is not whole."""
    rows = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or "iteration" not in row:
            break
        rows.append(row)
    return rows
