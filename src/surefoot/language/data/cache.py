"""Token ids of large data on disk: written once, found by a hash of all they depend on, and read as memory maps.

A folder appears under its name only when it is complete, and its files are compared with their hashes when it is opened.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, overload

import filelock

from surefoot.errors import SurefootError, require_package
from surefoot.files import cache_folder, check_plain, read_table
from surefoot.store.manifest import MANIFEST, fingerprint, listed_files, read_listed_table, write_listed, write_manifest

T = TypeVar("T")
Build = Callable[[Callable[[Sequence[Any]], None]], dict[str, Any]]
"""calls its argument with every row, a value for each field in order, and returns a summary, a JSON object"""

KEPT = 30 * 24 * 3600.0
"""seconds since its last use after which a folder is deleted"""
ROWS = "rows.arrow"
BATCH = 500
"""rows that are written at a time"""


class Ragged(Sequence[Any]):
    """A column of a mapped Arrow file: lists of different lengths, or values as JSON text."""

    def __init__(self, column: Any, is_json: bool) -> None:
        self._column, self._is_json = column, is_json
        self._last: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        if not self._is_json:
            return self._column[index].values.to_numpy(zero_copy_only=False).tolist()
        if self._last[0] != index:  # several columns of a row are read one after the other
            self._last = index, json.loads(self._column[index].as_py())
        return self._last[1]

    @property
    def lengths(self) -> list[int]:
        """The length of each list."""
        from pyarrow.compute import list_value_length

        return list_value_length(self._column).to_pylist()  # type: ignore[no-any-return]


def lengths_of(rows: Sequence[Any]) -> list[int]:
    """The length of each list, without reading the lists of a cache."""
    return rows.lengths if isinstance(rows, Ragged) else [len(row) for row in rows]


class NotJson(ValueError):
    """A value that JSON can't hold, such as a date: its rows stay in memory."""


def _as_json(name: str, value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        raise NotJson(name) from None
    if repr(json.loads(text)) != repr(value):  # a tuple, or a key that is no text
        raise NotJson(name)
    return text


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
    parts: Iterable[object] | None, kinds: Mapping[str, str], build: Build
) -> tuple[dict[str, Sequence[Any]], dict[str, Any], Facts]:
    """Fields and a summary, made by ``build`` unless they are in the cache; and what was computed from them.

    parts   all that the content depends on; None: keep it in a temporary file of this process
    kinds   what each field has: "ids" and "flags", lists of them, or "json", any value

    Raises SurefootError if the cache can't be written, and what ``build`` raises.
    """
    require_package("pyarrow", "language", "the cache of token ids")
    root = cache_folder("data")
    try:
        if parts is None:
            with tempfile.TemporaryDirectory(prefix="surefoot-data-") as folder:  # maps outlive the names of their files
                _write(Path(folder), kinds, build)
                return *_opened(Path(folder), kinds), Facts()
        key = sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:32]
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root, key):
            stored = _read(root / key, kinds)
            if stored is None:
                temporary = root / f".{key}.tmp"  # of this key's lock alone: a killed process leaves it, the next removes it
                shutil.rmtree(temporary, ignore_errors=True)
                shutil.rmtree(root / key, ignore_errors=True)
                temporary.mkdir()
                try:
                    _write(temporary, kinds, build)
                    os.replace(temporary, root / key)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
                stored = _opened(root / key, kinds)
            os.utime(root / key)
        remove_unused(root)
        return *stored, Facts(root / key)
    except OSError as error:
        raise SurefootError(
            f"SUREFOOT_CACHE={str(root.parent)!r}: can't be written ({error.strerror or error}); set it to a folder with room"
        ) from None


@contextmanager
def _locked(root: Path, key: str) -> Iterator[None]:
    """Wait for other processes that write the same folder."""
    with filelock.FileLock(root / f".{key}.lock"):
        yield


def _write(folder: Path, kinds: Mapping[str, str], build: Build) -> None:
    """Write the rows, then the manifest; both are on the disk afterwards."""
    import pyarrow

    types = {"ids": pyarrow.list_(pyarrow.int32()), "flags": pyarrow.list_(pyarrow.bool_()), "json": pyarrow.string()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in kinds.items()])
    rows: list[list[Any]] = []
    with (folder / ROWS).open("wb", buffering=1 << 20) as file:
        with pyarrow.ipc.new_file(file, schema) as writer:

            def flush() -> None:
                columns = zip(*rows, strict=True) if rows else [()] * len(kinds)
                writer.write_batch(pyarrow.record_batch([list(column) for column in columns], schema=schema))
                rows.clear()

            def append(values: Sequence[Any]) -> None:
                named = zip(kinds.items(), values, strict=True)
                rows.append([_as_json(name, value) if kind == "json" else value for (name, kind), value in named])
                if len(rows) == BATCH:
                    flush()

            summary = build(append)
            flush()
        file.flush()
        os.fsync(file.fileno())
    write_manifest(folder, {"summary": summary})


def _read(folder: Path, kinds: Mapping[str, str]) -> tuple[dict[str, Sequence[Any]], dict[str, Any]] | None:
    """The fields of a complete, undamaged folder."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = fingerprint(folder / ROWS) == listed_files(folder / MANIFEST).get(ROWS)
        return _opened(folder, kinds) if whole else None
    return None


def _opened(folder: Path, kinds: Mapping[str, str]) -> tuple[dict[str, Sequence[Any]], dict[str, Any]]:
    import pyarrow

    check_plain(folder / ROWS)
    table = pyarrow.ipc.open_file(pyarrow.memory_map(str(folder / ROWS))).read_all()
    summary: dict[str, Any] = read_table(folder / MANIFEST)["summary"]
    return {name: Ragged(table[name], kind == "json") for name, kind in kinds.items()}, summary


def remove_unused(root: Path) -> None:
    """Delete folders that were not used for a long time; other processes keep reading those that they have open."""
    before = time.time() - KEPT
    for folder in root.iterdir():
        try:
            if folder.is_dir() and folder.stat().st_mtime < before:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
