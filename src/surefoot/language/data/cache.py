"""Token ids of large data on disk: written once, found by a hash of all they depend on, and read as memory maps.

A folder appears under its name only when it is complete, and its files are compared with their hashes when it is opened.
"""

import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

import filelock
import numpy as np

from surefoot.errors import SurefootError
from surefoot.files import cache_folder, check_plain, read_table
from surefoot.store.manifest import MANIFEST, fingerprint, listed_files, read_listed_table, write_listed, write_manifest

T = TypeVar("T")

KEPT = 30 * 24 * 3600.0
"""seconds since its last use after which a folder is deleted"""
TYPES = {"ids": np.dtype(np.int32), "flags": np.dtype(np.bool_), "json": np.dtype(np.uint8)}
"""what the elements of a field are: lists of ids, lists of booleans, or values as JSON"""


class Ragged(Sequence[Any]):
    """Lists of different lengths, one after the other in one array; or values as JSON text."""

    def __init__(self, kind: str, values: np.ndarray, ends: np.ndarray) -> None:
        self.kind, self._values, self._ends = kind, values, ends
        self._last: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        """The number of lists."""
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """One list, or several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        if self.kind == "json" and self._last[0] == index:  # several columns of a row are read one after the other
            return self._last[1]
        part = self._values[0 if index == 0 else int(self._ends[index - 1]) : int(self._ends[index])]
        if self.kind != "json":
            return part.tolist()
        self._last = index, json.loads(part.tobytes())
        return self._last[1]

    @property
    def lengths(self) -> list[int]:
        """The length of each list."""
        return np.diff(self._ends, prepend=0).tolist()  # type: ignore[no-any-return]


def lengths_of(rows: Sequence[Any]) -> list[int]:
    """The length of each list, without reading the lists of a cache."""
    return rows.lengths if isinstance(rows, Ragged) else [len(row) for row in rows]


class Fields:
    """Fields that grow row by row, in memory."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.columns: dict[str, Sequence[Any]] = {name: [] for name in kinds}

    def append(self, values: Sequence[Any]) -> None:
        """Add one row: a value for each field, in order."""
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)  # type: ignore[attr-defined]


class _Writer(Fields):
    """Fields that grow on disk."""

    def __init__(self, kinds: Mapping[str, str], files: Mapping[str, tuple[BinaryIO, BinaryIO]]) -> None:
        self.kinds, self._files = kinds, files
        self._ends = dict.fromkeys(kinds, 0)

    def append(self, values: Sequence[Any]) -> None:
        """Add one row."""
        for (name, kind), value in zip(self.kinds.items(), values, strict=True):
            content, ends = self._files[name]
            if kind == "json":
                try:
                    data = json.dumps(value).encode()
                except (TypeError, ValueError):
                    raise NotJson(name) from None
                if not _same(json.loads(data), value):
                    raise NotJson(name)
                count = len(data)
            else:
                data, count = (array("i", value).tobytes() if kind == "ids" else bytes(value)), len(value)
            content.write(data)
            self._ends[name] += count
            ends.write(array("q", [self._ends[name]]).tobytes())


class NotJson(ValueError):
    """A value that JSON can't hold, such as a date: its rows stay in memory."""


