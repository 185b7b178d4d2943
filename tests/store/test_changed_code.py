"""Code that a recipe names is compared with that of the checkpoint, before any of it runs."""

import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

import surefoot
from surefoot import SurefootError
from surefoot.compare import algorithms
from surefoot.compare.algorithms import compare_algorithms
from surefoot.compare.cells import REQUEST
from surefoot.compare.runs import compare_runs, read_run
from surefoot.compare.tune import Plan, resume_study
from surefoot.diagnostics.findings import check_run
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.spaces import Choices
from surefoot.store.checkpoint import load_checkpoint
from surefoot.store.folder import match_settings
from surefoot.store.source import follow, named_in, source_of_object, sources_of

ENV = """
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


def append(name: str) -> None:
    Path(name).write_text(f"{Path(name).read_text()}\nCHANGED = True\n")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("env.py", "env.py"), ("rate.py", "rate"), ("helpers/scale.py", "helpers.scale"), ("helpers/__init__.py", "helpers")],
)
def test_changed_code_is_rejected_before_it_runs(copy: Path, name: str, shown: str) -> None:
    append(name)
    with pytest.raises(
        SurefootError, match=rf"run: changed since the checkpoint \(source of {shown}: \w{{8}} -> \w{{8}}\); undo"
    ):
        surefoot.resume("run", steps=128)
    assert not Path("ran").exists()


def test_commands_that_run_changed_code_say_so(command: Any, copy: Path) -> None:
    append("env.py")
    for words in (["evaluate", "run", "--episodes", "1", "--json"], ["push", "run", "--dry-run", "--episodes", "0"]):
        code, _, err = command(*words)
        assert code == 0, err
        assert re.fullmatch(r"note: changed since the checkpoint: source of env.py: \w{8} -> \w{8}\n", err), err


def test_a_changed_recipe_is_rejected_before_its_code_runs(copy: Path) -> None:
    Path("other.py").write_text(ENV)
    config = Path("run/config.toml")
    config.write_text(config.read_text().replace("env.py:Env", "other.py:Env"))
    with pytest.raises(SurefootError, match=r"config.toml: changed since the checkpoint \(task: env.py:Env -> other.py:Env"):
        surefoot.resume("run", steps=128)
    assert not Path("ran").exists()


def test_a_study_and_a_comparison_of_changed_code_are_rejected_before_it_runs(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(find_recipe("env.py:Env", FIELDS), {"objective.gamma": Choices((0.9, 0.99))}, 1, False)
    Path("study").mkdir()
    Path("same.py").write_text(SAME)
    match_settings(Path("study") / REQUEST, plan.to_json(), "")
    monkeypatch.setattr(algorithms, "run_cells", lambda *anything: [][0])
    calls = (
        lambda: compare_algorithms("env.py:Env", ["PPO_CLIP"], FIELDS, 1, Path("both")),
        lambda: resume_study(Path("study"), trials=2),
    )
    with pytest.raises(IndexError):
        calls[0]()
    append("env.py")
    Path("ran").unlink()
    for call in calls:
        with pytest.raises(SurefootError, match=r"was started with other settings \(source of env.py: "):
            call()
    assert not Path("ran").exists()


def test_code_that_is_not_used_may_change(copy: Path) -> None:
    append("unused.py")
    surefoot.resume("run", steps=128)


def test_allowed_code_belongs_to_the_next_checkpoint_and_the_old_best_score_no_longer_counts(copy: Path) -> None:
    append("env.py")
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
    table |= {
        "model": "org/name",
        "url": "http://host:80/x",
        "id": "pkg:Env-v0",
        "server": "s.py",
        "of": "pettingzoo/game:make",
    }
    assert named_in(table) == ["a/b.py", "game", "judge", "pkg", "pkg.envs", "s.py"]


def test_imports_are_followed_through_circles_errors_and_modules_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import b, json, surefoot\nif 0:\n    from deep.er import c\n")
    (tmp_path / "b.py").write_text("import a")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "er.py").write_text("this is not Python")
    found = follow(["a"], [], tmp_path)
    assert sorted(found["code"]) == ["a", "b", "deep.er"]
    assert list(found["packages"]) == ["surefoot"]


USED_BEFORE_AND_AFTER = {
    "a table": ("K = {}\nf = lambda: K", "{'a': [1, 2]}", "{'a': [2, 1]}"),
    "a base class": ("class B:\n    r = {}\nclass f(B):\n    pass", "1", "2"),
    "a static method": ("K = {}\nclass f:\n    @staticmethod\n    def r():\n        return K", "(1,)", "(2,)"),
    "a partial": ("import functools\nf = functools.partial(lambda k: k, {})", "1", "2"),
    "a method": ("class G:\n    def m(self):\n        return {}\nf = G().m", "1", "2"),
}


@pytest.mark.parametrize(("code", "before", "after"), USED_BEFORE_AND_AFTER.values(), ids=USED_BEFORE_AND_AFTER)
def test_an_object_of_a_script_is_compared_by_its_source_and_what_it_uses(
    code: str, before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashed(value: str) -> str:
        main = ModuleType("__main__")
        main.__file__ = str(tmp_path / f"{len(list(tmp_path.iterdir()))}.py")
        Path(main.__file__).write_text(code.replace("{}", value))
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(code.replace("{}", value), main.__file__, "exec"), vars(main))
        return source_of_object("reward", main.f)[0]["reward"]

    assert hashed(before) == hashed(before) != hashed(after)


@pytest.mark.parametrize(
    "code",
    [
        "import importlib\nM = {'one': 'c', 'two': 'a.b'}\nimportlib.import_module(M[input()])",
        "from importlib import import_module as load\nload('.b', __name__)",
        "import importlib\nfor name in dir(): importlib.import_module(f'{__name__}.{name}')",
        "exec(open('a/b.py').read())",
        "import gymnasium\ngymnasium.register('B-v0', entry_point='a.b:Env')",
    ],
)
def test_what_a_file_may_import_by_a_text_is_followed(code: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__init__.py").write_text(code)
    (tmp_path / "a" / "b.py").write_text("")
    assert any(name in follow(["a"], [], tmp_path)["code"] for name in ("a.b", "a/b.py"))


def test_a_registered_id_has_the_code_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium, "registry", {"Own-v0": EnvSpec("Own-v0", entry_point="own.env:Env")})
    assert sources_of({"task": "Own-v0"})["roots"] == ["own.env"]


def test_the_settings_of_rounds_and_comparisons_have_the_code_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("judge.py").write_text("def best(responses):\n    return responses\n")
    settings, file = {"judge": "judge.py:best", "pairs": 8}, tmp_path / "rounds.json"
    match_settings(file, settings, "choose another --name")
    match_settings(file, settings, "choose another --name")
    append("judge.py")
    with pytest.raises(SurefootError, match=r"started with other settings \(source of judge.py: \w{8} -> \w{8}\); repeat"):
        match_settings(file, settings, "choose another --name")
