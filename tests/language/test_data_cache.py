"""Cached ids of large files equal those in memory, and are never used half-written, damaged or for another tokenizer."""

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from surefoot.errors import SurefootError
from surefoot.language.data import cache, datasets, preparation, processes, sources
from surefoot.language.data.datasets import Prompts, demonstrations, labelled, pairs, prompts
from surefoot.language.data.sources import open_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.pocket import pocket
from surefoot.language.online.world import prompts_hash
from surefoot.language.supervised.demonstrations import demonstration_rows
from surefoot.language.supervised.labels import kto_rows, scored_rows
from surefoot.language.supervised.preferences import dpo_rows, pair_rows
from surefoot.processes import Child

TOKENS = Tokens(pocket()[1])
ASK = [{"role": "user", "content": "2+2"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "ab", "completion": "c", "chosen": "c", "rejected": "dd", "answer": 1.5, "tags": ["x"]},
    {"prompt": "é", "completion": "x" * 99, "chosen": "x" * 99, "rejected": "d"},
    {"prompt": "d", "completion": "", "chosen": "e", "rejected": "e", "answer": None},
    {"prompt": "d", "completion": "ef", "chosen": "e", "rejected": "", "unused": {"a": [1, None]}},
]


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as large, and a cache of its own."""
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(preparation, "LARGE", 0)
    monkeypatch.setattr(preparation, "usable_processes", lambda: 1)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def plain(made: Any) -> dict[str, Any]:
    """All fields, with sequences as lists."""

    def listed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: listed(part) for name, part in value.items()}
        return list(value) if isinstance(value, (list, cache.Ragged, datasets.Mapped)) else value

    return {name: listed(value) for name, value in vars(made).items() if name != "facts"}


def folders(path: Path) -> list[Path]:
    return [folder for folder in (path.parent / "cache" / "data").iterdir() if folder.is_dir()]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each row that is tokenised."""
    calls: list[int] = []
    encode = Tokens.demonstration
    monkeypatch.setattr(Tokens, "demonstration", lambda self, row: (calls.append(1), encode(self, row))[1])
    return calls


@pytest.mark.parametrize("make", [demonstrations, pairs, prompts])
def test_cached_ids_equal_those_in_memory(make: Callable[..., Any], large: Path) -> None:
    memory = make(list(open_rows(large)), TOKENS, 50)
    for _ in ("written", "found"):
        made = make(open_rows(large), TOKENS, 50)
        assert plain(made) == plain(memory)
    assert len(folders(large)) == 1
    first = made.chosen if make is pairs else made.ids
    assert isinstance(first, cache.Ragged)
    assert first.lengths == [len(row) for row in first]
    assert first[-1] == list(first)[-1] == first[0:9][-1]
    with pytest.raises(IndexError):
        first[len(first)]


def test_prompts_on_disk_keep_their_tools(large: Path) -> None:
    tokens = Tokens(pocket()[1])
    tokens.tokenizer.chat_template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    large.write_text(json.dumps({"prompt": ASK, "tools": [{"name": "f"}]}) + "\n")
    made = prompts(open_rows(large), tokens, 300)
    assert isinstance(made.ids, cache.Ragged)
    assert [tokens.encode_prompt(prompt) for prompt in made.prompts] == list(made.ids)


def test_values_that_json_cannot_hold_stay_in_memory_as_they_are(large: Path) -> None:
    import datetime

    import pyarrow
    from pyarrow.parquet import write_table

    row = {"prompt": "a", "day": datetime.date(2020, 1, 1), "blob": b"\x00"}
    write_table(pyarrow.Table.from_pylist([row]), large.with_suffix(".parquet"))
    made = prompts(open_rows(large.with_suffix(".parquet")), TOKENS, 300)
    assert made.columns == {"day": [row["day"]], "blob": [row["blob"]]}
    assert folders(large) == []


