"""Every file format gives the same rows, rows are streamed, and unreadable files raise one-line errors."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import SurefootError
from surefoot.language.data.sources import formats, open_rows, read_rows

ROWS = [{"prompt": "a, b", "completion": 'c"d'}, {"prompt": "é\nf", "completion": ""}, {"prompt": "[1]", "completion": "g"}]


def write(path: Path, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    """Write rows in the format given by the file name."""
    kind = formats.suffix_of(path)
    if kind == ".jsonl":
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    elif kind == ".json":
        content = json.dumps(list(rows), indent=1).encode()
    elif kind in (".csv", ".tsv"):
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, list(rows[0]), delimiter="\t" if kind == ".tsv" else ",")
        table.writeheader()
        table.writerows(rows)
        content = text.getvalue().encode()
    else:
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(list(rows)), path)
        return path
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2  # two frames, as pzstd writes them
        content = b"".join(zstandard.compress(part) for part in (content[:half], content[half:]))
    path.write_bytes(content)
    return path


def test_rows_are_the_same_from_every_format(tmp_path: Path) -> None:
    for ending in ("jsonl", "json", "csv", "tsv", "parquet", "jsonl.gz", "csv.gz", "jsonl.zst", "json.zst"):
        path = write(tmp_path / f"a.{ending}")
        rows = open_rows(path)
        assert [row.columns for row in rows] == ROWS
        assert [row.columns for row in rows] == ROWS, "a source can be read again"
        assert all(row.where.startswith(f"{path}, ") for row in rows)


@pytest.mark.parametrize("ending", ["parquet", "jsonl.gz"])
def test_folders_and_patterns_read_their_files_in_order(ending: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for index, row in enumerate(ROWS):
        write(tmp_path / "data" / f"train-{index:05}-of-00003.{ending}", [row])
    (tmp_path / "README.md").write_text("a data set")
    for name in (tmp_path, tmp_path / "data", tmp_path / "data" / f"train-*.{ending}", tmp_path / "**" / f"train-*.{ending}"):
        assert [row.columns for row in read_rows(name)] == ROWS
    write(tmp_path / "data" / f"test-00000-of-00001.{ending}")
    with pytest.raises(
        SurefootError, match=r"has files of several splits \(test, train\); give those of one, such as '.*train"
    ):
        read_rows(tmp_path)
    assert len(read_rows(tmp_path / "data" / f"test-*.{ending}")) == 3


def test_json_may_be_a_list_an_object_with_one_list_or_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    versioned, one_line = {"version": 1, "data": ROWS}, {"data": ROWS}
    for text, expected in (
        (json.dumps(ROWS), ROWS),
        (json.dumps(versioned), [versioned]),
        (json.dumps(one_line), [one_line]),  # an object on one line is a row
        (json.dumps({"data": ROWS}, indent=2), ROWS),
        ("".join(json.dumps(row) + "\n" for row in ROWS), ROWS),
        ("\ufeff" + json.dumps(ROWS), ROWS),
    ):
        path.write_text(text)
        assert [row.columns for row in read_rows(path)] == expected
    conversation = {"messages": [{"role": "user", "content": "a"}]}
    path.write_text(json.dumps(conversation, indent=2))
    assert [row.columns for row in read_rows(path)] == [conversation]


@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=9)), min_size=1),
    st.integers(1, 9),
)
def test_json_list_is_read_correctly_with_any_chunk_size(rows: list[dict[str, Any]], chunk: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK", chunk)
        (Path(folder) / "a.json").write_text(json.dumps(rows, indent=chunk % 3))
        assert [row.columns for row in formats.json_rows(Path(folder) / "a.json")] == rows


def test_rows_before_a_broken_line_are_read(tmp_path: Path) -> None:
    """Files are streamed, so a broken last line is only reached after the others."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 200 + "broken")
    rows = iter(open_rows(tmp_path / "a.jsonl"))
    assert [next(rows).columns for _ in range(200)] == [{"text": "a"}] * 200
    with pytest.raises(SurefootError, match="line 201: is not JSON"):
        next(rows)


def _cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-9])
    return path


def _content(content: bytes) -> Callable[[Path], Path]:
    def made(path: Path) -> Path:
        path.write_bytes(content)
        return path

    return made


