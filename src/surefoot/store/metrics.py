"""metrics.jsonl and fingerprints.jsonl: one row per iteration, written as the run goes, and cut back on resume."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from surefoot.files import FULL, read_bytes, read_table, write_bytes, writing
from surefoot.store.checkpoint import checkpoints_in
from surefoot.store.events import Event, IterationEnd, RunEnd, UpdateEnd
from surefoot.store.manifest import MANIFEST, flush
from surefoot.store.reading import FINGERPRINTS, History, Row, as_written

FILE = "metrics.jsonl"
DAMAGED = "metrics.damaged.jsonl"


def read_history(run: Path) -> History:
    """The metrics of a run, and whether they are what it wrote.

    Raises SurefootError when the file can't be read.
    """
    return History(*_read(run, FILE))


def _read(run: Path, name: str) -> tuple[bytes, dict[str, Any] | None]:
    """A file of rows; size and SHA-256 of what the run had written of it by its newest checkpoint, if that is known."""
    written = None
    with suppress(IndexError, ValueError, KeyError, TypeError):
        # First: a run that goes on writes its rows before its checkpoint.
        rows = read_table(checkpoints_in(run / "checkpoints")[-1] / MANIFEST)[Path(name).stem]
        written = {"size": int(rows["size"]), "sha256": str(rows["sha256"])}
    return read_bytes(run / name) if (run / name).exists() else b"", written


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, one for each iteration; what is no row is left out. None where there is no file.

    Raises SurefootError when it can't be read.
    """
    return History(read_bytes(path) if path.exists() else b"").rows


@dataclass(frozen=True)
class Fingerprinted:
    """The lines of a run's fingerprints.jsonl."""

    lines: list[tuple[int, bytes]]
    """each with its iteration; what is no line of it is left out"""
    rows: dict[int, dict[str, Any]]
    """by iteration, the fingerprint of each stage: 16 digits, √Σx² and Σ±x; None for a sum that is not finite"""
    taken: dict[int, list[Any]]
    """the actions of some iterations: for each rank their shape, and float32 numbers in base64"""
    machines: dict[int, dict[str, Any]]
    """what they depend on besides the recipe, by the first iteration that was computed with it"""
    fault: str | None
    """what is wrong with the file, in words that follow its name; None where nothing is"""

    def machine_of(self, iteration: int) -> dict[str, Any]:
        """What an iteration was computed with."""
        return self.machines.get(max((first for first in self.machines if first <= iteration), default=0), {})


def read_fingerprints(run: Path) -> Fingerprinted:
    """The fingerprints of a run; none without the file."""
    content, written = _read(run, FINGERPRINTS)
    changed = written is not None and as_written(content, written) is None
    record = Fingerprinted([], {}, {}, {}, "is not what the run wrote (changed or damaged)" if changed else None)
    for line in content.split(b"\n")[:-1]:
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            row = from_json(line, cache_strings="keys")
            iteration = row.pop("iteration")
            if "machine" in row:
                record.machines[iteration] = dict(row["machine"])
            else:
                row.pop("steps", None)
                record.taken.update({iteration: row.pop("taken")} if "taken" in row else {})
                record.rows[iteration] = {stage: (str(sums[0]), *sums[1:3]) for stage, sums in row.items()}
            record.lines.append((iteration, line + b"\n"))
    return record


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
            with suppress(OSError):  # a full disk, which a write has reported
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
