"""Find and read the files of a run: traces, samples, videos, and the rows of metrics.jsonl with damaged lines left out.

This module imports no torch, so that readers start fast.
"""

import hashlib
import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
from pydantic_core import from_json  # twice as fast as json, and long runs have 100 MB of it

from surefoot.errors import SurefootError
from surefoot.files import RUNS, check_link, is_temporary, parsed, steps_named
from surefoot.store.manifest import MANIFEST, read_listed, read_listed_table

if TYPE_CHECKING:
    from surefoot.core.traces import TracedRow

FINGERPRINTS = "fingerprints.jsonl"
FINISHED = "finished.json"
TRACE = ".safetensors"
SAMPLES = ".jsonl"
TRACKERS_FILE = "trackers.json"
PROFILE = "profile"
"""the folder in a run of what ``--profile`` measured"""
SUMMARY = "summary.json"
LOCK = ".lock"
START = "start"
"""the folder in a run of the agent that it started from, if that was passed as an object"""
ROWS = "rows"
"""the folder in a run of the rows that were passed as objects; the name of a file in it is unique to its content"""
ENVIRONMENT = "environment.json"
BEGINNING = (LOCK, ROWS, START, ENVIRONMENT, MANIFEST)
"""what a run's folder has before config.toml, which makes it a run"""
LOCK_WAIT = 0.2
"""seconds to wait for a lock, because ``in_use`` has it for a moment"""


def acquire(lock: filelock.FileLock, run: Path, wait: float = LOCK_WAIT) -> None:
    """Acquire the lock of a run's folder within some seconds. Raises SurefootError if another process has it."""
    try:
        lock.acquire(timeout=wait)
    except filelock.Timeout:
        raise SurefootError(f"{run}: in use by another process; wait for it, or stop it") from None


