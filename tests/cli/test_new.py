"""``surefoot new``: the files it writes pass their tests and train, and existing files are never overwritten."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot.diagnostics.recipe import check_recipe
from surefoot.recipes.presets import find_recipe
from surefoot.runs.factory import prepared_world
from surefoot.store.finding import any_failed
from surefoot.store.metrics import read_metrics


class Passed:
    """Counts the tests that pass."""

    count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and report.passed


@pytest.mark.parametrize("kind", ["control", pytest.param("language", marks=pytest.mark.slow)])
def test_the_tests_and_the_recipe_of_a_new_task_pass(
    kind: str, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "language":
        pytest.importorskip("transformers")
    code, out, _ = command("new", "my-task", *(["--language"] if kind == "language" else []))
    assert code == 0
    assert "cd my-task" in out
    folder = tmp_path / "my-task"
    names = {"recipe.toml", "environment.py", "test_environment.py"}
    if kind == "language":
        names = {"recipe.toml", "reward.py", "test_reward.py", "prompts.jsonl", "held_out.jsonl"}
    assert {path.name for path in folder.iterdir()} == names
    before = set(sys.modules)
    try:  # in this process, which has loaded torch already
        words = ["-q", "--strict-markers", "-W", "error", "-c", "/dev/null", "--rootdir", str(folder), str(folder)]
        passed = Passed()
        assert pytest.main([*words, "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout"], [passed]) == 0
        assert passed.count == 3
    finally:
        for module in set(sys.modules) - before:
            if str(folder) in str(getattr(sys.modules[module], "__file__", "")):
                del sys.modules[module]
    monkeypatch.chdir(folder)
    checks = check_recipe(find_recipe("recipe.toml"), prepared_world)
    assert not any_failed(checks)
    assert {check.state for check in checks} == {"ok"}, [check for check in checks if check.state != "ok"]


def test_no_held_out_prompt_is_trained_on(command: Any, tmp_path: Path) -> None:
    command("new", "task", "--language")
    train, held_out = (
        {json.loads(line)["prompt"] for line in (tmp_path / "task" / name).read_text().splitlines()}
        for name in ("prompts.jsonl", "held_out.jsonl")
    )
    assert len(train | held_out) == 26
    assert not train & held_out


def test_the_next_command_can_be_copied(command: Any, tmp_path: Path) -> None:
    assert "cd 'my tasks/one'\n" in command("new", "my tasks/one")[1]


def test_nothing_is_overwritten(command: Any, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("mine")
    for name in ("there", "-x y"):
        code, _, err = command("new", "--", name)
        assert code == 2
        assert err.count("\n") == 1
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine.txt"]


@pytest.mark.release
@pytest.mark.parametrize("kind", ["control", "language"])
def test_a_new_task_learns_and_draws_no_findings(
    kind: str, surefoot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole recipe, for seeds that nobody tuned it on."""
    surefoot("new", "my-task", *(["--language"] if kind == "language" else []))
    monkeypatch.chdir(tmp_path / "my-task")
    for seed in ("1", "4"):
        out = surefoot("train", "recipe.toml", "--seed", seed, "--run-dir", seed)
        assert not [line for line in out.splitlines() if line.lstrip().startswith("! ")]
        assert "findings" not in out
        rows = read_metrics(Path(seed) / "metrics.jsonl")
        name = "reward" if kind == "language" else "episode_return"
        assert rows[-1][name] > rows[2][name] + 0.3
