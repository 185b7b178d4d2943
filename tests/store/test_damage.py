"""Flipped bits and truncated files anywhere in a run: no traceback, no hang, and no wrong result without an error."""

import json
import os
import shutil
from pathlib import Path

import pytest
from damage import PLACED, UNSIGNED, Campaign

from surefoot.diagnostics.findings import damaged_files
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.store.manifest import MANIFEST

CASES = int(os.environ.get("SUREFOOT_DAMAGE", "60"))
ASKED = ["--prompt", "a: ", "--max-tokens", "3", "--greedy"]
BAD = {"traceback", "hang", "not one line", "another answer"}


@pytest.fixture(scope="module")
def control(tmp_path_factory):
    path = tmp_path_factory.mktemp("control") / "run"
    changes = {"steps": 1024, "evaluation": {"every": 256, "episodes": 1}, "checkpoint": {"every": 256}}
    api.start(find_recipe("CartPole-v1", changes), path, callback=lambda metrics: metrics["steps"] >= 512)
    words = [["evaluate", "RUN", "--episodes", "1", "--json"], ["check", "RUN", "--json"], ["compare", "RUN", str(path)]]
    return Campaign(path, [*words, ["resume", "RUN", "--quiet"]])


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{c}: ", "completion": c * 3}) + "\n" for c in "abcdefghij"))
    data = {"train": str(rows), "held_out": str(rows), "max_length": 16, "batch": 8}
    changes = {"model": "pocket", "data": data, "steps": 32, "checkpoint": {"every": 8}, "evaluation": {"every": 8, "rows": 4}}
    api.start(find_recipe("sft", changes), folder / "run", callback=lambda metrics: metrics["steps"] >= 16)
    words = [["evaluate", "RUN", "--json"], ["check", "RUN", "--json"], ["resume", "RUN", "--quiet"]]
    return Campaign(folder / "run", [*words, ["generate", "RUN", *ASKED]])


def left_by(campaign, scratch, kinds, commands, below="", sparse=False):
    scratch = scratch / "s"
    scratch.mkdir(exist_ok=True)
    outcomes = campaign.replace_each(scratch, kinds, commands, below, sparse)
    return [outcome for outcome in outcomes if outcome.kind in BAD and not outcome.text.startswith("inspected: ")]


@pytest.mark.parametrize(
    ("world", "kind"), [("control", "pipe"), ("control", "folder"), ("language", "device"), ("language", "socket")]
)
def test_what_is_no_regular_file_is_one_line_and_never_read(request, tmp_path, monkeypatch, world, kind):
    """A pipe would block, a device has no end."""
    monkeypatch.chdir(tmp_path)
    campaign = request.getfixturevalue(world)
    assert left_by(campaign, tmp_path, [kind], [["check", "RUN"], ["inspector"]]) == []
    if kind == "pipe":
        used = ["evaluate", "RUN", "--episodes", "1"] if world == "control" else ["generate", "RUN/model", *ASKED]
        assert left_by(campaign, tmp_path, [kind], [used], "best" if world == "control" else "model") == []


def test_a_flipped_bit_of_a_trained_model_is_one_line_wherever_it_is_used(language, tmp_path, command):
    run = Path(shutil.copytree(language.run, tmp_path / "run"))
    file = run / "model" / "model.safetensors"
    file.write_bytes(flipped(file.read_bytes()))
    train = ["train", "sft", "--data.train", str(language.run.parent / "rows.jsonl"), "--steps", "8", "--quiet"]
    for words in ([*train, "--model", "run"], [*train, "--model", "run/model"], ["generate", "run/model", *ASKED]):
        code, _, error = command(*words)
        assert (code, error.count("\n")) == (2, 1), words
        assert "model.safetensors does not match its SHA-256 (changed or damaged); copy the folder again, or remove" in error


@pytest.mark.parametrize("world", ["control", "language"])
def test_check_compares_every_file_of_a_run_with_its_hash(request, tmp_path, world, command):
    campaign = request.getfixturevalue(world)
    run = Path(shutil.copytree(campaign.run, tmp_path / "run"))
    assert damaged_files(run) == []
    for path in campaign.files():
        name = path.relative_to(campaign.run)
        if name.name in (*UNSIGNED, MANIFEST) or name.parts[0] == "rows":  # a file of rows has its hash in its name
            continue
        content = path.read_bytes()
        (run / name).write_bytes(flipped(content))
        assert [str(name.name) in fault and "changed or damaged" in fault for fault in damaged_files(run)] == [True], name
        (run / name).write_bytes(content)
    (lost := next((run / "checkpoints").glob("*")) / MANIFEST).unlink()
    assert [fault.split(":")[0] for fault in damaged_files(run)] == [str(lost.parent.relative_to(run))]
    (run / "environment.json").unlink()
    (next((run / "traces").glob("*")) if world == "control" else run / "model" / MANIFEST).write_text("{")
    code, out, _ = command("check", str(run))
    assert (code, "serious: files are not what the run wrote: " in out) == (1, True)


def flipped(content):
    at = max(len(content) - 5, 0)
    return content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :]


@pytest.mark.release
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world", ["control", "language"])
def test_no_command_reads_what_is_no_regular_file(request, tmp_path, monkeypatch, world):
    monkeypatch.chdir(tmp_path)
    campaign = request.getfixturevalue(world)
    commands = [["report", "RUN", "--out", "r.html"], ["compare", "RUN", str(campaign.run)]]
    alone = ["--episodes", "0"] if world == "control" else []
    commands += [["push", "RUN", "a/b", "--dry-run", "--out", "hub", *alone], *campaign.commands[:1]]
    commands += [["generate", "RUN", *ASKED]] if world == "language" else []
    assert left_by(campaign, tmp_path, PLACED, commands, sparse=True) == []


HEAVY = [
    pytest.param(kind, CASES, 7, marks=[pytest.mark.release, pytest.mark.timeout(2400)]) for kind in ("control", "language")
]


@pytest.mark.parametrize("flips", [True, False], ids=["flips", "cuts"])
@pytest.mark.parametrize(("kind", "cases", "seed"), [("control", 12, 1), ("language", 4, 1), *HEAVY])
def test_damage_to_a_run_is_detected(request, tmp_path, monkeypatch, kind, cases, seed, flips):
    monkeypatch.chdir(tmp_path)
    campaign = request.getfixturevalue(kind)
    campaign.go(cases, flips, seed, tmp_path)
    assert [outcome for outcome in campaign.outcomes if outcome.kind in BAD] == []
