"""Untrusted runs and agents: whatever their files contain, commands report one line and never hang."""

import gc
import hashlib
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot import SurefootError
from surefoot.files import steps_named
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.store.checkpoint import load_checkpoint, save_checkpoint
from surefoot.store.manifest import MANIFEST, fault_of

DEEP, LONG = "[" * 100_000, "9" * 400
TABLE_DEEP = '{"a":' * 500 + "1" + "}" * 500


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    changes = {"steps": 1024, "evaluation": {"every": 256, "episodes": 1}, "checkpoint": {"every": 256}}
    api.start(find_recipe("CartPole-v1", changes), path, callback=lambda metrics: metrics["steps"] >= 512)
    return path


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(autouse=True)
def _nothing_hangs():
    def ring(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def commands(run):
    """Every command that reads a run of control, with the options that make it quick."""
    run = str(run)
    return [
        ["check", run],
        ["report", run, "--out", "page.html"],
        ["compare", run, run + "-2"],
        ["evaluate", run, "--episodes", "1"],
        ["watch", run, "--max-steps", "2"],
        ["export", run, "--out", "agent.onnx"],
        ["inspect", run, "--clip-table", "--no-browser"],
        ["merge", run, "--out", "merged"],
        ["generate", run, "--prompt", "x"],
        ["chat", run],
        ["resume", run, "--quiet"],
    ]


def reads_weights(words):
    return words[0] in ("evaluate", "watch", "export", "merge", "generate", "chat", "resume")


def rejected(result, *parts):
    code, _, error = result
    assert (code, error.count("\n")) == (2, 1), error
    assert error.startswith("surefoot: ")
    for part in parts:
        assert part in error


def signed(checkpoint):
    """Write a manifest that fits what lies in a checkpoint."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(checkpoint.iterdir())
        if path.name != MANIFEST
    }
    (checkpoint / MANIFEST).write_text(json.dumps({"format": 1, "files": files}))


def best(run):
    return next((run / "best").glob("[0-9]*"))


NO_MANIFESTS = [
    b"[]",
    b'{"format": 1}',
    b'{"format": 1, "files": 3}',
    b'{"format": 1, "files": {"agent.json": 3}}',
    b'{"format": %s, "files": {}}' % LONG.encode(),
    b'{"format": 1, "files": {"agent.json": {"size": %s}}}' % LONG.encode(),
    b'{"format": 1, "files": {"agent.json": {"size": %s}}}' % (b"9" * 5000),
    b'{"format": {}, "files": {}}',
    b'{"format": 1, "files": {}}',
    DEEP.encode(),
    TABLE_DEEP.encode(),
    "\ud800".encode("utf-8", "surrogatepass"),
]


def test_a_manifest_of_any_shape_is_rejected_in_one_line(command, run):
    for number, content in enumerate(NO_MANIFESTS):
        for folder in (best(run), run / "checkpoints" / "512"):
            (folder / MANIFEST).write_bytes(content)
        if number % 2:
            rejected(command("evaluate", str(run)), "manifest")
        else:
            rejected(command("resume", str(run), "--quiet"), "512")


def test_a_manifest_lists_names_of_files_beside_it_and_nothing_else(tmp_path):
    save_checkpoint(tmp_path / "one", {"tree": {"n": 1}})
    sound = json.loads((tmp_path / "one" / MANIFEST).read_text())
    for name in ("../agent.json", "/etc/passwd", "..", ".", "a//b", "a\\b", "", "a\nb", "manifest.json", "\x1b[2J"):
        files = {**sound["files"], name: sound["files"]["tree.json"]}
        (tmp_path / "one" / MANIFEST).write_text(json.dumps({**sound, "files": files}))
        with pytest.raises(SurefootError, match="not the name of a file beside it"):
            load_checkpoint(tmp_path / "one")


TREES = [
    ("recipe", {"kind": "language"}),
    ("recipe", {"kind": ["control"]}),
    ("recipe", []),
    ("recipe", {}),
    ("recipe", None),
    ("agent", []),
    ("agent", {"steps": []}),
    ("agent", {"policy.actor_head.weight": 3}),
    ("agent", {"$tensor": []}),
    ("spaces", []),
    ("spaces", {"observation": 3, "action": 4}),
    ("spaces", {"observation": {"type": "Box"}, "action": {"type": "Discrete", "n": -3, "start": 0}}),
    ("spaces", {"observation": {"type": "Dict", "spaces": [3]}, "action": {"type": "Text"}}),
    ("spaces", {"observation": {"type": "Box", "low": 0, "high": 1, "shape": [10**14], "dtype": "float32"}, "action": {}}),
    ("spaces", {"observation": {"type": "Box", "low": int(LONG), "high": 1, "shape": [4], "dtype": "no"}, "action": {}}),
]


@pytest.mark.parametrize("part", ["recipe", "agent", "spaces"])
def test_a_signed_checkpoint_of_another_shape_is_rejected_in_one_line(command, run, part):
    words = [each for each in commands(run) if reads_weights(each) and (each[0] != "resume" or part != "spaces")]
    folders = (best(run), run / "checkpoints" / "512")
    for number, content in enumerate(content for name, content in TREES if name == part):
        for folder in folders:
            (folder / f"{part}.json").write_text(json.dumps(content))
            signed(folder)
        for each in words if number == 0 else (words[0], words[number % len(words)]):
            rejected(command(*each))


STATES = [
    ("state", {"steps": []}),
    ("state", {"steps": int(LONG)}),
    ("state", {"steps": 3, "iteration": 1.5, "updates": 0, "faults": 0, "coefficients": {}, "generators": {}}),
    ("state", {"steps": 3, "iteration": 1, "updates": 0, "faults": 0, "coefficients": 3, "generators": {}}),
    ("state", {"steps": 3, "iteration": 1, "updates": 0, "faults": 0, "coefficients": {}, "generators": {"sample": 3}}),
    ("learner", {"policy": 3}),
    ("learner", {"policy": {"exp_avg": 3}}),
    ("collector", {}),
    ("collector", {"environments": []}),
    ("progress", []),
    ("progress", {"best": "high"}),
]


def test_a_signed_state_of_another_shape_is_rejected_before_the_run_goes_on(command, run):
    folder, before = run / "checkpoints" / "512", (run / "metrics.jsonl").read_bytes()
    for name, content in STATES:
        whole = (folder / f"{name}.json").read_text()
        (folder / f"{name}.json").write_text(json.dumps(content))
        signed(folder)
        rejected(command("resume", str(run), "--quiet"), "512")
        assert (run / "metrics.jsonl").read_bytes() == before
        (folder / f"{name}.json").write_text(whole)


def test_signed_json_beyond_what_python_reads_is_rejected(command, run):
    gc.collect()  # of earlier tests: deep in a recursion Python prints that it can't
    cases = [("recipe", DEEP), ("recipe", "NaN"), ("agent", TABLE_DEEP), ("agent", LONG), ("spaces", "9" * 5000)]
    for name, text in (*cases, ("spaces", DEEP), ("state", '{"a": 1e999}'), ("state", DEEP)):
        folders = (best(run), run / "checkpoints" / "512")[name == "state" :]
        whole = [(folder / f"{name}.json").read_text() for folder in folders]
        for folder in folders:
            (folder / f"{name}.json").write_text(text)
            signed(folder)
        if name != "state":
            rejected(command("evaluate", str(run), "--episodes", "1"))
        if name != "spaces":
            rejected(command("resume", str(run), "--quiet"))
        for folder, content in zip(folders, whole, strict=True):
            (folder / f"{name}.json").write_text(content)


def test_a_signed_agent_of_another_shape_is_rejected_with_an_explanation(run):
    table = json.loads((best(run) / "agent.json").read_text())
    other = "another architecture: .* is no such tensor in the checkpoint and "
    foreign = r"agent.json: names a tensor that was not saved with it \(.*other.*\)$"
    for value, expected in ((None, other), ([1.0], other), ({"$tensor": "other"}, foreign), ({"$tensor": ["other"]}, foreign)):
        (best(run) / "agent.json").write_text(json.dumps({**table, next(iter(table)): value}))
        signed(best(run))
        with pytest.raises(SurefootError, match=expected) as raised:
            api.load(run)
        assert "Error" not in str(raised.value)


@pytest.mark.parametrize(
    ("where", "make"), [("checkpoints", lambda path: path.symlink_to("nothing")), ("best", os.mkfifo)], ids=["link", "pipe"]
)
def test_a_file_named_like_a_checkpoint_is_rejected_before_training(command, run, where, make):
    make(run / where / "768")
    rows = (run / "metrics.jsonl").read_bytes()
    expected = f"{where}/768: is {'not a folder, but' if where == 'best' else 'a link to nothing, which is not there'}"
    rejected(command("resume", str(run), "--quiet"), expected)
    assert (run / "metrics.jsonl").read_bytes() == rows
    if where == "best":
        rejected(command("evaluate", str(run), "--episodes", "1"), expected)
        with pytest.raises(SurefootError, match="is not a folder"):
            api.load(run)


def test_a_file_that_a_manifest_does_not_list_has_one_remedy(command, run):
    newest = run / "checkpoints" / "512"
    os.mkfifo(newest / "extra")
    _, _, error = result = command("resume", str(run), "--quiet")
    rejected(result, f"; remove {newest / 'extra'}")
    assert error.count("remove") == error.count("; ") == 1
    (newest / "extra").unlink()
    assert command("resume", str(run), "--quiet")[0] == 0


PLACED = [("config.toml", "pipe"), ("environment.json", "folder"), ("finished.json", "pipe")]
PLACED += [
    pytest.param(name, kind, marks=pytest.mark.release)
    for name in ("config.toml", "environment.json", "finished.json")
    for kind in ("device", "nothing", "deep", "long", "list")
]


@pytest.mark.parametrize(("name", "kind"), PLACED)
def test_no_file_of_a_run_makes_a_command_hang_or_show_a_traceback(command, run, name, kind):
    (run / name).unlink(missing_ok=True)
    make = {
        "pipe": os.mkfifo,
        "folder": os.mkdir,
        "device": lambda path: os.symlink("/dev/zero", path),
        "nothing": lambda path: None,
        "deep": lambda path: path.write_text(f"x = {DEEP}" if name == "config.toml" else DEEP),
        "long": lambda path: path.write_text(f"steps = {LONG}" if name == "config.toml" else f'{{"steps": {LONG}}}'),
        "list": lambda path: path.write_text("[[a]]" if name == "config.toml" else "[]"),
    }
    make[kind](run / name)
    shutil.copytree(run, f"{run}-2", symlinks=True, ignore=lambda *_: [name])
    for words in (words for words in commands(run) if words[0] in ("check", "report", "compare", "inspect", "resume")):
        code, _, error = command(*words)
        assert code in (0, 1, 2), (words, error)
        if code == 2:
            assert error.count("\n") == 1, (words, error)


def test_a_folder_is_named_by_steps_only_in_the_digits_that_a_run_writes(command, run):
    sound = best(run)
    for name in ("²", "٣", "1e3", "-5", "9" * 40, " 7"):
        shutil.copytree(sound, run / "best" / name)
        shutil.copytree(sound, run / "checkpoints" / name)
        (run / "traces").mkdir(exist_ok=True)
        (run / "traces" / f"{name}.safetensors").write_text("nothing")
        (run / "samples").mkdir(exist_ok=True)
        (run / "samples" / f"{name}.jsonl").write_text("nothing")
    code, out, _ = command("evaluate", str(run), "--episodes", "1")
    assert code == 0
    assert f"checkpoint {sound}\n" in out
    assert command("report", str(run))[0] == 0
    assert command("resume", str(run), "--quiet")[0] == 0
    assert [steps_named(name) for name in ("0", "5120", "²", "٣", "", "9" * 19)] == [0, 5120, None, None, None, None]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_rejected_when_they_are_loaded(command, run, value, tmp_path):
    agent = api.load(run)
    for folder in (best(run), run / "checkpoints" / "512"):
        tensors = load_file(folder / "agent.safetensors")
        name = next(name for name in tensors if "actor_head" in name)
        tensors[name].view(-1)[0] = value
        save_file(tensors, folder / "agent.safetensors")
        signed(folder)
        assert fault_of(folder) is None
    for words in (words for words in commands(run) if words[0] in ("evaluate", "watch", "export", "resume")):
        rejected(command(*words), name, "not finite")
    with torch.no_grad():
        agent.policy.actor_head.weight[0, 0] = value
    agent.save(tmp_path / "saved")
    with pytest.raises(SurefootError, match="not finite"):
        api.load(tmp_path / "saved")


def test_a_name_of_a_run_is_that_of_one_folder_in_letters_that_are_shown(command, tmp_path):
    (tmp_path / "r.toml").write_text('kind = "language"\nmodel = "pocket"\n[data]\ntrain = "x"\n[reward]\ngold = "a:b"\n')
    train = ["train", "CartPole-v1", "--steps", "256"]
    for number, name in enumerate(("", "..", "a/b", "/tmp/x", "a\\b", "a\nb", "a\x1b[2Jb", "a\u202eb", "a\x00b", "a\udcffb")):
        words = ([*train, "--quiet"], [*train, "--dry-run"], ["rounds", "r.toml", "--quiet"])[number % 3]
        rejected(command(*words, "--name", name), "--name=", "is not a folder name")
        if "/" not in name and "\\" not in name and "\x00" not in name and name.strip("."):
            with pytest.raises(SurefootError, match=r"run_dir=.*is not a folder name"):
                api.train("CartPole-v1", steps=256, run_dir=tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]


def test_names_are_escaped_before_they_are_printed(command, run, tmp_path):
    """A folder of a stranger's may be called anything."""
    evil = tmp_path / "a\x1b[2J\x9b31m\u202e\udcffz"
    os.rename(run, evil)
    shutil.copytree(evil, f"{evil}-2")
    for words in [*commands(evil), ["check", str(evil), "--json"], ["compare", str(evil), f"{evil}-2", "--json"]]:
        code, out, error = command(*words)
        assert code in (0, 1, 2)
        assert not {c for c in out + error if not c.isprintable() and c != "\n"}, words
        if "--json" in words:
            json.loads(out)
    for name in ("run\x1b[2J", "manifest\x1b.json"):
        (best(evil) / name).write_text("")
        code, _, error = command("evaluate", str(evil))
        assert code == 2
        assert "\x1b" not in error
