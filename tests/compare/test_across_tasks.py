"""Scores of several tasks: aggregates, stratified intervals, profiles and probabilities of improvement."""

import json
import shutil
import tracemalloc
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import surefoot
from surefoot.compare.across_tasks import AGGREGATES, compare_across_tasks, improvement, iqm, optimality_gap, profile, task_mean
from surefoot.compare.report import across_tasks_tables
from surefoot.compare.runs import SavedRun, read_run
from surefoot.compare.statistics import interquartile_mean, interval
from surefoot.errors import SurefootError
from surefoot.recipes.reading import make_recipe

SEEDS = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6).map(np.array)
TASKS = st.lists(SEEDS, min_size=1, max_size=4)


@given(TASKS)
def test_tasks_weigh_the_same_whatever_their_number_of_seeds(tasks: Any) -> None:
    doubled = [np.repeat(tasks[0], 2), *tasks[1:]]
    for aggregate in AGGREGATES.values():
        assert_allclose(aggregate(doubled), aggregate(tasks), atol=1e-12)


@given(TASKS)
def test_the_iqm_over_tasks_repeats_seeds_until_every_task_has_the_same_number(tasks: Any) -> None:
    count = lcm(*map(len, tasks))
    repeated = np.concatenate([np.repeat(task, count // len(task)) for task in tasks])
    assert_allclose(iqm(tasks), interquartile_mean(repeated), atol=1e-12)


def test_tasks_with_unlike_numbers_of_seeds_need_little_memory() -> None:
    tasks = [np.arange(float(count)) for count in (7, 8, 9, 10, 11, 13, 17)]
    tracemalloc.start()
    interval(iqm, tasks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


@given(TASKS)
def test_scores_between_0_and_1_fall_short_of_1_by_their_mean(tasks: Any) -> None:
    assert_allclose(optimality_gap(tasks), 1 - task_mean(tasks), atol=1e-12)


@given(TASKS)
def test_the_area_under_a_profile_is_the_mean(tasks: Any) -> None:
    edges = np.linspace(0, 1, 2001)
    heights = profile(tasks, edges)
    assert np.all(np.diff(heights) <= 1e-12)
    assert_allclose(heights[:-1].mean(), task_mean(tasks), atol=1e-3)


@given(st.data())
def test_improvement_probabilities_add_up_to_one_with_ties_split(data: st.DataObject) -> None:
    x = data.draw(TASKS)
    y = [data.draw(SEEDS) for _ in x]
    assert_allclose(improvement(x, y) + improvement(y, x), 1)
    assert improvement(x, x) == pytest.approx(0.5)
    assert improvement([task + 2 for task in x], y) == 1


def test_improvement_equals_a_count_of_pairs() -> None:
    x, y = [np.array([1.0, 3.0]), np.array([5.0])], [np.array([2.0, 1.0, 0.0]), np.array([6.0])]
    first = (0 + 0.5 + 1 + 1 + 1 + 1) / 6
    assert improvement(x, y) == pytest.approx((first + 0) / 2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two algorithms on two tasks, two seeds of one cell; and one run with another learning rate."""
    root, folders = tmp_path_factory.mktemp("tasks"), {}
    small: dict[str, Any] = {"rollout": {"environments": 2, "steps": 64}, "evaluation": {"episodes": 1}, "steps": 1024}
    small |= {"preset": "none", "network": {"hidden": [8]}}
    for task in ("CartPole-v1", "Acrobot-v1"):
        for algorithm, own in (("A2C", {}), ("PPO_CLIP", {"objective": {"reuse": {"epochs": 2, "minibatches": 4}}})):
            for seed in (1, 2) if task == "CartPole-v1" else (1,):
                name = f"{task}-{algorithm}-{seed}"
                folders[name] = root / name
                surefoot.train(task, algorithm=algorithm, seed=seed, run_dir=root / name, **small, **own)
    folders["other"] = root / "other"
    surefoot.train("CartPole-v1", algorithm="A2C", seed=3, run_dir=root / "other", **small, optimizer={"learning_rate": 0.01})
    return folders


def compared(runs: dict[str, Path]) -> list[str]:
    return [str(path) for name, path in runs.items() if name != "other"]


def test_the_command_compares_values_of_a_field_over_tasks(runs: dict[str, Path], command: Any, tmp_path: Path) -> None:
    ranges = ["--range", "CartPole-v1=0:500", "--range", "Acrobot-v1=-500:0"]
    code, output, _ = command("compare", *compared(runs), "--by", "algorithm", *ranges, "--json")
    assert code == 0
    report = json.loads(output)
    assert report["ranges"] == {"Acrobot-v1": [-500, 0], "CartPole-v1": [0, 500]}
    assert list(report["results"]) == ["A2C", "PPO_CLIP"]
    row = report["results"]["A2C"]
    assert row["runs"] == {"Acrobot-v1": 1, "CartPole-v1": 2}
    by_hand = [np.mean(scores) / 500 + (task == "Acrobot-v1") for task, scores in report["scores"]["A2C"].items()]
    assert row["mean"]["value"] == pytest.approx(np.mean(by_hand))
    assert row["iqm"]["interval"] == [None, None]  # one seed of a task has no interval
    assert 0 <= report["results"]["PPO_CLIP"]["improvement"]["value"] <= 1
    code, output, _ = command("compare", *compared(runs), "--by", "algorithm", *ranges, "--figure", "profile.png")
    assert code == 0
    assert "P(better than A2C)" in output
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--by", "optimiser"], "--by optimiser"),
        (["--by", "algorithm", "--score", "value_loss"], "--score value_loss: of a loss lower is better"),
        (["--by", "algorithm", "--range", "CartPole-v1=0:5", "--range", "CartPole-v1=0:9"], "has a range already"),
        (["--by", "algorithm", "--figure", "folder.png"], "--figure folder.png: is a folder"),
        (["--by", "algorithm", "--range", "Pendulum-v1=0:1"], "--range Pendulum-v1"),
        (["--by", "algorithm", "--range", "CartPole-v1=5:1"], "LOW must be below HIGH"),
        (["--by", "seed", "--score", "episode_return"], "no run of 2 on Acrobot-v1"),
        (["--figure", "x.png"], "needs --by FIELD"),
    ],
)
def test_bad_options_are_rejected_in_one_line(words: list[str], part: str, runs: dict[str, Path], command: Any) -> None:
    paths = compared(runs) if "seed" not in words else [p for p in compared(runs) if "A2C" in p]
    Path("folder.png").mkdir()
    code, _, error = command("compare", *paths, *words)
    assert code == 2
    assert error.count("\n") == 1
    assert part in error


@pytest.mark.slow
def test_the_page_of_a_report_has_the_tables_of_the_command_and_the_profiles(
    runs: dict[str, Path], command: Any, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    words = [*compared(runs), "--by", "algorithm", "--range", "CartPole-v1=0:500", "--range", "Acrobot-v1=-500:0"]
    printed = command("compare", *words)[1]
    code, _, error = command("report", *words, "--out", "page.html", "--figures", "svg")
    assert code == 0, error
    page = (tmp_path / "page.html").read_text()
    assert "algorithm compared over 2 tasks" in page
    assert "Performance profiles of evaluation_return" in page
    cells = {cell.strip() for line in printed.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")}
    cells = {cell for cell in cells if cell.strip("-: ")}
    assert len(cells) > 20
    assert [cell for cell in cells if f">{cell}<" not in page] == []
    assert (tmp_path / "page-figures" / "profiles.svg").read_text().startswith("<?xml")
    code, _, _ = command("report", *compared(runs), "--out", "plain.html")
    assert code == 0
    assert "compared over" not in (tmp_path / "plain.html").read_text()


def test_seeds_that_count_twice_and_unfinished_runs_are_shown(runs: dict[str, Path], command: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(runs["CartPole-v1-A2C-1"], tmp_path / "copy")
    config = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(config.replace("steps = 1024", "steps = 4096"))
    words = ["--by", "algorithm", "--range", "Acrobot-v1=-500:0"]
    code, output, _ = command("compare", *compared(runs), str(copy), *words)
    assert code == 2, "its budget differs"
    (copy / "config.toml").write_text(config)
    rows = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(rows[:-1]))
    code, output, error = command("compare", *compared(runs), str(copy), *words)
    assert code == 0, error
    (row,) = [line for line in output.splitlines() if "one seed twice" in line]
    assert "1, 1, 2 (one seed twice)" in row
    assert "finished, 1,024 steps; at 896 of 1,024 steps" in row


def test_tasks_with_long_names_are_told_apart_by_their_end() -> None:
    def run(data: str, rate: float, score: float) -> SavedRun:
        recipe = make_recipe({"kind": "sft", "model": "m", "data": {"train": data}, "optimizer": {"learning_rate": rate}})
        return SavedRun(Path(f"{rate}"), recipe, SimpleNamespace(rows=[{"steps": 1, "gold": score}]), {})  # type: ignore[arg-type]

    root = f"/data/{'project/' * 6}"
    runs = [run(f"{root}{part}/train.jsonl", rate, rate) for part in ("v1", "v2") for rate in (0.001, 0.002)]
    comparison = compare_across_tasks(runs, "optimizer.learning_rate", "gold", {f"{root}v1/train.jsonl": (0, 1)})
    assert list(comparison.ranges) == [f"{root}v1/train.jsonl", f"{root}v2/train.jsonl"]
    (_, _, ranges), (_, _, each) = across_tasks_tables(comparison)[1:]
    assert [row[0][-14:] for row in ranges] == ["v1/train.jsonl", "v2/train.jsonl"]
    assert all(len(cell) <= 48 for row in [*ranges, *each] for cell in row)


def test_the_error_about_an_invalid_recipe_names_its_run(runs: dict[str, Path], command: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(runs["CartPole-v1-A2C-1"], tmp_path / "copy")
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace("\nseed = 1\n", "\nseed = -1\n", 1))
    code, _, error = command("compare", str(runs["CartPole-v1-A2C-1"]), str(copy))
    assert code == 2
    assert error.startswith(f"surefoot: {copy / 'config.toml'}: seed=-1: ")


def test_runs_that_differ_in_another_field_are_not_pooled(runs: dict[str, Path]) -> None:
    with pytest.raises(SurefootError, match=r"differ in optimizer\.learning_rate too"):
        compare_across_tasks([read_run(path) for path in runs.values()], "algorithm")
