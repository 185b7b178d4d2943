"""Every example runs on a small budget in its own folder."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

import surefoot

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BUDGETS = {
    "cartpole.py": ["--steps", "512"],
    "ladder.py": ["--steps", "300"],
    "memory.py": ["--steps", "2048", "--episodes", "2"],
    "mixed_actions.py": ["--steps", "1024"],
    "own_environment.py": ["--steps", "1024"],
    "own_loop_best_of_n.py": ["--steps", "128"],
    "own_loop_curriculum.py": ["--steps", "512"],
    "own_loop_reinforce.py": ["--steps", "512"],
    "own_network.py": ["--steps", "1024"],
    "stop_early.py": ["--steps", "1024", "--target", "5"],
    "load_and_act.py": ["--steps", "512"],
}
SAYS = {
    "cartpole.py": "greedy return",
    "ladder.py": "PPO_CLIP",
    "memory.py": "worst of 2 episodes",
    "mixed_actions.py": "of 16",
    "own_environment.py": "V = ",
    "own_loop_best_of_n.py": "best of 8",
    "own_loop_curriculum.py": "episodes of 500 steps",
    "own_loop_reinforce.py": "mean return",
    "own_network.py": "with only east (2) and west (3) allowed",
    "stop_early.py": "was reached after",
    "load_and_act.py": "return of one greedy episode",
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(BUDGETS) == set(SAYS)


@pytest.mark.parametrize("name", sorted(BUDGETS))
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As ``python examples/NAME`` does, but in this process, which has loaded torch already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *BUDGETS[name]])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


def test_examples_use_public_names_only() -> None:
    for name in BUDGETS:
        tree = ast.parse((EXAMPLES / name).read_text("utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {module for module in imported if module.startswith("surefoot.")} == set(), name
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        used = {node.attr for node in attributes if node.value.id == "surefoot"}
        assert used
        assert used <= set(surefoot.__all__), name
