"""metrics.jsonl and fingerprints.jsonl: one row per iteration, written as the run goes, and cut back on resume."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surefoot.files import FULL, read_bytes, write_bytes, writing
from surefoot.store.checkpoint import checkpoints_in, written_before
from surefoot.store.events import Event, IterationEnd, RunEnd, UpdateEnd
from surefoot.store.manifest import flush
from surefoot.store.reading import FINGERPRINTS, History, Row, read_fingerprints

FILE = "metrics.jsonl"
DAMAGED = "metrics.damaged.jsonl"


def read_history(run: Path) -> History:
    """The metrics of a run, and whether they are what it wrote.

    Raises SurefootError when the file can't be read.
    """
    checkpoints = checkpoints_in(run / "checkpoints")  # first: a run that goes on writes its metrics before its checkpoint
    written = written_before(checkpoints[-1]) if checkpoints else None
    return History(read_bytes(run / FILE) if (run / FILE).exists() else b"", written)


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, one for each iteration; what is no row is left out. None where there is no file.

    Raises SurefootError when it can't be read.
    """
    return History(read_bytes(path) if path.exists() else b"").rows


class RowFile:
    """Appends one JSON object per iteration to a file that is cut back to ``kept``; a listener.

    row_of   the row that an event brings; None without one
    """

    def __init__(self, path: Path, kept: bytes, row_of: Callable[[Event], Mapping[str, Any] | None]) -> None:
        self.path, self.row_of = path, row_of
        self.digest, self.size = hashlib.sha256(kept), len(kept)
        self.file = self.path.open("ab")

    def __call__(self, event: Event) -> None:
        if (row := self.row_of(event)) is not None:
            self.write(row)
        if isinstance(event, RunEnd):
            with contextlib.suppress(OSError):  # a full disk, which a write has reported
                self.file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. Raises SurefootError if writing fails."""
        line = json.dumps(row).encode() + b"\n"
        with writing(self.path, FULL):
            self.file.write(line)
            self.file.flush()
        self.digest.update(line)
        self.size += len(line)

    def fingerprint(self) -> dict[str, Any]:
        """Size and SHA-256 of the file as it is now, for the checkpoint that follows; ``flush`` comes before its commit."""
        return {"size": self.size, "sha256": self.digest.hexdigest()}

    def flush(self) -> None:
        """Flush the file to the disk. Raises SurefootError if that fails."""
        with writing(self.path, FULL):
            flush(self.path)


def metrics_file(folder: Path, iteration: int, warn: Callable[[str], None]) -> RowFile:
    """The metrics of a run, up to an iteration: later rows of an interrupted run are removed.

    warn   called with one line if the file is damaged
    """
    kept = cut_back(folder, iteration, warn)
    return RowFile(folder / FILE, kept, lambda event: event.metrics if isinstance(event, IterationEnd) else None)


def fingerprint_file(folder: Path, iteration: int, machine: Mapping[str, Any]) -> RowFile:
    """The fingerprints of a run, up to an iteration.

    machine   what they depend on besides the recipe: a line before the first that was computed with it
    """
    record = read_fingerprints(folder)
    kept = b"".join(line for at, line in record.lines if at <= iteration)
    with writing(folder / FINGERPRINTS, FULL):
        write_bytes(folder / FINGERPRINTS, kept)

    def row_of(event: Event) -> Mapping[str, Any] | None:
        if not isinstance(event, UpdateEnd) or event.fingerprints is None:
            return None
        return {"iteration": event.state.iteration, "steps": event.state.steps, **event.fingerprints}

    file = RowFile(folder / FINGERPRINTS, kept, row_of)
    if json.loads(json.dumps(machine)) != record.machine_of(iteration) or not kept:
        file.write({"iteration": iteration + 1, "machine": machine})
    return file


def cut_back(run: Path, iteration: int, warn: Callable[[str], None]) -> bytes:
    """Drop the rows of iterations after ``iteration`` and a line that a kill left unfinished; what is kept.

    Damaged lines go to ``metrics.damaged.jsonl``. Raises SurefootError if writing fails.
    """
    path, history = run / FILE, read_history(run)
    kept = history.as_written
    with writing(path, FULL):
        if kept is None:
            kept = b"".join(
                history.whole[n - 1] + b"\n" for n, row in history.numbered.items() if row["iteration"] <= iteration
            )
            if (fault := history.fault or history.missing_iterations(iteration)) is not None:
                aside = _set_aside(run / DAMAGED, [history.whole[n - 1] for n in history.damaged])
                warn(f"! {path}: {fault}{aside}")
        write_bytes(path, kept)
    return kept


def _set_aside(path: Path, lines: list[bytes]) -> str:
    """Keep lines that are taken out, each once; a clause that says so."""
    if not lines:
        return ""
    there = set(read_bytes(path).split(b"\n")) if path.exists() else set()
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in lines if line not in there)
    flush(path)
    return f"; what can't be read is kept in {path.name}"