def _same(first: Any, second: Any) -> bool:
    """Whether two values are equal, with equal types."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


@dataclass(frozen=True)
class Facts:
    """Values that were computed from all rows of a cache, kept in its folder; those of rows in memory are computed again."""

    folder: Path | None = None

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """A value that JSON can hold, computed unless it is in the folder.

        name  a file name; another one after every change of what is computed
        """
        if self.folder is None:
            return compute()
        path = self.folder / f"{name}.json"
        with suppress(OSError), _locked(self.folder.parent, self.folder.name):  # other ranks wait instead of computing it too
            with suppress(ValueError, KeyError):  # damaged, or not there
                return read_listed_table(path)["value"]  # type: ignore[no-any-return]
            write_listed(path, json.dumps({"value": compute()}))
            return read_listed_table(path)["value"]  # type: ignore[no-any-return]
        return compute()


def cached(
    parts: Iterable[object] | None, kinds: Mapping[str, str], build: Callable[[Fields], dict[str, Any]]
) -> tuple[dict[str, Sequence[Any]], dict[str, Any], Facts]:
    """Fields and a summary, made by ``build`` unless they are in the cache; and what was computed from them.

    parts   all that the content depends on; None: keep it in a temporary file of this process
    kinds   the fields, each with a key of ``TYPES``
    build   appends every row, and returns a summary, a JSON object

    Raises SurefootError if the cache can't be written, and what ``build`` raises.
    """
    root = cache_folder("data")
    try:
        if parts is None:
            with tempfile.TemporaryDirectory(prefix="surefoot-data-") as folder:  # maps outlive the names of their files
                _write(Path(folder), kinds, build)
                return *_opened(Path(folder), kinds), Facts()
        key = sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:32]
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root, key):
            folder_ = root / key
            stored = _read(folder_, kinds)
            if stored is None:
                temporary = root / f".{key}.tmp"  # of this key's lock alone: a killed process leaves it, the next removes it
                shutil.rmtree(temporary, ignore_errors=True)
                shutil.rmtree(folder_, ignore_errors=True)
                temporary.mkdir()
                try:
                    _write(temporary, kinds, build)
                    os.replace(temporary, folder_)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
                stored = _opened(folder_, kinds)
            os.utime(folder_)
        remove_unused(root)
        return *stored, Facts(folder_)
    except OSError as error:
        raise SurefootError(
            f"SUREFOOT_CACHE={str(root.parent)!r}: can't be written ({error.strerror or error}); set it to a folder with room"
        ) from None


@contextmanager
def _locked(root: Path, key: str) -> Iterator[None]:
    """Wait for other processes that write the same folder."""
    with filelock.FileLock(root / f".{key}.lock"):
        yield


def _names(kinds: Iterable[str]) -> list[str]:
    return [f"{name}.{part}" for name in kinds for part in ("values", "ends")]


def _write(folder: Path, kinds: Mapping[str, str], build: Callable[[Fields], dict[str, Any]]) -> None:
    """Write all files, the manifest last; all of them are on the disk afterwards."""
    files = {name: (folder / name).open("wb", buffering=1 << 20) for name in _names(kinds)}
    try:
        summary = build(_Writer(kinds, {name: (files[f"{name}.values"], files[f"{name}.ends"]) for name in kinds}))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    write_manifest(folder, {"summary": summary})


def _read(folder: Path, kinds: Mapping[str, str]) -> tuple[dict[str, Sequence[Any]], dict[str, Any]] | None:
    """The fields of a complete, undamaged folder."""
    try:
        files = listed_files(folder / MANIFEST)
        if any(fingerprint(folder / name) != files.get(name) for name in _names(kinds)):
            return None
        return _opened(folder, kinds)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _opened(folder: Path, kinds: Mapping[str, str]) -> tuple[dict[str, Sequence[Any]], dict[str, Any]]:
    def mapped(file: str, dtype: np.dtype[Any]) -> np.ndarray:
        path = folder / file
        check_plain(path)
        return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)

    summary: dict[str, Any] = read_table(folder / MANIFEST)["summary"]
    ends = np.dtype(np.int64)
    return {
        name: Ragged(kind, mapped(f"{name}.values", TYPES[kind]), mapped(f"{name}.ends", ends)) for name, kind in kinds.items()
    }, summary


def remove_unused(root: Path) -> None:
    """Delete folders that were not used for a long time; other processes keep reading those that they have open."""
    before = time.time() - KEPT
    for folder in root.iterdir():
        try:
            if folder.is_dir() and folder.stat().st_mtime < before:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
