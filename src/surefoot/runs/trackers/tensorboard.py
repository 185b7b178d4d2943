"""TensorBoard: event files in the run's folder. It has no videos here: its own encoder would need another package."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.diagnostics import Finding
from surefoot.recipes.reading import to_toml
from surefoot.runs.events import Sample
from surefoot.runs.trackers.interface import NOTHING, TrackedRun, columns_of, require_installed

FILES = "events.out.tfevents.*"
STEPS = b"steps"
"""tag of a number that every row has"""


def check() -> None:
    """Raise SurefootError if the extra is missing."""
    require_installed("tensorboard", "tensorboard")


class TensorBoard:
    """Writes ``events.*``. TensorBoard hides what a killed run wrote after its checkpoint, so no row is shown twice."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.identity: dict[str, Any] = {}
        continued = any(run.folder.glob(FILES))
        self.last_step = _last_step(run.folder, run.steps)
        self.writer = SummaryWriter(str(run.folder), purge_step=run.steps + 1)
        if not continued:
            self.writer.add_text("recipe", f"```toml\n{to_toml(run.recipe)}```", 0)

    def log(self, steps: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Write and flush: a checkpoint follows only rows that are in the file."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, steps)
        if samples:
            self.writer.add_text("samples", _table(samples), steps)
        self.writer.flush()
        self.last_step = steps

    def log_video(self, steps: int, path: Path) -> None:
        """Name the file."""
        self.writer.add_text("videos", str(path), steps)

    def log_finding(self, steps: int, finding: Finding) -> None:
        """Add the finding as text."""
        self.writer.add_text("findings", finding.line, steps)

    def close(self, failed: bool) -> None:
        """Close the file."""
        self.writer.close()


def _last_step(folder: Path, most: int) -> int:
    """Steps of the newest row in the event files that is not past ``most``; ``NOTHING`` without one."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for path in sorted(folder.glob(FILES), reverse=True):  # their names have the time at which they were opened
        events = (Event.FromString(record) for record in RawEventFileLoader(str(path)).Load() if STEPS in record)
        rows = [int(event.step) for event in events if any(value.tag == STEPS.decode() for value in event.summary.value)]
        if written := [steps for steps in rows if steps <= most]:
            return max(written)
    return NOTHING


def _table(samples: Sequence[Sample]) -> str:
    """Samples as a table of Markdown."""
    columns = columns_of(samples)
    rows = [columns, ["---"] * len(columns), *([_cell(sample.get(name)) for name in columns] for sample in samples)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", "<br>")
