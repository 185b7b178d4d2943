"""Traces and samples on the disk: ``traces/<steps>.safetensors`` and ``samples/<steps>.jsonl`` of a run.

A trace holds tensors, and everything else as JSON in the header; no pickle. Each file is written whole or not at all, and the
same run writes the same bytes.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.core.traces import WITH_GRADIENT, Trace, TracedRow, Visits
from surefoot.errors import SurefootError, cause_of
from surefoot.files import FULL, parsed, writing
from surefoot.store.checkpoint import pack, unpack
from surefoot.store.events import EvaluationEnd, Event, InitialSamples, Sample, UpdateEnd
from surefoot.store.manifest import MANIFEST, check_listed, clear, write_listed
from surefoot.store.reading import SAMPLES, TRACE, samples_in, traces_in
from surefoot.store.tensors import host_copies, open_tensors, tensor_bytes

FORMAT = 1
HEADER = "surefoot"


class TraceFolder:
    """Writes the traces of a run; a listener.

    folder      of the traces; made with the first one
    steps       where the run stands: later traces of an interrupted run are removed
    megabytes   limit in units of 10⁶ bytes for all files together; the oldest are removed first
    warn        called once, if a single trace exceeds the limit
    """

    def __init__(self, folder: Path, steps: int, megabytes: float, warn: Callable[[str], None] = lambda line: None) -> None:
        self.folder, self.limit, self.warn = folder, int(megabytes * 1e6), warn
        self.warned = False
        remove_later(folder, traces_in(folder), steps)

    def __call__(self, event: Event) -> None:
        if isinstance(event, UpdateEnd) and event.trace is not None:
            self.write(event.trace)

    def write(self, trace: Trace) -> None:
        """Write a trace. Raises SurefootError if writing fails."""
        content = to_bytes(trace)
        if len(content) > self.limit:
            if not self.warned:
                self.warned = True
                size, limit = len(content) / 1e6, self.limit / 1e6
                self.warn(
                    f"traces.max_megabytes={limit:g}: a trace has {size:.1f} MB and is not written; raise it, or lower "
                    "traces.rows"
                )
            return
        path = self.folder / f"{trace.steps}{TRACE}"
        with writing(path, FULL):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_listed(path, content)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        paths = traces_in(self.folder)
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            if total <= self.limit:
                break
            total -= path.stat().st_size
            path.unlink()


class SampleFolder:
    """Writes the responses before training and of each evaluation, one JSON object per response; a listener.

    folder   of the files; made with the first one
    steps    where the run stands: later files of an interrupted run are removed
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        remove_later(folder, samples_in(folder), steps)

    def __call__(self, event: Event) -> None:
        match event:
            case InitialSamples():
                self.write(event.state.steps, event.samples)
            case EvaluationEnd() if event.report.samples:
                self.write(event.state.steps, event.report.samples)

    def write(self, steps: int, samples: Sequence[Sample]) -> None:
        """Write the samples of an evaluation after so many steps. Raises SurefootError if writing fails."""
        path = self.folder / f"{steps}{SAMPLES}"
        with writing(path, FULL):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_listed(path, "".join(f"{json.dumps(sample, ensure_ascii=False)}\n" for sample in samples))


def remove_later(folder: Path, paths: Iterable[Path], steps: int) -> None:
    """Remove the files that an interrupted run wrote after ``steps``, and what a kill left half-written."""
    for path in paths:
        if int(path.stem) > steps:
            path.unlink()
    clear(folder)


def to_bytes(trace: Trace) -> bytes:
    """A trace as the bytes of a safetensors file."""
    tensors: dict[str, Tensor] = {}
    skeleton = pack(_tree(trace), "", tensors)
    return tensor_bytes(host_copies(tensors), {HEADER: json.dumps({"format": FORMAT, "trace": skeleton}, ensure_ascii=False)})


def read_trace(path: str | Path) -> Trace:
    """Read the trace in a file such as ``runs/mine/traces/5120.safetensors``.

    Raises SurefootError when there is no such file, or it is not a trace.

    >>> _ = surefoot.train("CartPole-v1", steps=256, run_dir="runs/traced")
    >>> trace = surefoot.read_trace("runs/traced/traces/256.safetensors")
    >>> row = trace.rows[0]
    >>> row.visits.ratio.shape[-1] == len(row.rewards)
    True
    """
    path = Path(path)
    with _opened(path) as file:
        header = parsed(file.metadata()[HEADER])
        if header["format"] != FORMAT:
            raise SurefootError(f"{path}: has format {header['format']}, not {FORMAT}; use the version that wrote it")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        table = unpack(header["trace"], tensors, path)
        rows = [TracedRow(**{**row, "visits": Visits(**row["visits"])}) for row in table["rows"]]
        return Trace(**{**table, "rows": rows})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A trace, open for reading. Raises SurefootError, also in the block, if there is none or it is not as the run wrote it;
    one that was copied alone can't be compared.
    """
    if not path.exists():
        raise SurefootError(f"{path}: no such file; a run's traces are in its folder traces/, unless traces.rows = 0")
    if path.with_name(MANIFEST).exists() or (path.parent.parent / "config.toml").exists():
        check_listed(path)
    try:
        with open_tensors(path) as file:
            yield file
    except SurefootError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise SurefootError(f"{path}: is not a readable trace ({cause_of(error)}); use another") from None


def clipped_samples(path: Path) -> list[tuple[int, int]]:
    """For each row of a trace: how many samples had no gradient, and how many there are. Reads only what this needs.

    A sample is one visit of a step. Raises SurefootError when the file is not a trace.
    """
    counts: list[tuple[int, int]] = []
    with _opened(path) as file:
        names = set(file.keys())
        while (name := f"rows.{len(counts)}.visits.branch") in names:
            visited = file.get_tensor(name.replace("branch", "updates")) >= 0
            flows = torch.tensor(WITH_GRADIENT)[file.get_tensor(name).long()]
            counts.append((int((visited & ~flows).sum()), int(visited.sum())))
    return counts


def _tree(value: Any) -> Any:
    """Dataclasses as tables, all the way down; no tensor is copied."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _tree(getattr(value, f.name)) for f in fields(value)}
    return [_tree(item) for item in value] if isinstance(value, list) else value
