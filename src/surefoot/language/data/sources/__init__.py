"""Open rows by name: a file, a folder, a pattern of files, or a data set on the hub."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from glob import glob
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from surefoot.errors import SurefootError, cause_of, did_you_mean
from surefoot.files import open_file
from surefoot.language.data.rows import Row, check_values, json_type
from surefoot.language.data.sources.formats import COMPRESSED, READERS, rows_of, saved_rows, suffix_of, without_schema_nulls
from surefoot.language.data.sources.hub import hub_rows, hub_size, pinned
from surefoot.store.hub import is_hub_name

EXPANSION = 5
"""bytes of text per byte of a compressed file, about"""
SPLITS = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")
"""names of splits within the names of files"""
HEAD = 100
"""rows in which a renamed column must occur"""
STATE = "state.json"
"""lists the files of a folder that ``datasets`` wrote"""
IMAGES = ("image", "images", "audio", "audios", "video", "videos")
"""columns that vision-language data sets have, which a model of text would not see"""


class Source:
    """Rows that can be read again and again, one at a time.

    name     of a file, a folder or a pattern, or on the hub with its commit
    files    of the name, in order; None: it is on the hub
    columns  new names of columns
    """

    def __init__(self, name: str, files: list[Path] | None, columns: Mapping[str, str] | None = None) -> None:
        self.name, self.files, self.columns = name, files, dict(columns or {})

    def __iter__(self) -> Iterator[Row]:
        """The rows, with renamed columns. Raises SurefootError if there are none, and for a row with images, sound or video."""
        rows = self._read()
        head = list(islice(rows, HEAD))
        if not head:
            raise SurefootError(f"{self.name}: has no rows; write at least one")
        self._check_columns(head)
        for row in chain(head, rows):
            self._check_text(row)
            yield self._renamed(row) if self.columns else row

    def _read(self) -> Iterator[Row]:
        if self.files is None:
            return hub_rows(self.name)
        saved = Path(self.name)
        return saved_rows(saved) if saved / STATE in self.files else chain.from_iterable(map(rows_of, self.files))

    @property
    def size(self) -> int:
        """Bytes, about."""
        if self.files is None:
            return hub_size(self.name)
        dense = (*COMPRESSED, ".parquet")
        return sum(file.stat().st_size * (EXPANSION if file.suffix in dense else 1) for file in self.files)

    @property
    def content(self) -> str:
        """A hash of everything that the rows depend on: of the files' names and contents."""
        if self.files is None:
            return self.name
        digest = hashlib.sha256()
        for path in self.files:
            with open_file(path) as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return digest.hexdigest()

    def _check_text(self, row: Row) -> None:
        for name in IMAGES:
            if row.columns.get(name) not in (None, [], "") and self.columns.get(name, name) == name:
                raise SurefootError(
                    f"{row.where}: has a column {name!r}, and only text is trained; remove the column, or give it another "
                    f'name for rewards that read it: data.columns = {{ {name} = "picture" }}'
                )
        check_values(row.columns, row.where)

    def _check_columns(self, head: list[Row]) -> None:
        known = dict.fromkeys(name for row in head for name in row.columns)
        for own, new in self.columns.items():
            if own not in known:
                turned = f"; the column of the file comes first: {new} = {own!r}" if new in known else did_you_mean(own, known)
                raise SurefootError(
                    f"data.columns: {self.name} has no column {own!r}{turned}; columns here: "
                    f"{', '.join(map(repr, known)) or 'none'}"
                )

    def _renamed(self, row: Row) -> Row:
        columns: dict[str, Any] = {}
        for name, value in row.columns.items():
            new = self.columns.get(name, name)
            if new in columns or (new != name and new in row.columns and new not in self.columns):
                raise SurefootError(f"data.columns: {row.where} has a column {new!r} already; rename that one too")
            columns[new] = value
        return Row(columns, row.where, row.file)


