"""Code that a recipe names is compared with that of the checkpoint, before any of it runs."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot import SurefootError
from surefoot.compare.runs import compare_runs, read_run
from surefoot.diagnostics.findings import check_run
from surefoot.store.checkpoint import load_checkpoint
from surefoot.store.folder import match_settings
from surefoot.store.source import follow, named_in, source_of_object

ENV = """
import sys
import gymnasium
from helpers import scale
open("ran", "a").close()
class Env(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
"""
FIELDS: dict[str, Any] = {
    "steps": 64,
    "rollout": {"environments": 2, "steps": 16, "symmetry": "same.py:same"},
    "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
    "optimizer": {"schedule": "rate:rate"},
    "evaluation": {"episodes": 1},
    "traces": {"rows": 0},
}
SAME = "import torch\ndef same(o, a):\n    return o, a\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of a run, and the run."""
    folder, here = tmp_path_factory.mktemp("project"), Path.cwd()
    (folder / "helpers").mkdir()
    (folder / "helpers" / "__init__.py").write_text("from . import scale")
    (folder / "helpers" / "scale.py").write_text("SCALE = 1.0")
    (folder / "env.py").write_text(ENV)
    (folder / "rate.py").write_text("def rate(left):\n    return left\n")
    (folder / "unused.py").write_text("")
    os.chdir(folder)
    sys.path.append(str(folder))
    try:
        fields = {**FIELDS, "rollout": {"environments": 2, "steps": 16}}
        surefoot.train("env.py:Env", run_dir="run", **fields)
    finally:
        os.chdir(here)
        sys.path.remove(str(folder))
    return folder


@pytest.fixture
def copy(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = shutil.copytree(project, tmp_path / "copy")
    monkeypatch.chdir(copy)
    monkeypatch.syspath_prepend(copy)
    for name in ("helpers", "helpers.scale", "rate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (copy / "ran").unlink()
    return copy


def append(name: str) -> Callable[[], None]:
    def change() -> None:
        Path(name).write_text(f"{Path(name).read_text()}\nCHANGED = True\n")

    return change


@pytest.mark.parametrize(
    ("name", "shown"),
    [("env.py", "env.py"), ("rate.py", "rate"), ("helpers/scale.py", "helpers.scale"), ("helpers/__init__.py", "helpers")],
)
def test_changed_code_is_rejected_before_it_runs(copy: Path, name: str, shown: str) -> None:
    append(name)()
    with pytest.raises(
        SurefootError, match=rf"run: changed since the checkpoint \(source of {shown}: \w{{8}} -> \w{{8}}\); undo"
    ):
        surefoot.resume("run", steps=128)
    assert not Path("ran").exists()


def test_a_changed_recipe_is_rejected_before_its_code_runs(copy: Path) -> None:
    Path("other.py").write_text(ENV)
    config = Path("run/config.toml")
    config.write_text(config.read_text().replace("env.py:Env", "other.py:Env"))
    with pytest.raises(SurefootError, match=r"config.toml: changed since the checkpoint \(task: env.py:Env -> other.py:Env"):
        surefoot.resume("run", steps=128)
    assert not Path("ran").exists()


def test_code_that_is_not_used_may_change(copy: Path) -> None:
    append("unused.py")()
    surefoot.resume("run", steps=128)


def test_allowed_code_belongs_to_the_next_checkpoint_and_the_old_best_score_no_longer_counts(copy: Path) -> None:
    append("env.py")()
    before = compare_runs([read_run(Path("run"))])
    assert any("source of env.py" in line for line in check_run("run").changed)
    shutil.copytree("run", "old")
    lines: list[str] = []
    surefoot.resume("run", steps=128, allow_changes=True, display=lambda event: lines.append(str(getattr(event, "text", ""))))
    assert any("the code have changed: the best score so far no longer counts" in line for line in lines)
    surefoot.resume("run", steps=192)
    assert check_run("run").changed == []
    both = compare_runs([read_run(Path("run")), read_run(Path("old"))])
    assert (len(before.groups), len(both.groups), "source of env.py" in both.fields) == (1, 2, True)
    sources = load_checkpoint(Path("run/checkpoints/192"))["code"]
    assert sources["packages"].keys() == {"gymnasium"}
    assert sorted(sources["code"]) == ["env.py", "helpers", "helpers.scale", "rate"]


def test_every_name_of_a_file_or_module_in_a_recipe_counts() -> None:
    table = {"task": "pkg.envs:Env", "reward": {"terms": [{"function": "a/b.py:f"}], "gold": "judge:J"}, "text": "see: this"}
    table |= {"model": "org/name", "url": "http://host:80/x", "id": "pkg:Env-v0"}
    assert named_in(table) == ["a/b.py", "judge", "pkg", "pkg.envs"]


def test_imports_are_followed_through_circles_errors_and_modules_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import b, json, surefoot\nif 0:\n    from deep.er import c\n")
    (tmp_path / "b.py").write_text("import a")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "er.py").write_text("this is not Python")
    found = follow(["a"], [], tmp_path)
    assert sorted(found["code"]) == ["a", "b", "deep.er"]
    assert list(found["packages"]) == ["surefoot"]


def test_an_object_of_a_script_is_compared_by_its_source_and_what_it_uses() -> None:
    def hashed(scale: float, helper: str) -> str:
        names: dict[str, Any] = {"__name__": "__main__", "SCALE": scale}
        code = f"def helper():\n    return {helper}\ndef reward(x):\n    return SCALE * helper()\n"
        exec(compile(code, "<none>", "exec"), names)
        return source_of_object("reward", names["reward"])["reward"]

    assert hashed(1.0, "1") == hashed(1.0, "1") != hashed(2.0, "1")


def test_imports_by_a_call_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import importlib\nimport runpy\nWORLDS = {'one': 'worlds.one', 'two': 'worlds.two'}\nOTHER = 'unused'\n"
        "importlib.import_module(WORLDS[input()])\nM = 'b'\nM: str = 'd'\n__import__(name=M)\nrunpy.run_path('c.py')\n"
    )
    (tmp_path / "worlds").mkdir()
    (tmp_path / "worlds" / "__init__.py").write_text("from importlib import import_module\nimport_module('.three', __name__)")
    for name in ("worlds/one", "worlds/two", "worlds/three", "b", "c", "d", "unused", "worlds/beside"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "worlds" / "two.py").write_text("import runpy\nrunpy.run_path('beside.py')\nrunpy.run_path('~nobody/x.py')")
    found = follow(["a"], [], tmp_path)
    names = ["a", "b", "beside.py", "c.py", "d", "worlds", "worlds.one", "worlds.three", "worlds.two"]
    assert sorted(found["code"]) == names


def test_the_settings_of_rounds_and_comparisons_have_the_code_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("judge.py").write_text("def best(responses):\n    return responses\n")
    settings, file = {"judge": "judge.py:best", "pairs": 8}, tmp_path / "rounds.json"
    match_settings(file, settings, "choose another --name")
    match_settings(file, settings, "choose another --name")
    append("judge.py")()
    with pytest.raises(SurefootError, match=r"started with other settings \(source of judge.py: \w{8} -> \w{8}\); repeat"):
        match_settings(file, settings, "choose another --name")
