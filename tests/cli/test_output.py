"""Commands print through one function, which makes control characters visible."""

import ast
import json
from pathlib import Path

import pytest

import surefoot
from surefoot.cli.output import first_and_best, result_line
from surefoot.cli.train import spread
from surefoot.recipes.reading import make_recipe
from surefoot.terminal import shown_on

SOURCE = Path(surefoot.__file__).parent / "cli"
EXCEPTIONS = {"output.py": {"click.echo"}, "language.py": {"click.echo"}, "main.py": {"click.echo", "print"}}
"""files that print otherwise: the function itself, generate to a pipe, and the line of an error, made visible there"""


def test_commands_print_through_one_function() -> None:
    for path in SOURCE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        used = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        named = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        printing = (used | named) & {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}
        assert printing <= EXCEPTIONS.get(path.name, set()), path


def test_the_summary_has_the_share_of_truncated_answers(tmp_path: Path) -> None:
    table = {"kind": "language", "model": "m", "data": {"train": "p.jsonl"}, "reward": {"terms": [{"function": "a.py:f"}]}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "steps": 64, "reward": 0.25, "eos_rate": 0.75}) + "\n")
    line, _ = result_line(make_recipe(table), tmp_path)  # type: ignore[arg-type]
    assert line == f"m, seed 1: reward 0.25 after 64 steps, 25% of the last answers truncated -> {tmp_path}"


def test_text_for_a_terminal_keeps_its_lines_and_shows_control_characters() -> None:
    class Narrow:
        encoding = "ascii"

    assert shown_on(None, "a\tb\nc\x1b[2J\x9b\u202e\udcff\r→") == "a\tb\nc\\x1b[2J\\x9b\\u202e\\udcff\\r→"
    assert shown_on(Narrow(), "→ é") == "\\u2192 \\xe9"


def test_a_demo_shows_control_characters_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from surefoot import demos
    from surefoot.demos import control

    small = {"steps": 64, "rollout": {"environments": 2, "steps": 32}, "evaluation": {"episodes": 0}}
    found = demos.find_recipe
    monkeypatch.setattr(demos, "find_recipe", lambda name, changes: found(name, {**changes, **small}))
    demos.run_demo(control.demo(), tmp_path / "red\x1b[31m", 1, lambda recipe, folder: lambda event: None)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count(r"red\x1b[31m/demo") == 3


def test_scores_of_seeds_and_the_best_value_of_a_run_are_summed_up() -> None:
    assert spread([1.0, 3.0, None]) == "2 seeds: mean 2, standard deviation 1.414, worst 1"
    assert spread([4.0]) == "1 seeds: mean 4, standard deviation 0, worst 4"
    assert spread([None]) == "no seed has a score"
    values = [2.0, None, 0.5, 12.0]
    for name, best in (("held_out_loss", "0.5 at 3,000"), ("episode_return", "12.0 at 4,000")):
        rows = [{name: value, "steps": 1000 * number} for number, value in enumerate(values, 1)]
        assert first_and_best(name, rows) == f" (first 2 at 1,000, best {best})"
        assert first_and_best(name, rows[:2]) == ""
    assert first_and_best("episode_return", rows, ["3000"]) == " (first 2 at 1,000, best 0.5 at 3,000)", "that of best/"