def save_rows(rows: Iterable[Any], folder: Path, field: str) -> Path:
    """Write rows that were passed as objects as JSON lines: ``train-<hash>.jsonl`` for ``data.train``, by content.

    rows   dicts, or a ``datasets.Dataset``; NumPy numbers and arrays in them become numbers and lists

    Raises SurefootError, with field and row, for what is not a row, or what JSON can't hold; and without rows.
    """
    name, nulls = field.rpartition(".")[2], hasattr(rows, "features")  # a Dataset's schema adds nulls
    digest, temporary = hashlib.sha256(), folder / f".{name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            for number, row in enumerate(rows, start=1):
                line = _line(row, f"{field}: row {number}", nulls)
                digest.update(line)
                file.write(line)
        if not temporary.stat().st_size:
            raise SurefootError(f"{field}: has no rows; pass at least one")
        saved = folder / f"{name}-{digest.hexdigest()[:16]}.jsonl"
        os.replace(temporary, saved)
        return saved
    except OSError as error:
        raise SurefootError(f"{field}: its rows can't be written to {folder} ({error.strerror}); free space there") from None
    finally:
        temporary.unlink(missing_ok=True)


def _line(row: Any, where: str, nulls: bool) -> bytes:
    if not isinstance(row, Mapping):
        raise SurefootError(f"{where} is {json_type(row)}; pass rows as dicts, such as {{'prompt': …}}")
    columns = without_schema_nulls(dict(row)) if nulls else dict(row)
    try:
        line = json.dumps(columns, default=_plain, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise SurefootError(
            f"{where} has what JSON can't hold ({cause_of(error)}); use text, numbers, lists and dicts"
        ) from None
    check_values(columns, where)  # after JSON has rejected lists that contain themselves
    return line


def _plain(value: Any) -> Any:
    """The Python value of a number or array of NumPy, or of a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__}")
    return value.tolist()


_process_folder = cache(partial(TemporaryDirectory, prefix="surefoot-rows-"))


def process_folder() -> Path:
    """A folder for rows that were passed as objects, which this process removes when it ends."""
    return Path(_process_folder().name)


def read_rows(path: str | Path) -> list[Row]:
    """All rows of ``open_rows``, in order."""
    return list(open_rows(path))


def open_rows(path: str | Path, columns: Mapping[str, str] | None = None) -> Source:
    """The rows of a file, in order.

    path      ``.jsonl``: one JSON object per line; ``.json``: a list of objects; ``.csv`` and ``.tsv`` with a header;
              ``.parquet``. All of them may be compressed: ``.gz``, ``.zst``. A folder of such files, or that ``datasets``
              wrote by ``save_to_disk``; a pattern such as ``data/train-*.parquet``; or ``hf://org/name:split``
    columns   own names of columns and the names they are read by, such as {"question": "prompt"}

    Raises SurefootError for a path that doesn't exist or can't be read; iterating raises it, with file and line, for what is
    not a row, and if there are none.
    """
    if is_hub_name(path):
        return Source(pinned(str(path)), None, columns)
    path = Path(path).expanduser()
    return Source(str(path), _files(path), columns)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            splits = sorted(split.name for split in path.iterdir() if (split / STATE).is_file())
            raise SurefootError(
                f"{path}: contains one folder per split ({', '.join(splits) or 'all are missing'}); give one of them"
            )
        saved = (path / STATE).is_file()
        return sorted(file for file in path.iterdir() if file.is_file()) if saved else _folder_files(path)
    if path.exists():
        return [path]
    files = [Path(name) for name in sorted(glob(str(path), recursive=True))] if "*" in str(path) else []
    if not files:
        others = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise SurefootError(f"{path}: no such file{did_you_mean(str(path), others)}")
    return files


def _folder_files(folder: Path) -> list[Path]:
    """The data files of a folder and its subfolders. Raises SurefootError unless all have one format and one split."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and suffix_of(file) in READERS)
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    formats = sorted({suffix_of(file) for file in files})
    if (".parquet" not in formats and ".jsonl" not in formats) or len(formats) > 1:
        there = f"has {' and '.join(formats)} files" if formats else "has no .parquet or .jsonl files"
        raise SurefootError(f"{folder}: was not saved by datasets (no state.json) and {there}; give a file")
    splits = sorted({name for file in files for name in SPLITS.findall(str(file.relative_to(folder)).lower())[:1]})
    if len(splits) > 1:
        raise SurefootError(
            f"{folder}: has files of several splits ({', '.join(splits)}); give those of one, such as "
            f"'{folder}/**/{splits[-1]}*{''.join(files[0].suffixes[-1:])}'"
        )
    return files
