"""Demos are presets; the verifier demo: separate data, ordinary runs as stages, and commands that work."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import cli
from surefoot.demos import Demo, Stage, control, free_folder, in_folder, run_demo, verifier
from surefoot.demos import language as reviews
from surefoot.demos.verifier import Sizes, attempts_at, in_groups, write_data
from surefoot.errors import SurefootError
from surefoot.files import read_toml
from surefoot.language.data.sources import read_rows
from surefoot.recipes.presets import find_recipe, presets
from surefoot.recipes.reading import make_recipe
from surefoot.runs import api
from surefoot.runs.display import Display

TINY = Sizes(demonstrations=128, problems=256, validation=8, test=8)


def rows_in(folder: Path, name: str) -> list[dict[str, Any]]:
    return [row.columns for row in read_rows(folder / f"{name}.jsonl")]


def digits(rows: list[dict[str, Any]]) -> set[str]:
    return {"".join(sorted(row["prompt"].removesuffix("="))) for row in rows}


def test_no_multiset_of_digits_is_in_two_of_training_selection_and_test(tmp_path: Path) -> None:
    write_data(tmp_path / "data", "sorting", 1, Sizes(2_000, 2_000, 128, 256))
    rows = {name: rows_in(tmp_path / "data", name) for name in ("demonstrations", "problems", "validation", "test")}
    assert [len(lines) for lines in rows.values()] == [2_000, 2_000, 128, 256]
    trained = digits(rows["demonstrations"]) | digits(rows["problems"])
    for one, other in ((trained, "validation"), (trained, "test"), (digits(rows["validation"]), "test")):
        assert one.isdisjoint(digits(rows[other]))


def test_no_pair_of_numbers_is_in_test_and_reversed_in_selection(tmp_path: Path) -> None:
    write_data(tmp_path / "data", "addition", 1, Sizes(8, 8, 256, 512))
    pairs = [
        {frozenset(row["prompt"].removesuffix("=").split("+")) for row in rows_in(tmp_path / "data", name)}
        for name in ("validation", "test")
    ]
    assert pairs[0].isdisjoint(pairs[1])


def test_all_algorithms_see_as_many_answers_per_iteration() -> None:
    assert (presets()["task_sft"]["steps"], presets()["sorting"]["steps"]) == (Sizes().demonstrations, Sizes().problems)
    fields = {"model": "pocket", "data": {"train": "problems.jsonl"}}
    ppo, grpo = find_recipe("sorting", fields), find_recipe("sorting", {**fields, **in_groups("GRPO")})
    assert ppo.responses == grpo.responses == 256
    assert (ppo.objective.baseline, grpo.objective.baseline) == ("critic", "group")


def test_a_demo_goes_on_where_it_was_stopped_and_touches_no_finished_one_and_no_other_run(tmp_path: Path) -> None:
    stage = Stage("cartpole", changes={"steps": 256, "evaluation": {"episodes": 1}})
    tiny = Demo("demo", (stage,), lambda folder, seed, started: {"seconds": 0.0})
    for folder in ("demo", "demo-2"):
        run_demo(tiny, tmp_path, 1, lambda recipe, folder: None)
        assert (tmp_path / folder / "demo.json").is_file()
    (tmp_path / "demo-2" / "demo.json").unlink()
    run_demo(tiny, tmp_path, 1, lambda recipe, folder: None)
    assert (tmp_path / "demo-2" / "demo.json").is_file(), "killed before its report"
    (tmp_path / "demo-2" / "demo.json").unlink()
    with pytest.raises(SurefootError, match="demo-2: is a run of something else; choose another --run-dir"):
        run_demo(replace(tiny, stages=(replace(stage, preset="acrobot"),)), tmp_path, 1, lambda recipe, folder: None)


def test_every_stage_is_a_shipped_preset_with_the_files_of_the_demo(tmp_path: Path) -> None:
    for demo in [control, reviews, verifier]:
        for stage in demo.demo().stages:
            assert stage.preset in presets()
            recipe = find_recipe(stage.preset, in_folder(stage.changes, tmp_path))
            assert "'./" not in str(recipe.table)
            assert not stage.changes or str(tmp_path / "data") in str(recipe.table)


def test_stages_run_in_order_with_their_files_written_before_and_the_report_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(api, "start", lambda recipe, folder, display: done.append((folder, recipe.seed, recipe.task, display)))
    stages = (
        Stage("cartpole", "one", "1/2", lambda folder, seed: done.append((folder.mkdir(), folder, seed)[1:])),
        Stage("acrobot", "two", "2/2", changes={"steps": 512}),
    )

    def report(folder: Path, seed: int, started: float) -> dict[str, Any]:
        done.append((folder, seed))
        return {"seed": seed}

    assert run_demo(Demo("here", stages, report), tmp_path, 7, lambda recipe, folder: recipe.steps) == {"seed": 7}
    here = tmp_path / "here"
    runs = [(here / "one", 7, "CartPole-v1", 100_000), (here / "two", 7, "Acrobot-v1", 512)]
    assert done == [(here, 7), *runs, (here, 7)]
    assert json.loads((here / "demo.json").read_text()) == {"seed": 7}
    assert capsys.readouterr().out == "1/2\n\n\n2/2\n\n"
    assert free_folder(tmp_path, "here") == tmp_path / "here-2"


def test_without_an_anchor_the_penalty_is_0_and_the_kl_still_measured(tmp_path: Path) -> None:
    for anchored in (True, False):
        *_, ppo = reviews.demo(anchored).stages
        recipe: Any = find_recipe(ppo.preset, in_folder(ppo.changes, tmp_path))
        assert (recipe.reference.beta > 0, recipe.reference.measure) == (anchored, not anchored)


@pytest.mark.slow
def test_the_demo_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_demo(verifier.demo(TINY), tmp_path, 3, lambda recipe, folder: Display())
    folder, printed = tmp_path / "demo-verifier", capsys.readouterr().out
    assert json.loads((folder / "demo.json").read_text()) == report
    assert set(report) == {"seconds", "SFT", "PPO", "GRPO"}
    for name, algorithm in (("sft", "REINFORCE"), ("ppo", "PPO_CLIP"), ("grpo", "GRPO")):
        recipe = make_recipe(read_toml(folder / name / "config.toml"))
        assert (recipe.algorithm, recipe.seed) == (algorithm, 3)
        assert (folder / name / "model").is_dir()
    test = folder / "data" / "test.jsonl"
    assert attempts_at(folder / "grpo", test)["start"] == report["SFT"], "both begin where SFT ended"
    _, _, proposed = printed.partition("Try next:\n")
    commands = [shlex.split(line) for line in proposed.replace("\\\n", " ").splitlines()]
    assert [command[1] for command in commands] == ["inspect", "generate", "evaluate", "train"]
    for _, *arguments in commands[1:]:
        short = ["--steps", "64", "--sampling.prompts", "8", "--quiet"] if arguments[0] == "train" else []
        assert not cli.main([*arguments, *short], standalone_mode=False)


def test_a_curve_of_blocks_rises_and_falls_as_its_values_do() -> None:
    assert reviews.curve_of([0.0, 1.0, 2.0, 0.0]) == "▁▅█▁  0.00, at most 2.00, at the end 0.00"
    assert reviews.curve_of([3.0] * 100).startswith("▁" * 40 + "  3.00")
    assert reviews.curve_of([float(i) for i in range(400)]).count("█") == 5
