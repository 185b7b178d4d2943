"""Traces on the disk: ``traces/<steps>.safetensors`` of a run, tensors with everything else as JSON in the header.

Each file is written whole or not at all, and holds no pickle. The same run writes the same bytes.
"""

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from surefoot.core.traces import Trace, TracedRow, Visits
from surefoot.errors import SurefootError, cause_of
from surefoot.files import check_plain, parsed, write_bytes, write_text
from surefoot.runs.checkpoint import pack, unpack
from surefoot.runs.events import Sample
from surefoot.runs.folder import TRACE as ENDING
from surefoot.runs.folder import samples_in, traces_in

FORMAT = 1
HEADER = "surefoot"


class TraceFolder:
    """The traces of a run that is written to.

    folder      of the traces; made with the first one
    steps       up to where the run stands: what an interrupted one wrote beyond is removed
    megabytes   of 10⁶ bytes, that all files together may take; the oldest make room
    """

    def __init__(self, folder: Path, steps: int, megabytes: float) -> None:
        self.folder, self.limit = folder, int(megabytes * 1e6)
        self.told = False
        for path in traces_in(folder):
            if int(path.stem) > steps:
                path.unlink()
        for path in folder.glob(".*.tmp"):
            path.unlink()

    def write(self, trace: Trace) -> str | None:
        """Write a trace; what is to be said, once, where it alone is larger than all may be.

        Raises SurefootError when the disk refuses.
        """
        content, path = to_bytes(trace), self.folder / f"{trace.steps}{ENDING}"
        if len(content) > self.limit:
            first, self.told = not self.told, True
            size, limit = len(content) / 1e6, self.limit / 1e6
            return (
                f"traces.max_megabytes={limit:g}: a trace has {size:.1f} MB and is not written; raise it, or lower traces.rows"
                if first
                else None
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content)
        except OSError as error:
            raise SurefootError(f"{path}: can't be written ({error.strerror}); free space and resume") from None
        self._make_room()
        return None

    def _make_room(self) -> None:
        paths = traces_in(self.folder)
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            if total <= self.limit:
                break
            total -= path.stat().st_size
            path.unlink()


class SampleFolder:
    """The samples of a run that is written to: one file for each evaluation, a JSON object per answer.

    folder   of the files; made with the first one
    steps    up to where the run stands: what an interrupted one wrote beyond is removed
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        for path in samples_in(folder):
            if int(path.stem) > steps:
                path.unlink()

    def write(self, steps: int, samples: Sequence[Sample]) -> None:
        """Write what was said after so many steps, whole or not at all. Raises SurefootError when the disk refuses."""
        path = self.folder / f"{steps}.jsonl"
        try:
            self.folder.mkdir(exist_ok=True)
            write_text(path, "".join(f"{json.dumps(sample, ensure_ascii=False)}\n" for sample in samples))
        except OSError as error:
            raise SurefootError(f"{path}: can't be written ({error.strerror}); free space and resume") from None


def to_bytes(trace: Trace) -> bytes:
    """A trace as the bytes of a safetensors file."""
    tensors: dict[str, Tensor] = {}
    skeleton = pack(_tree(trace), "", tensors)
    return save(tensors, {HEADER: json.dumps({"format": FORMAT, "trace": skeleton}, ensure_ascii=False)})


def read_trace(path: str | Path) -> Trace:
    """The trace in a file such as ``runs/mine/traces/5120.safetensors``.

    Raises SurefootError when there is no such file, or it is no trace.
    """
    path = Path(path)
    try:
        check_plain(path)
        with safe_open(path, "pt") as file:
            header = parsed(file.metadata()[HEADER])
            if header["format"] != FORMAT:
                raise SurefootError(f"{path}: has format {header['format']}, not {FORMAT}; use the version that wrote it")
            table = unpack(header["trace"], {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        rows = [TracedRow(**{**row, "visits": Visits(**row["visits"])}) for row in table["rows"]]
        return Trace(**{**table, "rows": rows})
    except SurefootError:
        raise
    except FileNotFoundError:
        raise SurefootError(f"{path}: no such file; a run's traces are in its folder traces/, unless traces.rows = 0") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise SurefootError(f"{path}: is no trace that can be read ({cause_of(error)})") from None


def _tree(value: Any) -> Any:
    """Dataclasses as tables, all the way down; no tensor is copied."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _tree(getattr(value, f.name)) for f in fields(value)}
    return [_tree(item) for item in value] if isinstance(value, list) else value
