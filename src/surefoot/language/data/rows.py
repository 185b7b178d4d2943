"""Read and write files of rows: JSONL, Parquet, or a folder that ``datasets`` saved."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError, cause_of, did_you_mean
from surefoot.files import write_text
from surefoot.language import require_package

TOOLS, SETTINGS = "tools", "chat_template_kwargs"
"""columns for the chat template of a row's messages"""
CALLS, WEIGHT = "tool_calls", "weight"
"""keys of a message: tool calls, which may replace its content; and 1 or 0, whether it is trained"""
RENDERED = ("messages", "prompt", "completion", "chosen", "rejected", "tools", "chat_template_kwargs")
"""columns passed to a chat template"""


@dataclass(frozen=True)
class Row:
    """One row of a file: its columns and its location."""

    columns: dict[str, Any]
    where: str
    """such as ``train.jsonl, line 3``; errors begin with it"""
    file: str


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines atomically."""
    write_text(Path(path), "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file, in order.

    path   ``.jsonl``: one JSON object per line (blank lines are skipped); ``.parquet``; or a folder that
           ``datasets`` wrote by ``save_to_disk``

    Raises SurefootError, with file and line, for another kind of file, and for a file without rows.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        rows = _saved_dataset(path)
    elif not path.exists():
        others = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise SurefootError(f"{path}: no such file{did_you_mean(str(path), others)}")
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
            raise SurefootError(f"{where}: is {json_type(columns)}; write one JSON object per line")
        rows.append(Row(columns, where, str(path)))
    return rows


def _parquet(path: Path) -> list[Row]:
    require_package("pyarrow", f"{path}: reading Parquet")
    from pyarrow import ArrowException, parquet

    try:
        columns = parquet.read_table(path, partitioning=None).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise SurefootError(f"{path}: can't be read as Parquet ({cause_of(error)}); write the file again") from None
    return _number_rows(path, columns)


def _saved_dataset(folder: Path) -> list[Row]:
    """Rows of ``Dataset.save_to_disk``: Arrow streams, which ``state.json`` lists."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(split.name for split in folder.iterdir() if (split / "state.json").is_file())
        raise SurefootError(
            f"{folder}: contains one folder per split ({', '.join(splits) or 'all are missing'}); give one of them"
        )
    if not (folder / "state.json").is_file():
        raise SurefootError(f"{folder}: was not saved by datasets (no state.json); give a .jsonl or .parquet file")
    require_package("pyarrow", f"{folder}: reading Arrow files")
    from pyarrow import ArrowException, ipc

    columns: list[dict[str, Any]] = []
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        for file in state["_data_files"]:
            with ipc.open_stream(folder / file["filename"]) as stream:
                columns += stream.read_all().to_pylist()
    except (ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise SurefootError(f"{folder}: can't be read ({cause_of(error)}); save the data set again") from None
    return _number_rows(folder, columns)


def _number_rows(path: Path, columns: Iterable[dict[str, Any]]) -> list[Row]:
    return [Row(_without_schema_nulls(row), f"{path}, row {number}", str(path)) for number, row in enumerate(columns, start=1)]


def _without_schema_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Remove the nulls that a schema adds: every message and tool gets the keys of all."""
    return {name: _without_nulls(value) if name in RENDERED else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def json_type(value: Any) -> str:
    """The type of a JSON value, in words."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def require_columns(row: Row, names: Sequence[str], shape: str) -> None:
    for name in names:
        if name not in row.columns:
            there = ", ".join(map(repr, row.columns)) or "none"
            raise SurefootError(f"missing column {name!r}{did_you_mean(name, row.columns)}; {shape}; columns here: {there}")


def text_or_messages(row: Row, name: str) -> str | list[dict[str, Any]]:
    """The text or messages of a column."""
    value = row.columns[name]
    return messages_column(row, name) if isinstance(value, list) else text_column(row, name, "text or a list of messages")


def text_column(row: Row, name: str, wanted: str = "text") -> str:
    value = row.columns[name]
    if not isinstance(value, str):
        raise SurefootError(f"column {name!r} is {json_type(value)}; it must be {wanted}")
    return value


def messages_column(row: Row, name: str) -> list[dict[str, Any]]:
    """The messages of a column: objects with a role, and a content or tool calls.

    Null keys, which Parquet adds, are removed.
    """
    value = row.columns[name]
    if not isinstance(value, list):
        raise SurefootError(f"column {name!r} is {json_type(value)}; it must be a list of messages")
    if not value:
        raise SurefootError(f"column {name!r} is an empty list; it must have at least one message")
    for index, message in enumerate(value):
        place = f"column {name!r}, message {index + 1}"
        if not isinstance(message, dict):
            raise SurefootError(f"{place} is {json_type(message)}; a message is an object with a role and a content")
        calls = message.get(CALLS) or []
        if not isinstance(calls, list):
            raise SurefootError(f"{place}: {CALLS!r} is {json_type(calls)}; it must be a list")
        for key in ("role", "content"):
            if key == "content" and message.get(key) is None and calls and message["role"] == "assistant":
                continue
            if key not in message:
                raise SurefootError(f"{place} has no {key!r}; a message is an object with a role and a content")
            if not isinstance(message[key], str):
                raise SurefootError(f"{place}: {key!r} is {json_type(message[key])}; it must be text")
        check_weight(message, place)
    return [{key: part for key, part in message.items() if part is not None and (key != CALLS or part)} for message in value]


def check_same_kind(parts: Mapping[str, str | list[dict[str, Any]]]) -> None:
    """Raise SurefootError unless all parts are text, or all are messages."""
    if len({isinstance(part, str) for part in parts.values()}) > 1:
        kinds = ", ".join(f"{name!r} is {'text' if isinstance(part, str) else 'messages'}" for name, part in parts.items())
        raise SurefootError(f"columns differ: {kinds}; make all text, or all messages")


def check_weight(message: Mapping[str, Any], place: str) -> None:
    """Raise SurefootError for a weight other than 0 and 1, or one that would train a message not written by the assistant."""
    weight = message.get(WEIGHT)
    if weight is None:
        return
    if isinstance(weight, bool) or weight not in (0, 1):
        raise SurefootError(f"{place}: {WEIGHT!r} is {weight!r:.40}; it must be 0 (not trained) or 1")
    if weight and message["role"] != "assistant":
        raise SurefootError(f"{place}: {WEIGHT!r} is 1, but only the assistant's messages are trained; remove it")


def rows_hash(rows: Iterable[object]) -> str:
    """SHA-256 of rows in order, shortened."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row}\n".encode())
    return digest.hexdigest()[:32]


def check_row_count(train: str, before: int, now: int) -> None:
    """Raise SurefootError if the number of rows in ``data.train`` has changed since the checkpoint."""
    if before != now:
        raise SurefootError(
            f"data.train={train!r}: had {before} rows at the checkpoint and has {now} now; restore the old file"
        )


def check_unchanged(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise SurefootError if an input has changed since the checkpoint. Both map field and value to a hash."""
    for name, current in now.items():
        if before.get(name, current) != current:
            raise SurefootError(
                f"{name}: its content has changed since the checkpoint; restore the old one, or start a new run"
            )
