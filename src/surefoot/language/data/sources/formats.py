"""Read the rows of one file, one at a time: JSON lines, JSON, CSV, Parquet, Arrow; plain or compressed."""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from surefoot.errors import SurefootError, cause_of, require_package
from surefoot.files import from_json, open_file, read_table, unique
from surefoot.language.data.rows import RENDERED, Row, json_type

COMPRESSED = (".gz", ".zst")
CHUNK = 1 << 20
"""bytes or characters read at a time"""
BATCH = 500
"""rows of a Parquet or Arrow file converted at a time"""
Columns = dict[str, Any]


def suffix_of(path: Path) -> str:
    """The suffix that names a file's format, without that of its compression: ``.jsonl`` of ``a.jsonl.gz``."""
    path = path.with_suffix("") if path.suffix in COMPRESSED else path
    return path.suffix.lower()


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a file, in order. A file with an unknown suffix contains JSON lines.

    Raises SurefootError, with file and line, for what can't be read.
    """
    read = READERS.get(suffix_of(path), jsonl_rows)
    try:
        yield from read(path)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or cause_of(error)
        remedy = "; compress it again" if path.suffix in COMPRESSED else ""
        raise SurefootError(f"{path}: can't be read ({reason}){remedy}") from None
    except csv.Error as error:
        raise SurefootError(f"{path}: is not CSV ({error}); write it with a header line and quoted cells") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed."""
    with open_file(path) as file:
        if path.suffix == ".gz":
            with gzip.open(file) as content:
                yield cast(BinaryIO, content)
        elif path.suffix == ".zst":
            require_package("zstandard", "data", f"{path}: reading .zst")
            yield cast(BinaryIO, io.BufferedReader(cast(Any, ZstandardFile(file)), CHUNK))
        else:
            yield file


class ZstandardFile(io.RawIOBase):
    """The decompressed content of a file of Zstandard frames. A frame that is cut off is an error, which
    ``zstandard.open`` reads as the end of the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file, self._error = file, zstandard.ZstdError
        self._new: Callable[[], Any] = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame: Any = None
        self._input, self._output = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; 0 at the end. Raises EOFError for damage, and for an unfinished frame."""
        while not self._output:
            self._input = self._input or self._file.read(CHUNK)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends before the end of its compressed data")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._output = self._frame.decompress(self._input)
            except self._error as error:
                raise EOFError(str(error)) from None
            self._input, self._frame = (self._frame.unused_data, None) if self._frame.eof else (b"", self._frame)
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


# ---- JSON -------------------------------------------------------------------------------------------------------------


