"""TensorBoard: event files in the run's folder. It has no videos here: its own encoder would need another package."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from surefoot.files import open_file
from surefoot.runs.trackers.interface import NOTHING, TrackedRun, columns_of
from surefoot.store.events import Sample
from surefoot.store.finding import Finding

BEGINNING = 3
"""records at the beginning of a file in which its session is"""
FILES = "events.out.tfevents.*"
STEPS = "steps"
"""tag of a number that every row has"""


class TensorBoard:
    """Writes ``events.*``. TensorBoard hides what a killed run wrote after its checkpoint, so no row is shown twice."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.identity: dict[str, Any] = {}
        continued = any(run.folder.glob(FILES))
        self.last_step = _last_step(run.folder, run.steps)
        # Hides what follows in older files: rows of a killed process, and parts of a row.
        self.writer = SummaryWriter(str(run.folder), purge_step=max(1, self.last_step + 1))
        if not continued:
            self.writer.add_text("recipe", f"```toml\n{tomli_w.dumps(dict(run.table))}```", 0)

    def log(self, steps: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Write and flush: a checkpoint follows only rows that are in the file."""
        for name in sorted(metrics, key=lambda name: name == STEPS):  # steps last: a row that has it is whole
            self.writer.add_scalar(name, metrics[name], steps)
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
    """Steps of the newest row in the event files that TensorBoard shows and that is not past ``most``; ``NOTHING`` if none."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    rows: list[int] = []
    for path in sorted(folder.glob(FILES)):  # their names have the time at which they were opened
        for number, record in enumerate(_records(path)):
            if number > BEGINNING and STEPS.encode() not in record:
                continue
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:  # hides later rows of older files
                rows = [steps for steps in rows if steps < event.step]
            rows += [int(event.step) for value in event.summary.value if value.tag == STEPS]
    return max((steps for steps in rows if steps <= most), default=NOTHING)


def _records(path: Path) -> Iterator[bytes]:
    """The records of an event file: a length of 8 bytes, a checksum of 4, the record, its checksum."""
    with open_file(path) as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            record = file.read(length)
            if len(record) < length or len(file.read(4)) < 4:
                return  # cut off by a kill
            yield record


def _table(samples: Sequence[Sample]) -> str:
    """Samples as a table of Markdown."""
    columns = columns_of(samples)
    rows = [columns, ["---"] * len(columns), *([_cell(sample.get(name)) for name in columns] for sample in samples)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", "<br>")