def in_use(run: Path) -> bool:
    """Whether a process writes in a run's folder; False if that can't be seen."""
    if not (run / LOCK).is_file():
        return False
    lock = filelock.FileLock(run / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return True
    except OSError:  # a folder of another user
        return False
    lock.release()
    return False


def others_in(folder: Path) -> list[str]:
    """The names in a folder that a run which was killed before it began does not leave."""
    return sorted(path.name for path in folder.iterdir() if path.name not in BEGINNING and not is_temporary(path))


def check_is_run(path: Path) -> None:
    """Raise SurefootError unless ``path`` is a run folder."""
    check_link(path)
    if not path.exists():
        named, where = RUNS / path, Path.cwd() / (RUNS if len(path.parts) == 1 and RUNS.is_dir() else path.parent)
        remedy = f"did you mean {named}?" if (named / "config.toml").is_file() else f"see what there is with: ls {where}"
        raise SurefootError(f"{path}: no such run folder; {remedy}")
    if not path.is_dir():
        raise SurefootError(f"{path}: is a file; a run is a folder, such as runs/cartpole-v1-ppo_clip-1")
    if (path / "config.toml").is_file():
        return
    if not others_in(path):
        there = "" if path == RUNS else f" --run-dir {path}"
        raise SurefootError(f"{path}: has no run yet; begin one with: surefoot train TASK{there}")
    raise SurefootError(f"{path}: is not a run folder (no config.toml)")


def traces_in(folder: Path) -> list[Path]:
    """The files of a folder of traces, oldest first; none where there is no such folder."""
    return files_by_steps(folder, TRACE)


def samples_in(folder: Path) -> list[Path]:
    """The files of a folder of samples, oldest first; none where there is no such folder."""
    return files_by_steps(folder, SAMPLES)


def read_samples(file: Path) -> list[dict[str, Any]]:
    """The responses in a file of samples; numbers that are not finite are None, and lines that are no object are left out.

    Raises SurefootError if the file is not what the run wrote.
    """
    samples = []
    text = read_listed(file).decode("utf-8", errors="replace")
    for line in text.split("\n"):  # "\n" alone: a model may write other line ends
        with suppress(ValueError):
            samples.append(parsed(line, partial(json.loads, parse_constant=lambda _: None)))
    return [sample for sample in samples if isinstance(sample, dict)]


def files_by_steps(folder: Path, ending: str) -> list[Path]:
    """The plain files in a folder that are named by a number of steps, oldest first; none where there is no such folder."""
    paths = (path for path in folder.glob(f"*{ending}") if steps_named(path.stem) is not None and path.is_file())
    return sorted(paths, key=lambda path: int(path.stem))


def read_trackers(run: Path) -> dict[str, dict[str, Any]]:
    """The entries of trackers.json: ``identity``, and ``failed`` if an error stopped the tracker; empty if it is damaged."""
    with suppress(SurefootError):
        if (run / TRACKERS_FILE).is_file():
            return {name: entry for name, entry in read_listed_table(run / TRACKERS_FILE).items() if isinstance(entry, dict)}
    return {}


def trace_video(run: Path, steps: int, index: int, row: "TracedRow") -> Path | None:
    """Path of the video of a traced row, which ``surefoot watch --traced`` records; None for a row that can't be replayed.

    The name contains a digest of the observations, so that a row never shows the video of another episode.
    """
    observed = str(row.about.get("observed", ""))
    if not re.fullmatch(r"[0-9a-f]{64}", observed):
        return None
    return run / "videos" / "traces" / f"{steps}-{index}-{observed[:16]}.mp4"


def replay_failure(video: Path) -> Path:
    """Path of the note that explains why there is no such video: the last replay differed from the trace."""
    return video.with_suffix(".txt")


BOM = b"\xef\xbb\xbf"
LARGEST = 2**53
"""up to which every whole number is a float"""

Row = dict[str, Any]


def as_written(content: bytes, written: Mapping[str, Any] | None) -> bytes | None:
    """The beginning of a file whose size and SHA-256 are known, if not a byte of it has changed; None if they are not known."""
    part = content[: written["size"]] if written else b""
    same = written and len(part) == written["size"] and hashlib.sha256(part).hexdigest() == written["sha256"]
    return part if same else None


class History:
    """The lines of a metrics.jsonl.

    text      of the file; a line at its end that is not whole is being written, or was when a kill came
    written   size and SHA-256 of what the run had written of it by its newest checkpoint, where that is known
    """

    def __init__(self, text: bytes, written: Mapping[str, Any] | None = None) -> None:
        self.text, self.written = text.removeprefix(BOM), written

    @property
    def as_written(self) -> bytes | None:
        """What stood there when the checkpoint was saved, if not a byte of it has changed since."""
        return as_written(self.text, self.written)

    @cached_property
    def whole(self) -> list[bytes]:
        """The whole lines, rows or not."""
        return self.text.split(b"\n")[:-1]

    @cached_property
    def numbered(self) -> dict[int, Row]:
        """The rows, each under the number of its line."""
        read = [(number, row) for number, line in enumerate(self.whole, 1) if (row := row_of(line)) is not None]
        kept = in_order([row["iteration"] for _, row in read], [row["steps"] for _, row in read])
        return dict(read[index] for index in kept)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows."""
        return list(self.numbered.values())

    @property
    def damaged(self) -> list[int]:
        """The numbers of the whole lines that hold no row, or one that stands where none of its iteration can."""
        return [number for number in range(1, len(self.whole) + 1) if number not in self.numbered]

    @property
    def fault(self) -> str | None:
        """What is wrong with the file, in words that follow its name; None where nothing is."""
        damaged, faults = self.damaged, []
        if damaged:
            faults.append(unreadable(len(self.whole), len(damaged), damaged[0]))
        if self.written is not None and len(self.text) < self.written["size"]:
            faults.append(f"has {len(self.text):,} of the {self.written['size']:,} bytes that the run wrote")
        elif self.written is not None and self.as_written is None and not damaged:
            faults.append("is not what the run wrote, so any of its numbers may be wrong")
        if not faults and (gap := self.missing_iterations()):
            faults.append(gap)
        return " and ".join(faults) or None

    def missing_iterations(self, until: int = 0) -> str | None:
        """The iterations without a row before the last row, and up to ``until``, in words; None if there are none."""
        iterations = [row["iteration"] for row in self.rows]
        count = max([until, *iterations[-1:]]) - len(iterations)
        if count <= 0:
            return None
        first = next((n for n, iteration in enumerate(iterations, 1) if n != iteration), len(iterations) + 1)
        return f"lacks iteration {first:,}" if count == 1 else f"lacks {count:,} iterations, the first of them {first:,}"


def unreadable(lines: int, damaged: int, first: int) -> str:
    """How many lines of a file are damaged, and which one is the first, in words that follow the file's name."""
    which = f"line {first}" if damaged == 1 else f"{damaged:,} lines, the first of them line {first},"
    return f"has {lines:,} line{'' if lines == 1 else 's'}, of which {which} can't be read"


def row_of(line: bytes) -> Row | None:
    """The row in a line; None where there is none. Counts are whole numbers, everything else is a number or null."""
    try:
        row: Row = from_json(line, cache_strings="keys")
        array("d", [value for value in row.values() if value is not None])
        check_counts([row["iteration"]], [row["steps"]])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return row


def rows_together(lines: bytes, count: int) -> list[Row]:
    """The objects in ``count`` whole lines, parsed at once. Raises ValueError unless each line is one object.

    The caller checks that all their values are numbers or null: only inside a list could two lines be one value together.
    """
    if not (lines.startswith(b"{") and lines.endswith(b"}\n") and lines.count(b"}\n{") == count - 1):
        raise ValueError("not one object per line")
    rows: list[Row] = from_json(b"[" + lines[:-1].replace(b"\n", b",\n") + b"]", cache_strings="keys")
    if len(rows) != count:
        raise ValueError("not one object per line")
    return rows


def check_counts(*columns: Sequence[Any]) -> None:
    """Raise ValueError unless all values are whole numbers that can be the count of an iteration or of steps."""
    for column in columns:
        if set(map(type, column)) != {int} or min(column) < 0 or max(column) > LARGEST:
            raise ValueError("not a count")


def in_order(iterations: Sequence[float], steps: Sequence[float]) -> list[int]:
    """Which rows to keep, so that all rise: all but those, as few as can be, that don't fit between their neighbours."""
    kept = list(range(len(iterations)))
    for counts, search in ((iterations, bisect_left), (steps, bisect_right)):
        these = [counts[index] for index in kept]
        if any(a >= b for a, b in pairwise(these)):
            kept = [kept[index] for index in rising(these, search)]
    return kept


def rising(values: Sequence[float], search: Callable[[list[float], float], int] = bisect_left) -> list[int]:
    """Where the longest series is that rises (never falls, with ``bisect_right``)."""
    lowest: list[float] = []
    """the lowest value that a series of each length ends with"""
    at: list[int] = []
    """where those values are"""
    before: list[int | None] = []
    for index, value in enumerate(values):
        length = search(lowest, value)
        lowest[length : length + 1] = [value]
        at[length : length + 1] = [index]
        before.append(at[length - 1] if length else None)
    indices, last = [], at[-1] if at else None
    while last is not None:
        indices.append(last)
        last = before[last]
    return indices[::-1]