def test_rows_are_tokenised_again_when_and_only_when_something_changed(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    other = Tokens(pocket()[1])
    other.tokenizer.chat_template = other.tokenizer.chat_template + " "
    more = Tokens(pocket()[1])
    more.tokenizer.add_tokens(["ab"])
    renamed = {"completion": "prompt", "prompt": "completion"}

    def prepare(tokens: Tokens = TOKENS, limit: int = 50, columns: Any = None, control: Any = "split") -> int:
        before = len(calls)
        demonstrations(open_rows(large, columns), tokens, limit, control=control)
        return len(calls) - before

    assert [prepare(), prepare()] == [4, 0]
    assert [prepare(limit=60), prepare(other), prepare(more), prepare(columns=renamed)] == [4, 4, 4, 4]
    assert prepare(control="reject") == 4, "rows that were split may be rejected"
    large.touch()
    assert [prepare(), prepare(other), prepare(more)] == [0, 0, 0]
    large.write_text(large.read_text().replace("ef", "eg"))
    assert prepare() == 4
    dated = Tokens(pocket()[1])
    dated.tokenizer.chat_template = "{{ strftime_now('%d') }}" + str(dated.tokenizer.chat_template)
    assert [prepare(dated), prepare(dated)] == [4, 4], "a template that writes the date gives other ids tomorrow"


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest"])
def test_a_damaged_cache_is_made_again(damage: str, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = plain(demonstrations(list(open_rows(large)), TOKENS, 50))
    demonstrations(open_rows(large), TOKENS, 50)
    (folder,) = folders(large)
    file = folder / ("manifest.json" if damage == "manifest" else "rows.arrow")
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[:-1] if damage != "flip" else bytes([content[0] ^ 1]) + content[1:])
    calls = counted(monkeypatch)
    assert plain(demonstrations(open_rows(large), TOKENS, 50)) == memory
    assert len(calls) == 4
    demonstrations(open_rows(large), TOKENS, 50)
    assert len(calls) == 4


def prompts_and_their_hash(made: Prompts, pad_id: int) -> Any:
    return SimpleNamespace(hash=prompts_hash(made), lengths=made.dropped, trained=None)


PAIR, LABELLED = ("prompt", "chosen", "rejected"), ("prompt", "completion", "label")
RUNS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]] = {
    "sft": (demonstrations, demonstration_rows, ("prompt", "completion")),
    "dpo": (pairs, dpo_rows, PAIR),
    "reward": (pairs, pair_rows, PAIR),
    "kto": (labelled, partial(kto_rows, path="rows.jsonl", limit=50), LABELLED),
    "labelled reward": (labelled, scored_rows, LABELLED),
    "language": (prompts, prompts_and_their_hash, ("prompt",)),
}


