"""The scalars of metrics.jsonl for TensorBoard, in the run's folder."""

import contextlib
from pathlib import Path

from surefoot.runs.events import Event, IterationEnd, RunEnd


class TensorBoard:
    """Writes ``events.*`` in ``folder``; ``steps`` is where the run continues, and TensorBoard hides later points."""

    def __init__(self, folder: Path, steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=steps + 1)

    def __call__(self, event: Event) -> None:
        match event:
            case IterationEnd():
                for name, value in event.metrics.items():
                    if value is not None:
                        self.writer.add_scalar(name, value, event.state.steps)
            case RunEnd():
                with contextlib.suppress(OSError):  # a full disk, which the metrics file has reported
                    self.writer.close()
