"""Rows passed as Python objects train like the same rows in a file, and the run folder stores them for resuming."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surefoot
from surefoot import SurefootError
from surefoot.files import read_toml
from surefoot.language.data.rows import write_rows
from surefoot.language.data.sources import read_rows, save_rows
from surefoot.runs.api import launch
from surefoot.store.metrics import read_metrics

TEXTS = ("i love it.", "it is fine.", "the chain is weak.", "good")
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": "new bike: ", "completion": text} for text in TEXTS],
    "reward": [{"prompt": "new bike: ", "chosen": text, "rejected": "no"} for text in TEXTS],
    "dpo": [{"prompt": "new bike: ", "chosen": text, "rejected": "no"} for text in TEXTS],
    "language": [{"prompt": "new bike: ", "answer": text} for text in TEXTS],
}
KINDS = list(ROWS)


def by_answer(prompts: Any, responses: Any, *, answer: Any, **columns: Any) -> list[float]:
    return [float(len(response) - len(text)) for response, text in zip(responses, answer, strict=True)]


def settings(kind: str, train: Any, **fields: Any) -> dict[str, Any]:
    shared = {"model": "pocket", "seed": 2, "steps": 12, "checkpoint": {"every": 4}, **fields}
    if kind == "language":
        online = {"sampling": {"prompts": 4, "max_tokens": 4}, "reward": by_answer}
        return {**shared, **online, "objective": {"reuse": {"epochs": 1, "minibatches": 1}}, "data": train}
    return {**shared, "data": {"train": train, "batch": 4} if not isinstance(train, dict) else {**train, "batch": 4}}


def same(one: Any, other: Any) -> bool:
    states = [(model.model if hasattr(model, "tokens") else model).state_dict() for model in (one, other)]
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("kind", KINDS)
def test_passed_rows_match_a_file_and_resume_from_the_run_folder(kind: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", ROWS[kind])
    named = {"train": str(tmp_path / "rows.jsonl"), "held_out": str(tmp_path / "rows.jsonl")}
    passed = {"train": ROWS[kind], "held_out": iter(ROWS[kind])}
    whole = surefoot.train(kind, run_dir=tmp_path / "whole", **settings(kind, named))
    stops = iter([False, True])
    run = tmp_path / "run"
    surefoot.train(kind, run_dir=run, callback=lambda row: next(stops), **settings(kind, passed))
    assert len(read_metrics(run / "metrics.jsonl")) == 2
    assert sorted(path.name.partition("-")[0] for path in (run / "rows").iterdir()) == ["held_out", "train"]
    again = surefoot.resume(run, reward=by_answer) if kind == "language" else surefoot.resume(run)
    assert same(again, whole)


def test_rows_may_be_of_any_iterable_or_in_a_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one, rows = surefoot.train("sft", **settings("sft", ROWS["sft"])), ROWS["sft"]
    for other in (datasets.Dataset.from_list(rows), tuple(rows), (dict(row) for row in rows)):
        assert same(one, surefoot.train("sft", **settings("sft", other)))
    online = surefoot.train("language", **settings("language", ROWS["language"]))
    write_rows(tmp_path / "rows.jsonl", ROWS["language"])
    for data in ({"train": tmp_path / "rows.jsonl"}, str(tmp_path / "rows.jsonl")):
        assert same(online, surefoot.train("language", **settings("language", data)))


def test_every_data_field_accepts_rows(tmp_path: Path) -> None:
    fields = settings("language", {"train": ROWS["language"], "held_out": ROWS["language"]})
    fields |= {"mixing": {"sft_coefficient": 0.1, "demonstrations": ROWS["sft"]}, "evaluation": {"demonstrations": ROWS["sft"]}}
    surefoot.train("language", run_dir=tmp_path / "run", **fields)
    names = {path.name.partition("-")[0] for path in (tmp_path / "run" / "rows").iterdir()}
    assert names == {"train", "held_out", "demonstrations"}
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["held_out_log_likelihood"] is not None


def test_moved_run_resumes_and_evaluates_with_its_stored_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {"train": ROWS["sft"], "held_out": ROWS["sft"]}
    stops = iter([True])
    surefoot.train("sft", run_dir="run", callback=lambda row: next(stops), **settings("sft", rows))
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert surefoot.evaluate("moved")["held_out_loss"] > 0
    assert same(surefoot.resume("moved"), surefoot.train("sft", **settings("sft", ROWS["sft"])))
    assert read_toml(Path("moved/config.toml"))["data"]["train"].startswith("moved/rows/train-")


def test_evaluate_accepts_rows() -> None:
    model = surefoot.train("sft", **settings("sft", {"train": ROWS["sft"], "held_out": ROWS["sft"]}))
    assert surefoot.evaluate(model, data=ROWS["sft"]) == surefoot.evaluate(model)
    assert surefoot.evaluate(model, data=ROWS["sft"][:1]) != surefoot.evaluate(model)


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


def test_invalid_rows_are_rejected_and_leave_no_run_folder(tmp_path: Path) -> None:
    for rows, message in [
        ([], r"^data\.train: has no rows; pass at least one"),
        (["new bike: "], r"^data\.train: row 1 is text; pass rows as dicts, such as \{'prompt': …\}"),
        ([ROWS["sft"][0], {"prompt": {1, 2}}], r"^data\.train: row 2 has what JSON can't hold \(.*a set.*\); use text"),
        ([{"prompt": float("nan")}], r"^data\.train: row 1 has what JSON can't hold"),
        ([{"prompt": "a", "note": CIRCLE}], r"^data\.train: row 1 has what JSON can't hold \(.*Circular"),
        ([{"prompt": "a", "note": ["\ud83d"]}], r"^data\.train: row 1: column 'note' has half of a character \('\\ud83d'\)"),
        ([{"prompt": 3, "completion": "x"}], r"rows/train-[0-9a-f]{16}\.jsonl, line 1: .*column 'prompt' is a number"),
    ]:
        with pytest.raises(SurefootError, match=message):
            surefoot.train("sft", run_dir=tmp_path / "run", **settings("sft", rows))
        assert not (tmp_path / "run").exists()


def test_passed_rows_do_not_modify_an_existing_run_folder(tmp_path: Path) -> None:
    surefoot.train("sft", run_dir=tmp_path / "run", **settings("sft", ROWS["sft"]))
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*"))}
    with pytest.raises(SurefootError, match="contains a run; continue it"):
        surefoot.train("sft", run_dir=tmp_path / "run", **settings("sft", ROWS["sft"][:2]))
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*"))} == before


def test_train_reuses_a_folder_left_by_a_kill_during_startup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a kill leaves at most the stored rows and a lock file."""
    monkeypatch.setattr(launch.RunFolder, "discard", launch.RunFolder.close)
    monkeypatch.setattr(launch, "_make_world", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        surefoot.train("sft", run_dir=tmp_path / "run", **settings("sft", ROWS["sft"]))
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"rows", ".lock"}
    monkeypatch.undo()
    surefoot.train("sft", run_dir=tmp_path / "run", **settings("sft", ROWS["sft"]))
    assert (tmp_path / "run" / "finished.json").exists()


def test_stored_files_are_named_by_content_and_round_trip(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"prompt": "é\n", "numbers": np.arange(2), "score": np.float32(0.5), "nested": [{"a": None}]}

    one, two = save_rows(rows(), tmp_path, "data.train"), save_rows(list(rows()), tmp_path, "data.train")
    assert one == two
    assert [path.name for path in tmp_path.iterdir()] == [one.name]
    (row,) = read_rows(one)
    assert row.columns == {"prompt": "é\n", "numbers": [0, 1], "score": 0.5, "nested": [{"a": None}]}
    assert save_rows([{"prompt": "b"}], tmp_path, "data.train") != one
    assert json.loads(one.read_text())["score"] == 0.5