@pytest.mark.parametrize("kind", RUNS)
def test_facts_about_all_rows_are_computed_once(kind: str, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes and lengths: those of a cache equal those of memory, and a warm start reads no row."""
    rows = [row for row in ROWS if row["chosen"] != row["rejected"]] * 2
    rows = [{**row, "prompt": f"{row['prompt']}{index}", "label": bool(index % 2)} for index, row in enumerate(rows)]
    read, rows_of, names = RUNS[kind]

    def make() -> Any:
        return rows_of(read(open_rows(large), TOKENS, 50), TOKENS.pad_id)

    large.write_text("".join(json.dumps({name: row[name] for name in names}) + "\n" for row in rows))
    monkeypatch.setattr(preparation, "LARGE", 10**9)
    memory = make()
    monkeypatch.setattr(preparation, "LARGE", 0)
    for _ in range(2):
        made = make()
        assert (made.hash, made.lengths, made.trained) == (memory.hash, memory.lengths, memory.trained)
        monkeypatch.setattr(cache.Ragged, "__getitem__", None)  # the second time


def test_a_damaged_fact_is_computed_again(large: Path) -> None:
    made = demonstrations(open_rows(large), TOKENS, 50)
    assert made.facts.once("count", lambda: 5) == 5
    assert made.facts.folder is not None
    for value, damage in ((6, "{"), (7, '{"value": "[1]", "sha256": "0"}')):
        (made.facts.folder / "count.json").write_text(damage)
        assert made.facts.once("count", lambda value=value: value) == value
        assert made.facts.once("count", lambda: 0) == value


def test_a_failed_row_leaves_no_cache(large: Path) -> None:
    with large.open("a") as file:
        file.write("{}\n")
    with pytest.raises(SurefootError, match="line 5: missing column 'prompt'"):
        demonstrations(open_rows(large), TOKENS, 50)
    assert folders(large) == []


def test_a_kill_while_writing_leaves_nothing_that_is_read(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    encode = Tokens.demonstration

    def slow(self: Tokens, row: Any) -> Any:
        theirs.send("row")
        time.sleep(0.2)
        return encode(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(Tokens, "demonstration", slow)
        arguments = (open_rows(large), TOKENS, 50)
        process = multiprocessing.get_context("fork").Process(target=demonstrations, args=arguments)
        process.start()
    assert [ours.recv() for _ in range(2)] == ["row", "row"]
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = folders(large)
    assert left.name.endswith(".tmp")
    calls = counted(monkeypatch)
    made = demonstrations(open_rows(large), TOKENS, 50)
    assert (len(calls), len(made.ids)) == (4, 3)
    (folder,) = folders(large)
    assert folder.name in left.name


def test_a_cache_that_cannot_be_written_is_one_line(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", str(large))
    with pytest.raises(SurefootError, match=r"^SUREFOOT_CACHE='.*a\.jsonl': can't be written \(.*\); set it to a folder with"):
        demonstrations(open_rows(large), TOKENS, 50)


def test_folders_that_were_not_used_for_a_month_are_deleted(large: Path) -> None:
    demonstrations(open_rows(large), TOKENS, 50)
    (old,) = folders(large)
    os.utime(old, (0, time.time() - 31 * 24 * 3600))
    demonstrations(open_rows(large), TOKENS, 60)
    (kept,) = folders(large)
    assert kept != old
    os.utime(kept, (0, time.time() - 29 * 24 * 3600))
    demonstrations(open_rows(large), TOKENS, 60)
    assert time.time() - kept.stat().st_mtime < 3600, "it counts from the last use"


def test_a_cache_is_on_the_disk_before_it_gets_its_name(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), sync(file))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(f"-> {b}"), replace(a, b))[1])
    demonstrations(open_rows(large), TOKENS, 50)
    (folder,) = folders(large)
    assert "rows.arrow" in {Path(name).name for name in done[: done.index(f"-> {folder}")]}


# ---- several processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, and several requests to each."""
    monkeypatch.setattr(preparation, "usable_processes", lambda: 2)
    monkeypatch.setattr(processes, "CHUNK", 3)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that were started."""
    made: list[Any] = []
    start = processes.Child
    monkeypatch.setattr(processes, "Child", lambda *a, **k: made.append(start(*a, **k)) or made[-1])
    return made


def many(path: Path, count: int = 40) -> None:
    rows = [{**ROWS[i % 4], "prompt": f"p{i}", **({"late": 1} if i == 30 else {})} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize("make", [pairs, prompts])
def test_several_processes_make_the_rows_notes_and_bytes_of_one(
    make: Callable[..., Any], large: Path, two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(large)
    calls = counted(monkeypatch)
    made = make(open_rows(large), TOKENS, 50)
    assert not calls, "no row is tokenised in this process"
    (folder,) = folders(large)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    shutil.rmtree(folder)
    monkeypatch.setattr(preparation, "usable_processes", lambda: 1)
    assert plain(make(open_rows(large), TOKENS, 50)) == plain(made)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files


def test_the_first_row_with_an_error_is_reported_also_when_a_later_one_was_read_before(
    large: Path, two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line 12 lacks a column, which another process notices; line 20 is a second error."""
    monkeypatch.setattr(sources, "HEAD", 5)
    many(large)
    lines = large.read_text().splitlines()
    lines[11], lines[19] = "{}", "{"
    large.write_text("\n".join(lines) + "\n")
    with pytest.raises(SurefootError, match="line 12: missing column 'prompt'"):
        demonstrations(open_rows(large), TOKENS, 50)
    assert folders(large) == []


def test_a_process_that_dies_is_one_line_and_ends_the_others(
    two: None, started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending.py").write_text("import os\n\ndef at_nine(rows):\n    return os._exit(9) if 9 in rows else rows\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.syspath_prepend(str(tmp_path))
    at_nine = importlib.import_module("ending").at_nine
    with pytest.raises(SurefootError, match=r"ended early \(exit code 9\); it may have run out of memory"):
        list(processes.in_processes(at_nine, range(30), 2))
    assert len(started) == 2
    assert all(worker.process.poll() is not None for worker in started)


def test_an_interrupt_while_processes_start_ends_them(two: None, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "receive", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(processes.in_processes(len, range(30), 2))
    assert len(started) == 2
    assert all(worker.process.returncode is not None for worker in started)


@pytest.mark.parametrize("work", [sum, lambda rows: sum(rows)], ids=["in processes", "cannot be pickled, so in this one"])
def test_results_are_those_of_their_rows_and_an_error_of_the_rows_comes_last(work: Any, two: None) -> None:
    def failing() -> Any:
        yield from range(7)
        raise SurefootError("row 8")

    made = []
    with pytest.raises(SurefootError, match="row 8"):
        made.extend(processes.in_processes(work, failing(), 2))
    assert made == [([0, 1, 2], 3), ([3, 4, 5], 12), ([6], 6)]
