"""``--profile``: seconds that add up, traces of operations, and the same numbers as without it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from language.tiny import write_folder

import surefoot
from surefoot.core.timer import Timer
from surefoot.runs.profile import TRACED_SECONDS, Profile, Sections, table
from surefoot.store.events import Event, Message
from surefoot.store.reading import PROFILE

REWARD = """
def vowels(responses):
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in responses]
"""
FEW = {"reuse": {"epochs": 2, "minibatches": 2}}


def control(**fields: Any) -> Any:
    return surefoot.train("CartPole-v1", steps=1024, seed=1, objective=FEW, evaluation={"episodes": 1}, display=False, **fields)


def tensors(**fields: Any) -> Any:
    rollout = {"environments": 16, "steps": 8}
    observed = {"normalise": {"observations": True, "rewards": True}}
    return surefoot.train(
        "tensor/CartPole-v1",
        steps=512,
        seed=1,
        rollout=rollout,
        objective=FEW,
        evaluation={"episodes": 0},
        display=False,
        **observed,
        **fields,
    )


def compiled(**fields: Any) -> Any:
    return control(engine="compiled", **fields)


def language(**fields: Any) -> Any:
    folder = Path("text")
    folder.mkdir(exist_ok=True)
    write_folder(folder / "llama", "llama")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} says "}) + "\n" for i in range(8)))
    return surefoot.train(
        "language",
        model=str(folder / "llama"),
        steps=24,
        seed=1,
        data={"train": str(folder / "prompts.jsonl"), "max_length": 64},
        sampling={"prompts": 4, "samples": 2, "max_tokens": 8},
        reward={"terms": [{"function": f"{folder / 'rewards.py'}:vowels"}], "missing_eos": "none"},
        objective=FEW,
        display=False,
        **fields,
    )


def weights_of(result: Any) -> list[torch.Tensor]:
    module = result.policy if hasattr(result, "policy") else result.model
    return [x.detach().clone() for x in module.state_dict().values()]


SECTIONS = {
    control: {"collecting/acting", "collecting/environment", "learning/forward", "learning/backward", "learning/optimizer"},
    tensors: {"collecting/acting", "collecting/environment", "collecting/normalising", "collecting/checks", "learning/credit"},
    compiled: {"learning/program", "collecting/acting", "evaluation", "checkpoint", "logging"},
    language: {"collecting/sampling", "collecting/scoring", "collecting/log-probs and values", "collecting/reference"},
}


@pytest.mark.parametrize("train", [control, tensors, language, pytest.param(compiled, marks=pytest.mark.release)])
def test_a_profiled_run_has_the_same_weights_to_the_last_bit_and_names_its_sections(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, profiled = train(), train(run_dir="run", profile=True)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(plain), weights_of(profiled), strict=True))
    summary = json.loads(Path("run", PROFILE, "summary.json").read_text())
    assert {"/".join(row["path"]) for row in summary["sections"]} >= SECTIONS[train]
    assert summary["counted"] == summary["iterations"] - 2 > 0


def test_parts_add_up_to_their_section_and_sections_to_the_iteration(tmp_path: Path) -> None:
    control(run_dir=tmp_path / "run", profile=True)
    summary = json.loads((tmp_path / "run" / PROFILE / "summary.json").read_text())
    for column in ("seconds", "first"):
        spent = {tuple(row["path"]): row[column] for row in summary["sections"]}
        for path, seconds in {(): summary[column], **spent}.items():
            parts = [x for inner, x in spent.items() if inner[:-1] == path]
            assert not parts or sum(parts) == pytest.approx(seconds, rel=1e-6, abs=1e-9)
    calls = {tuple(row["path"]): row["calls"] for row in summary["sections"]}
    assert calls["learning", "backward"] == 4, "2 epochs of 2 minibatches"
    assert calls["collecting", "environment"] == 32, "steps of a rollout"


def test_the_traces_are_of_the_second_iteration_with_sections_and_operations(tmp_path: Path) -> None:
    control(run_dir=tmp_path / "run", profile=True)
    folder = tmp_path / "run" / PROFILE
    names = {}
    for part in ("collecting", "learning"):
        events = json.loads(gzip.decompress((folder / f"{part}.json.gz").read_bytes()))["traceEvents"]
        names[part] = [event["name"] for event in events if event.get("ph") == "X"]
        assert names[part].count(part) == 1
    assert names["collecting"].count("environment") == 32
    assert names["learning"].count("backward") == 4
    assert "aten::addmm" in names["learning"]
    assert not any("environment" in name for name in names["learning"])


def test_a_long_section_is_traced_only_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.runs.profile.TRACED_SECONDS", 0.0)
    control(run_dir=tmp_path / "run", profile=True)
    events = json.loads(gzip.decompress((tmp_path / "run" / PROFILE / "collecting.json.gz").read_bytes()))["traceEvents"]
    assert [event["name"] for event in events].count("acting") == 1
    assert TRACED_SECONDS > 0


def test_messages_have_the_table_and_the_files_without_a_folder_only_the_table(tmp_path: Path) -> None:
    lines: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Message):
            lines.append(event.text)

    surefoot.train("CartPole-v1", steps=1024, objective=FEW, display=listen, run_dir=tmp_path / "run", profile=True)
    assert any(line.startswith("profile of 4 iterations (mean of 2") for line in lines)
    assert lines[-1].endswith("collecting.json.gz, " + str(tmp_path / "run" / PROFILE / "learning.json.gz"))
    lines.clear()
    surefoot.train("CartPole-v1", steps=256, objective=FEW, display=listen, profile=True)
    assert any("(the first, with start-up)" in line for line in lines)
    assert lines[-1].split()[0] == "all"
    lines.clear()
    surefoot.train("CartPole-v1", steps=256, objective=FEW, display=listen)
    assert not any("profile" in line for line in lines)


def test_a_timer_without_details_measures_only_sections() -> None:
    timer = Timer()
    work = timer.timed("work", len)
    assert work is len
    with timer.section("outer") as outer, timer.detail("inner"):
        work([])
    assert set(timer.seconds) == {("outer",)}
    assert timer.seconds["outer",] == outer.seconds > 0
    timer.detailed = True
    with timer.section("outer"), timer.detail("inner"):
        assert timer.timed("work", len)([1]) == 1
    assert timer.calls == {("outer",): 2, ("outer", "inner"): 1, ("outer", "inner", "work"): 1}


def test_a_section_that_raises_is_closed() -> None:
    timer = Timer()
    with pytest.raises(ValueError, match="x"), timer.section("outer"), timer.section("inner"):
        raise ValueError("x")
    with timer.section("next"):
        pass
    assert set(timer.seconds) == {("outer", "inner"), ("outer",), ("next",)}


def test_the_device_is_synchronised_at_the_end_of_every_section() -> None:
    timer, waited = Timer(), []
    timer.synchronise = lambda: waited.append(len(timer.seconds))
    with timer.section("outer"), timer.section("inner"):
        pass
    assert waited == [0, 1]


def test_the_table_is_in_order_of_time_and_has_shares_of_the_whole() -> None:
    profile = Profile(Timer(), None, "cpu")
    profile.first = Sections(1, 2.0, {("a",): 1.0}, {("a",): 1})
    profile.others = Sections(2, 4.0, {("a",): 1.0, ("b",): 2.0, ("b", "c"): 0.5}, {("a",): 2, ("b",): 2, ("b", "c"): 40})
    rows = [line.split() for line in table(profile.summary())[2:]]
    assert rows == [
        ["b", "1.0000", "50.0%", "1", "0.0000"],
        ["c", "0.2500", "12.5%", "20", "0.0000"],
        ["other", "0.7500", "37.5%", "0.0000"],
        ["a", "0.5000", "25.0%", "1", "1.0000"],
        ["other", "0.5000", "25.0%", "1.0000"],
        ["all", "2.0000", "100.0%", "2.0000"],
    ]


def test_sections_of_later_iterations_do_not_change_the_first() -> None:
    """A part may be missing in the first iteration, or in all others; the rest of its section is then all of it."""
    profile = Profile(Timer(), None, "cpu")
    profile.first = Sections(1, 2.0, {("a",): 1.0}, {("a",): 1})
    profile.others = Sections(2, 4.0, {("a",): 3.0, ("a", "c"): 1.0}, {("a",): 2, ("a", "c"): 2})
    rows = {tuple(row["path"]): (row["seconds"], row["first"]) for row in profile.summary()["sections"]}
    assert rows == {("a",): (1.5, 1.0), ("a", "c"): (0.5, 0.0), ("a", "other"): (1.0, 1.0), ("other",): (0.5, 1.0)}
    profile.first, profile.others = profile.others, Sections(1, 2.0, {("a",): 1.0}, {("a",): 1})
    rows = {tuple(row["path"]): row["seconds"] for row in profile.summary()["sections"]}
    assert rows == {("a",): 1.0, ("a", "c"): 0.0, ("a", "other"): 1.0, ("other",): 1.0}
