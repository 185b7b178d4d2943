"""Files become token ids, or one line that says which file and which line of it is wrong."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from surefoot.errors import SurefootError
from surefoot.language.data import demonstrations, pairs, prompts, read_rows
from surefoot.language.models import pocket
from surefoot.language.preview import preview
from surefoot.language.tokens import Tokens

TOKENS = Tokens(pocket()[1])
ASK, ANSWER, WORSE = (
    {"role": role, "content": text} for role, text in (("user", "2+2"), ("assistant", "4"), ("assistant", "55"))
)
ROWS = [{"prompt": "ab", "completion": "c"}, {"prompt": "d", "completion": "ef"}, {"prompt": "g", "completion": "hijk"}]


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def saved(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    shuffled = datasets.Dataset.from_list([rows[-1], *rows[:-1]])
    shuffled.select([*range(1, len(rows)), 0]).save_to_disk(path, num_shards=2)  # indices and shards are not ours to see
    return path


# ---- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [jsonl, parquet, saved])
def test_rows_are_the_same_from_every_kind_of_file(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(tmp_path / f"data.{write.__name__}", ROWS)
    rows = read_rows(path)
    assert [row.columns for row in rows] == ROWS
    unit = "line" if write is jsonl else "row"
    assert [row.where for row in rows] == [f"{path}, {unit} {n}" for n in (1, 2, 3)]


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\r\n\n  \n{"text": "c"}')
    rows = read_rows(tmp_path / "a.jsonl")
    assert [row.columns["text"] for row in rows] == ["a\u2028b", "c"]
    assert [row.where[-6:] for row in rows] == ["line 1", "line 4"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: is not JSON \(JSONDecodeError"),
        (b'{"text": "a"}\nnull\n', r"line 2: is null; write one JSON object per line"),
        (b'[\n{"text": "a"}\n]\n', r"line 1: is not JSON"),
        (b'[{"text": "a"}]\n', r"line 1: is a list; write one JSON object"),
        (b'{"text": "\xff"}\n', r"line 1: is not UTF-8"),
        (b"[" * 100_000, r"line 1: is not JSON \(RecursionError"),
        (b"", r"a\.jsonl: has no rows"),
        (b"\n\n", r"a\.jsonl: has no rows"),
    ],
)
def test_a_line_that_is_no_object_is_named(content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(SurefootError, match=expected):
        read_rows(tmp_path / "a.jsonl")


def test_a_file_that_is_not_there_or_not_what_its_name_says_is_one_line(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(SurefootError, match=r"trian\.jsonl: no such file; did you mean '.*train\.jsonl'\?$"):
        read_rows(tmp_path / "trian.jsonl")
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(SurefootError, match=r"a\.parquet: is no Parquet file that can be read \(ArrowInvalid"):
        read_rows(tmp_path / "a.parquet")
    with pytest.raises(SurefootError, match=r"is a folder that datasets did not save \(no state\.json\)"):
        read_rows(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.parquet"}]}')
    with pytest.raises(SurefootError, match=r"can't be read \(ArrowInvalid"):
        read_rows(tmp_path)
    with pytest.raises(SurefootError, match=r"\.parquet: has no rows"):
        read_rows(parquet(tmp_path / "empty.parquet", []))


def test_several_splits_are_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "both")
    with pytest.raises(SurefootError, match=r"both: holds a folder per split \(test, train\); give one of them$"):
        read_rows(tmp_path / "both")
    assert len(read_rows(tmp_path / "both" / "train")) == 3


# ---- shapes -----------------------------------------------------------------------------------------------------------


def texts(ids: Sequence[Sequence[int]]) -> list[str]:
    return [TOKENS.tokenizer.decode(row) for row in ids]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_demonstrations_of_every_shape(write: Callable[..., Path], tmp_path: Path) -> None:
    shapes: dict[str, tuple[dict[str, Any], str, str]] = {
        "plain": ({"prompt": "ab", "completion": "c"}, "abc⟨eos⟩", "c⟨eos⟩"),
        "conversational": ({"prompt": [ASK], "completion": [ANSWER]}, "⟨user⟩2+2⟨assistant⟩4⟨eos⟩", "4⟨eos⟩"),
        "messages": ({"messages": [ASK, {**ANSWER, "name": "it"}]}, "⟨user⟩2+2⟨assistant⟩4⟨eos⟩", "4⟨eos⟩"),
        "text": ({"text": "abc"}, "abc⟨eos⟩", "bc⟨eos⟩"),
    }
    for name, (row, whole, trained) in shapes.items():
        found = demonstrations(read_rows(write(tmp_path / f"{name}.{write.__name__}", [row])), TOKENS, 100)
        assert texts(found.ids) == [whole], name
        assert texts([[i for i, kept in zip(found.ids[0], found.trained[0], strict=True) if kept]]) == [trained], name
        assert found.dropped == 0


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "ab", "chosen": "c", "rejected": "dd"}, "ab"),
        ({"chosen": "abc", "rejected": "abdd"}, "ab"),
        ({"prompt": [ASK], "chosen": [ANSWER], "rejected": [WORSE]}, "⟨user⟩2+2⟨assistant⟩"),
        ({"chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]}, "⟨user⟩2+2⟨assistant⟩"),
    ],
)
def test_pairs_of_every_shape(row: dict[str, Any], prompt: str, tmp_path: Path) -> None:
    found = pairs(read_rows(jsonl(tmp_path / "a.jsonl", [row])), TOKENS, 100)
    answers = ("c", "dd") if isinstance(row["chosen"], str) else ("4", "55")
    assert texts(found.chosen + found.rejected) == [f"{prompt}{answer}⟨eos⟩" for answer in answers]
    assert texts([found.chosen[0][: found.prompt_lengths[0]]]) == [prompt]


def test_two_equal_answers_leave_something_after_the_prompt(tmp_path: Path) -> None:
    rows = [
        {"chosen": "ab", "rejected": "ab"},
        {"chosen": "", "rejected": ""},
        {"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]},
    ]
    found = pairs(read_rows(jsonl(tmp_path / "a.jsonl", rows)), TOKENS, 100)
    assert all(0 < n < len(ids) for n, ids in zip(found.prompt_lengths, found.chosen, strict=True))


def test_prompts_bring_the_other_columns_of_their_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": "ab", "answer": 1},
        {"prompt": "abcdef", "answer": 2},
        {"prompt": [ASK], "hint": "x"},
        {"messages": [ASK, ANSWER]},
    ]
    found = prompts(read_rows(jsonl(tmp_path / "a.jsonl", rows)), TOKENS, 5)
    assert found.prompts == ["ab", [ASK], [ASK]]
    assert texts(found.ids) == ["ab", "⟨user⟩2+2⟨assistant⟩", "⟨user⟩2+2⟨assistant⟩"]
    assert found.columns == {"answer": [1, None, None], "hint": [None, "x", None]}
    assert found.dropped == 1


def test_overlong_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = read_rows(jsonl(tmp_path / "a.jsonl", ROWS))
    found = demonstrations(rows, TOKENS, 4)
    assert texts(found.ids) == ["abc⟨eos⟩", "def⟨eos⟩"], "four tokens fit into four"
    assert len(found.trained) == 2
    assert found.dropped == 1
    both = [{"prompt": "a", "chosen": "b", "rejected": "ccc"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    kept = pairs(read_rows(jsonl(tmp_path / "b.jsonl", both)), TOKENS, 4)
    assert (texts(kept.rejected), kept.dropped) == (["ac⟨eos⟩"], 1)


@pytest.mark.parametrize("make", [demonstrations, prompts, pairs])
def test_when_every_row_is_dropped_the_shortest_is_told(make: Callable[..., Any], tmp_path: Path) -> None:
    row = {"prompt": "ab", "completion": "cd", "chosen": "cd", "rejected": "e"}
    rows = read_rows(jsonl(tmp_path / "a.jsonl", [row, {**row, "prompt": "abc"}]))
    shortest = 2 if make is prompts else 5
    with pytest.raises(
        SurefootError, match=rf"a\.jsonl: every one of its 2 rows .* has {shortest} tokens and max_length=1; raise"
    ):
        make(rows, TOKENS, 1)


# ---- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "row", "expected"),
    [
        (
            demonstrations,
            {"promt": "a", "completion": "b"},
            r"missing column 'prompt'; did you mean 'promt'\?; a demonst",
        ),
        (demonstrations, {"prompt": "a"}, "missing column 'completion'; .*; columns here: 'prompt'$"),
        (demonstrations, {}, "missing column 'prompt'; .*; columns here: none$"),
        (demonstrations, {"text": None}, "column 'text' is null; it must be text"),
        (demonstrations, {"text": 3}, "column 'text' is a number; it must be text"),
        (
            demonstrations,
            {"prompt": "a", "completion": None},
            "column 'completion' is null; it must be text or a list of",
        ),
        (demonstrations, {"prompt": True, "completion": "b"}, "column 'prompt' is a boolean"),
        (demonstrations, {"prompt": [ASK], "completion": "4"}, "columns differ: 'prompt' is messages, 'completion' is text"),
        (demonstrations, {"messages": "hello"}, "column 'messages' is text; it must be a list of messages"),
        (demonstrations, {"messages": []}, "column 'messages' is an empty list"),
        (demonstrations, {"messages": ["hello"]}, "column 'messages', message 1 is text; a message is an object"),
        (demonstrations, {"messages": [ASK, {"role": "assistant"}]}, "column 'messages', message 2 has no 'content'"),
        (demonstrations, {"messages": [ASK, {**ANSWER, "content": None}]}, "message 2: 'content' is null; it must be text"),
        (demonstrations, {"messages": [ASK]}, "no message is the assistant's"),
        (
            demonstrations,
            {"messages": [{"role": "robot", "content": "a"}, ANSWER]},
            "chat template refuses .*the roles are",
        ),
        (pairs, {"prompt": "a", "chosen": "b"}, "missing column 'rejected'; a pair has"),
        (pairs, {"chosen": "b", "rejected": [ASK, ANSWER]}, "columns differ: 'chosen' is text, 'rejected' is messages"),
        (pairs, {"prompt": "a", "chosen": [ANSWER], "rejected": [WORSE]}, "columns differ: 'prompt' is text"),
        (pairs, {"chosen": [ANSWER], "rejected": [WORSE]}, "begin differently, so there is no prompt"),
        (prompts, {"question": "a"}, "missing column 'prompt'; a prompt is in"),
        (prompts, {"prompt": [ASK, ANSWER]}, "ends with a message of the assistant"),
        (prompts, {"messages": [ANSWER]}, "has nothing before the answer"),
    ],
)
def test_what_is_wrong_with_a_row_names_file_and_line(
    make: Callable[..., Any], row: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    fine = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
    rows = read_rows(jsonl(tmp_path / "a.jsonl", [fine, row]))
    with pytest.raises(SurefootError, match=rf"a\.jsonl, line 2: .*{expected}") as caught:
        make(rows, TOKENS, 100)
    assert "\n" not in str(caught.value)


def test_without_the_extra_parquet_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ROWS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SurefootError, match=r"reading Parquet needs pyarrow.*pip install .*\[language\]'"):
        read_rows(path)


# ---- preview ----------------------------------------------------------------------------------------------------------


def printed(path: Path, **options: Any) -> tuple[str, str]:
    """What a preview prints, without and with the codes of its colours."""
    outputs = []
    for colours in (False, True):
        file = io.StringIO()
        system = "truecolor" if colours else None
        Console(file=file, width=100, force_terminal=colours, color_system=system, legacy_windows=False).print(
            preview(path, "pocket", **options)
        )
        outputs.append(file.getvalue())
    return outputs[0], outputs[1]


def test_a_preview_colours_what_is_trained_and_counts_the_rest(tmp_path: Path) -> None:
    plain, colours = printed(jsonl(tmp_path / "a.jsonl", ROWS), rows=1, max_length=4)
    assert "abc⟨eos⟩" in plain
    assert "def⟨eos⟩" not in plain, "one row was asked for"
    assert "demonstrations │ 2 of 3 rows" in plain
    assert "1 longer than 4 tokens" in plain
    assert "8, of which 5 trained (62%)" in plain
    assert "4 to 4, median 4" in plain
    bold_green, dim = "\x1b[1;32m", "\x1b[2m"
    assert f"{dim}ab\x1b[0m{bold_green}c⟨eos⟩\x1b[0m" in colours


def test_a_preview_knows_pairs_and_prompts(tmp_path: Path) -> None:
    both, _ = printed(jsonl(tmp_path / "a.jsonl", [{"prompt": "ab", "chosen": "c", "rejected": "dd"}]))
    assert "1 chosen" in both
    assert "abdd⟨eos⟩" in both
    assert "9, of which 5 trained" in both
    asked, _ = printed(jsonl(tmp_path / "b.jsonl", [{"prompt": "a\nb", "answer": 2}]))
    assert "a⏎" in asked
    assert "3, of which 0 trained" in asked