def jsonl_rows(path: Path) -> Iterator[Row]:
    """One JSON object per line; blank lines are skipped."""
    with _opened(path) as content:
        for number, line in enumerate(content, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                where = f"{path}, line {number}"
                yield Row(_object(line.removesuffix(b"\n"), where), where, str(path))


def _object(line: bytes, where: str) -> Columns:
    try:
        columns = from_json(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise SurefootError(f"{where}: is not UTF-8; write one JSON object per line, or a .parquet file") from None
    except (ValueError, RecursionError) as error:
        raise SurefootError(f"{where}: is not JSON ({cause_of(error)}); write one object per line") from None
    if not isinstance(columns, dict):
        raise SurefootError(f"{where}: is {json_type(columns)}; write one JSON object per line")
    return columns


def json_rows(path: Path) -> Iterator[Row]:
    """A list of objects, an object whose only list has them, or JSON lines under another name."""
    with _opened(path) as content:
        start = content.read(CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] == b"[":
        yield from _numbered(path, _list_elements(path), has_schema=False)
        return
    try:
        json.loads(start.partition(b"\n")[0])
    except (ValueError, RecursionError):
        yield from _numbered(path, _only_list(path), has_schema=False)
    else:
        yield from jsonl_rows(path)


def _list_elements(path: Path) -> Iterator[Any]:
    """The elements of a JSON list, without holding all of them."""
    decode = json.JSONDecoder(object_pairs_hook=unique).raw_decode
    with _opened(path) as content, io.TextIOWrapper(cast(Any, content), "utf-8-sig") as text:
        buffer, size, before = "", CHUNK, "["
        try:
            while True:
                buffer = buffer.lstrip(" \t\r\n")
                rest = buffer[1:].lstrip(" \t\r\n")
                ends = buffer[:1] == "]" if before == "," else buffer[:1] == "[" and rest[:1] == "]"
                if ends and not (buffer.partition("]")[2] + text.read(CHUNK)).strip():
                    return
                if ends or (buffer and buffer[0] != before):
                    raise SurefootError(f"{path}: is not JSON (expected {before!r} of one list); write a list of objects")
                try:
                    element, end = decode(rest)
                    if end == len(rest):  # a number could go on, and something must follow
                        raise ValueError("the list has no end")
                except (ValueError, RecursionError) as error:
                    piece = text.read(size)
                    if not piece:
                        raise SurefootError(f"{path}: is not JSON ({cause_of(error)}); write a list of objects") from None
                    buffer, size = buffer + piece, size * 2
                    continue
                yield element
                buffer, size, before = rest[end:], CHUNK, ","
        except UnicodeDecodeError:
            raise SurefootError(f"{path}: is not UTF-8; write it again") from None


def _only_list(path: Path) -> Iterable[Any]:
    """The list in an object such as ``{"data": [...]}``; the object itself if it has none."""
    with _opened(path) as content:
        try:
            value = from_json(content.read().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise SurefootError(f"{path}: is not JSON ({cause_of(error)}); write a list of objects") from None
    lists = [part for part in value.values() if isinstance(part, list)] if isinstance(value, dict) else []
    if len(lists) == 1 and all(isinstance(part, dict) and "role" not in part and "from" not in part for part in lists[0]):
        return lists[0]
    return [value]


# ---- tables -----------------------------------------------------------------------------------------------------------


def csv_rows(path: Path) -> Iterator[Row]:
    """Lines of cells, all of them text, after a line with the names of the columns."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # by default a cell may have 131,072 characters
    with _opened(path) as content, io.TextIOWrapper(cast(Any, content), "utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter="\t" if suffix_of(path) == ".tsv" else ",", strict=True)
        try:
            names = next(lines, [])
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated or (names and not all(name.strip() for name in names)):
                what = f"repeats {', '.join(map(repr, repeated))}" if repeated else "has an empty name"
                raise SurefootError(f"{path}, line 1: the header {what}; give every column its own name")
            for cells in lines:
                if not cells:
                    continue
                where = f"{path}, line {lines.line_num}"
                if len(cells) != len(names):
                    raise SurefootError(f"{where}: has {len(cells)} cells and the header {len(names)}; quote cells with commas")
                yield Row(dict(zip(names, cells, strict=True)), where, str(path))
        except UnicodeDecodeError:
            raise SurefootError(f"{path}: is not UTF-8; write it again as UTF-8") from None


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file."""
    require_package("pyarrow", "language", f"{path}: reading Parquet")
    from pyarrow import ArrowException, parquet

    def batches() -> Iterator[Columns]:
        try:
            with open_file(path) as plain, parquet.ParquetFile(plain) as file:
                for batch in file.iter_batches(BATCH):
                    yield from batch.to_pylist()
        except (ArrowException, OSError, ValueError) as error:
            raise SurefootError(f"{path}: can't be read as Parquet ({cause_of(error)}); write the file again") from None

    yield from _numbered(path, batches())


def saved_rows(folder: Path) -> Iterator[Row]:
    """Rows of ``Dataset.save_to_disk``: Arrow streams, which ``state.json`` lists."""
    require_package("pyarrow", "language", f"{folder}: reading Arrow files")
    from pyarrow import ArrowException, ipc

    def batches() -> Iterator[Columns]:
        try:
            state = read_table(folder / "state.json")
            for file in state["_data_files"]:
                with open_file(folder / file["filename"]) as plain, ipc.open_stream(plain) as stream:
                    for batch in stream:
                        yield from batch.to_pylist()
        except (ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise SurefootError(f"{folder}: can't be read ({cause_of(error)}); save the data set again") from None

    yield from _numbered(folder, batches())


def _numbered(path: Path, values: Iterable[Any], has_schema: bool = True) -> Iterator[Row]:
    for number, columns in enumerate(values, start=1):
        where = f"{path}, row {number}"
        if not isinstance(columns, dict):
            raise SurefootError(f"{where}: is {json_type(columns)}; write a list of objects")
        yield Row(without_schema_nulls(columns) if has_schema else columns, where, str(path))


def without_schema_nulls(row: Columns) -> Columns:
    """Remove the nulls that a schema adds: every message and tool gets the keys of all."""
    return {name: _without_nulls(value) if name in RENDERED else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": jsonl_rows,
    ".ndjson": jsonl_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".parquet": parquet_rows,
}
"""reader of each suffix"""
