"""Files of rows: JSONL, Parquet, or a folder that ``datasets`` saved; every row knows where it stands."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError, cause_of, did_you_mean
from surefoot.files import write_text
from surefoot.language.optional import needed

RENDERED = ("messages", "prompt", "completion", "chosen", "rejected", "tools", "chat_template_kwargs")
"""columns that a chat template may read"""


@dataclass(frozen=True)
class Row:
    """One row of a file: its columns, and where it stands."""

    columns: dict[str, Any]
    where: str
    """``train.jsonl, line 3``, as messages begin"""
    file: str


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines, whole or not at all."""
    write_text(Path(path), "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file, in its order.

    path   ``.jsonl``: one JSON object per line (blank lines are passed over); ``.parquet``; or a folder that
           ``datasets`` wrote by ``save_to_disk``

    Raises SurefootError, with file and line, for what is not such a file, and for one without rows.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        rows = _saved(path)
    elif not path.exists():
        beside = [str(found) for found in path.parent.iterdir()] if path.parent.is_dir() else []
        raise SurefootError(f"{path}: no such file{did_you_mean(str(path), beside)}")
    elif path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        rows = _jsonl(path)
    if not rows:
        raise SurefootError(f"{path}: has no rows; write at least one")
    return rows


def _jsonl(path: Path) -> list[Row]:
    rows = []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SurefootError(f"{path}: can't be read ({error.strerror})") from None
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            columns = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise SurefootError(f"{where}: is not UTF-8; write one JSON object per line, or a .parquet file") from None
        except (ValueError, RecursionError) as error:
            raise SurefootError(f"{where}: is not JSON ({cause_of(error)}); write one object per line") from None
        if not isinstance(columns, dict):
            raise SurefootError(f"{where}: is {kind_of(columns)}; write one JSON object per line")
        rows.append(Row(columns, where, str(path)))
    return rows


def _parquet(path: Path) -> list[Row]:
    needed("pyarrow", f"{path}: reading Parquet")
    from pyarrow import ArrowException, parquet

    try:
        columns = parquet.read_table(path, partitioning=None).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise SurefootError(f"{path}: is no Parquet file that can be read ({cause_of(error)})") from None
    return _numbered(path, columns)


def _saved(folder: Path) -> list[Row]:
    """Rows of ``Dataset.save_to_disk``: Arrow streams, which ``state.json`` lists."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(found.name for found in folder.iterdir() if (found / "state.json").is_file())
        raise SurefootError(f"{folder}: holds a folder per split ({', '.join(splits) or 'none is there'}); give one of them")
    if not (folder / "state.json").is_file():
        raise SurefootError(f"{folder}: is a folder that datasets did not save (no state.json); give a .jsonl or .parquet file")
    needed("pyarrow", f"{folder}: reading Arrow files")
    from pyarrow import ArrowException, ipc

    columns: list[dict[str, Any]] = []
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        for file in state["_data_files"]:
            with ipc.open_stream(folder / file["filename"]) as stream:
                columns += stream.read_all().to_pylist()
    except (ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise SurefootError(f"{folder}: can't be read ({cause_of(error)}); save the data set again") from None
    return _numbered(folder, columns)


def _numbered(path: Path, columns: Iterable[dict[str, Any]]) -> list[Row]:
    return [Row(_plain(row), f"{path}, row {number}", str(path)) for number, row in enumerate(columns, start=1)]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a file with a schema, in which every message and tool has the keys of all: as it was before they were added."""
    return {name: _without_nulls(value) if name in RENDERED else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def kind_of(value: Any) -> str:
    """What a value of JSON is, in words."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