def test_unreadable_files_raise_a_one_line_error(tmp_path: Path) -> None:
    for name, make, expected in [
        ("a.jsonl.gz", _content(b"{}"), r"a\.jsonl\.gz: can't be read \(BadGzipFile: Not a gz.*\); compress it again"),
        ("a.jsonl.gz", lambda path: _cut(write(path)), r"can't be read \(EOFError: Compressed file ended before.*compress it"),
        ("a.jsonl.zst", lambda path: _cut(write(path)), r"can't be read \(EOFError: the file ends before .*compress it again"),
        ("a.jsonl.gz", _content(gzip.compress(b"")), r"a\.jsonl\.gz: has no rows; write at least one"),
        ("a.csv", _content(b"a,b\n1,2\n1,2,3\n"), r"a\.csv, line 3: has 3 cells and the header 2; quote cells"),
        ("a.csv", _content(b"a,a\n1,2\n"), r"a\.csv, line 1: the header repeats 'a'; give every column its own"),
        ("a.csv", _content(b'a,b\n1,"2'), r"a\.csv: is not CSV \(unexpected end of data\)"),
        ("a.csv", _content(b"a,b\n1,\xff\n"), r"a\.csv: is not UTF-8"),
        ("a.json", _content(b"[]"), r"a\.json: has no rows"),
        ("a.json", _content(b'[{"a": 1}'), r"a\.json: is not JSON \(ValueError: the list has no end\); write a list of obj"),
        ("a.json", _content(b'[{"a": 1} {"a": 2}]'), r"a\.json: is not JSON \(expected ',' of one list\)"),
        ("a.json", _content(b'[{"a": 1}, 2]'), r"a\.json, row 2: is a number; write a list of objects"),
        ("a.json", _content(b'[{"a": 1}] x'), r"a\.json: is not JSON"),
        ("a.json", _content(b'[{"a": 1, "a": 2}]'), r"a\.json: is not JSON \(ValueError: repeats the key 'a'\)"),
        ("a.jsonl", _content(b'{"a": {"b": 1, "b": 1}}'), r"line 1: is not JSON \(ValueError: repeats the key 'b'\)"),
    ]:
        if name.endswith(".zst"):
            pytest.importorskip("zstandard")
        with pytest.raises(SurefootError, match=expected):
            read_rows(make(tmp_path / name))


# ---- renamed columns ----------------------------------------------------------------------------------------------------


def test_columns_are_renamed_and_bad_mappings_are_rejected(tmp_path: Path) -> None:
    for ending in ["jsonl", "csv", "parquet"]:
        path = write(tmp_path / f"a.{ending}", [{"question": "a", "answer": "b", "id": "1"}])
        rows = open_rows(path, {"question": "prompt", "answer": "completion"})
        assert [row.columns for row in rows] == [{"prompt": "a", "completion": "b", "id": "1"}]
        swapped = open_rows(path, {"question": "answer", "answer": "question"})
        assert next(iter(swapped)).columns == {"answer": "a", "question": "b", "id": "1"}
        with pytest.raises(
            SurefootError, match=r"data\.columns: .*has no column 'qestion'; did you mean 'question'\?; columns here: 'que"
        ):
            list(open_rows(path, {"qestion": "prompt"}))
        with pytest.raises(SurefootError, match=r"no column 'prompt'; the column of the file comes first: question = 'pr"):
            list(open_rows(path, {"prompt": "question"}))
        with pytest.raises(SurefootError, match=r"data\.columns: .*has a column 'answer' already; rename that one too"):
            list(open_rows(path, {"question": "answer"}))


def test_a_renamed_column_may_be_missing_in_some_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "a"}, {"question": "b", "functions": []}])
    assert [row.columns for row in open_rows(path, {"functions": "tools"})][1] == {"question": "b", "tools": []}


# ---- hashes -------------------------------------------------------------------------------------------------------------


def test_source_hash_depends_only_on_the_content(tmp_path: Path) -> None:
    def hashes() -> Iterator[str]:
        for name in ("a.jsonl", "folder"):
            yield open_rows(tmp_path / name).content

    write(tmp_path / "a.jsonl")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "b.jsonl")
    before = list(hashes())
    (tmp_path / "a.jsonl").touch()
    assert list(hashes()) == before
    write(tmp_path / "a.jsonl", ROWS[:2])
    write(tmp_path / "folder" / "c.jsonl")
    assert not set(before) & set(hashes())
