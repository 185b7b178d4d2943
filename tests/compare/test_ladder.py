"""``surefoot ladder``: shared settings, differences between rungs, and output files."""

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from surefoot import LADDER, Clip, Reuse, SurefootError
from surefoot.compare.ladder import NAMES, run_ladder, rung_recipe
from surefoot.compare.plots import apart
from surefoot.compare.statistics import number
from surefoot.core.algorithms import switches_between
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import control_recipe, to_table

from .conftest import TINY


def recipes(task="CartPole-v1", **changes):
    return [rung_recipe(task, rung, changes) for rung in range(len(LADDER))]


@pytest.mark.parametrize("task", ["CartPole-v1", "HalfCheetah-v5"])
def test_rungs_differ_in_one_switch_each_and_share_everything_else(task):
    climbed = recipes(task)
    turned = [list(switches_between(below.objective, here.objective)) for below, here in pairwise(climbed)]
    assert turned == [["baseline"], ["baseline"], ["gae_lambda"], ["reuse"], ["trust_region"]]
    shared = {"algorithm": "", "objective": None}
    tables = [{**to_table(recipe), **shared} for recipe in climbed]
    assert all(table == tables[5] for table in tables[2:])
    assert all({**table, "rollout": None} == {**tables[5], "rollout": None} for table in tables)
    tuned = find_recipe(task)
    assert (climbed[5].network, climbed[5].optimizer, climbed[5].rollout) == (tuned.network, tuned.optimizer, tuned.rollout)


def test_a_rung_is_the_ladders_value_with_the_tasks_discount_and_reuse():
    for rung, recipe in enumerate(recipes()):
        reuse = Reuse(20, 1) if rung >= 4 else None
        assert recipe.objective == replace(LADDER[rung], gamma=0.98, reuse=reuse)
        assert recipe.algorithm == NAMES[rung]


def test_rungs_without_a_critic_collect_whole_episodes_of_as_many_steps_as_a_batch_of_the_others():
    for recipe in recipes()[:2]:
        assert recipe.objective.needs_whole_episodes
        assert (recipe.rollout.environments, recipe.rollout.at_least) == (1, 256)


def test_a_change_counts_from_the_rung_that_turns_the_switch():
    changes = {"objective": {"gae_lambda": 0.8, "reuse": {"epochs": 2}, "trust_region": {"clip": 0.1}, "gamma": 0.9}}
    changes["optimizer"] = {"learning_rate": 0.02, "critic_learning_rate": 0.01}
    climbed = recipes(**changes)
    assert [r.algorithm for r in climbed] == list(NAMES)
    assert [r.objective.gae_lambda for r in climbed] == [1, 1, 1, 0.8, 0.8, 0.8]
    assert [r.objective.reuse for r in climbed] == [None] * 4 + [Reuse(2, 1)] * 2
    assert [r.objective.trust_region for r in climbed] == [None] * 5 + [Clip(0.1)]
    assert {r.objective.gamma for r in climbed} == {0.9}
    assert [r.optimizer.critic_learning_rate for r in climbed] == [None] * 2 + [0.01] * 4
    for below, here in pairwise(climbed):
        assert len(switches_between(below.objective, here.objective)) == 1


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"baseline": "mean"}, "objective.baseline='mean': differs between rungs 0, 1 and 2"),
        ({"trust_region": "none"}, "rung=5: a change turns off what PPO_CLIP adds to PPO_UNCLIPPED"),
        ({"gae_lambda": 1.0}, "rung=3: a change turns off what A2C adds to ACTOR_CRITIC"),
    ],
)
def test_a_change_that_would_take_the_steps_away_is_rejected(change, part, tmp_path):
    with pytest.raises(SurefootError, match=part.replace(".", r"\.")):
        run_ladder("CartPole-v1", {"objective": change}, 1, tmp_path / "ladder")
    assert list(tmp_path.iterdir()) == []


def test_rungs_of_one_environment_have_one_worker():
    made = recipes(rollout={"backend": "workers", "workers": 2, "environments": 4, "steps": 64})
    assert [recipe.rollout.workers for recipe in made] == [1, 1, 2, 2, 2, 2]
    assert [control_recipe(to_table(recipe)) for recipe in made] == made


@pytest.mark.parametrize("task", ["Pendulum-v1", "FrozenLake-v1"])
def test_the_ladder_of_box_actions_and_of_rewards_that_never_came_has_its_tables_and_plot(task, tmp_path):
    changes = {"steps": 64, "rollout": {"environments": 2, "steps": 16}, "network": {"hidden": [8]}, "objective": {}}
    changes |= {"evaluation": {"episodes": 0}, "normalise": {"observations": False, "rewards": False}}
    changes["objective"] = {"reuse": {"epochs": 2, "minibatches": 2}}
    report = run_ladder(task, changes, 1, tmp_path / "ladder", rungs=[0, 2], batches=2, episodes=0)
    shares = [noise["relative"] for noise in report.results["gradients"]["noise"].values()]
    assert shares[0] == (1 if task == "Pendulum-v1" else None)
    assert report.plot.exists()


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    """Rungs 0, 3 and 5 on one seed: the folder and the report."""
    folder = tmp_path_factory.mktemp("ladder") / "run"
    changes = {"steps": 320, "rollout": {"environments": 2, "steps": 32}, "network": {"hidden": [8]}}
    changes |= {"evaluation": {"episodes": 0}, "objective": {"reuse": {"epochs": 3}}}
    return folder, run_ladder("CartPole-v1", changes, 1, folder, rungs=[0, 5, 3], batches=6, episodes=2)


def test_the_folder_holds_a_run_per_cell_and_the_results(climbed):
    folder, report = climbed
    names = {path.name for path in folder.iterdir()}
    assert {"REINFORCE-seed1", "A2C-seed1", "PPO_CLIP-seed1", "frozen-seed1", "results.json", "report.md"} <= names
    assert (folder / "A2C-seed1" / "config.toml").exists()
    assert json.loads((folder / "results.json").read_text()) == report.results
    assert report.text in (folder / "report.md").read_text()


def test_every_rung_used_the_same_budget_and_reports_its_updates(climbed):
    _, report = climbed
    assert list(report.results["results"]) == ["REINFORCE", "A2C", "PPO_CLIP"]
    for name, (result,) in report.results["results"].items():
        assert 320 <= result["steps"] < 320 + (64 if name != "REINFORCE" else 600)
        assert result["updates"] == result["rollouts"] * (3 if name == "PPO_CLIP" else 1)
        assert (result["ratio_max"] > 1.001) == (name == "PPO_CLIP")
        assert result["curves"]["steps"][-1] == result["steps"]
        assert result["greedy_episodes"] == 2
        assert (result["explained_variance"] is None) == (name == "REINFORCE")


def test_the_tables_show_the_results(climbed):
    _, report = climbed
    (result,) = report.results["results"]["A2C"]
    row = next(line for line in report.text.splitlines() if line.startswith("| 3 A2C"))
    assert f" {number(result['last_100_mean'])} |" in row
    assert f" {number(result['greedy_mean'])} |" in row
    assert "GAE, λ = 0.95" in row
    assert "one seed has no interval" in report.text
    assert "64-64" not in report.text
    assert "8 tanh" in report.text


def test_gradients_are_measured_for_the_first_four_requested_rungs(climbed):
    folder, report = climbed
    actual = report.results["gradients"]
    assert list(actual["noise"]) == ["REINFORCE", "A2C"]
    assert (actual["batches"], actual["frozen_at"]) == (6, 64)
    assert 64 <= actual["steps_per_batch"] < 200
    assert "θ was frozen at step 64 of PPO_CLIP, seed 1" in report.text
    assert (folder / "frozen-seed1" / "checkpoints" / "64").exists()


def test_the_plot_is_a_valid_image(climbed):
    folder, report = climbed
    assert report.plot == folder / "plot.png"
    assert report.plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert report.plot.stat().st_size > 50_000, "an empty picture compresses to almost nothing"
    assert "<svg" in (folder / "plot.svg").read_text()[:1000]


def test_repeating_the_command_trains_nothing_and_gives_the_same_results(climbed, monkeypatch, no_plots):
    folder, report = climbed
    from surefoot.runs import api

    monkeypatch.setattr(api, "start", None)
    monkeypatch.setattr(api, "resume", None)
    changes = {"steps": 320, "rollout": {"environments": 2, "steps": 32}, "network": {"hidden": [8]}}
    changes |= {"evaluation": {"episodes": 0}, "objective": {"reuse": {"epochs": 3}}}
    again = run_ladder("CartPole-v1", changes, 1, folder, rungs=[3, 0, 5], batches=6, episodes=2, jobs=2)
    assert asdict(again)["results"] == report.results
    assert again.plot is None
    assert "[plots]', and repeat" in again.last_line


def test_the_ladder_from_the_command_line(command, no_plots, tmp_path):
    code, out, err = command("ladder", "CartPole-v1", "--rung", "4", "--rung", "3", "--batches", "3", "--json", *TINY)
    assert code == 0, err
    results = json.loads(out)
    assert list(results["rungs"]) == ["A2C", "PPO_UNCLIPPED"]
    assert "[3/3] PPO_UNCLIPPED, seed 1: return" in err
    assert (tmp_path / "runs" / "ladder-cartpole-v1-192" / "report.md").exists()
    code, out, err = command("ladder", "CartPole-v1", "--rung", "4", "--rung", "3", "--batches", "3", *TINY)
    assert (code, err) == (0, "")
    assert "3 of 3 runs were already finished" in out
    assert "| 4 PPO_UNCLIPPED |" in out
    changed = [word if word != "192" else "256" for word in TINY]
    code, out, err = command("ladder", "CartPole-v1", "--rung", "4", *changed, "--run-dir", "runs/ladder-cartpole-v1-192")
    assert code == 2
    assert err.count("\n") == 1
    assert "was started with other settings" in err
    assert "choose another --run-dir" in err


def test_labels_are_moved_apart_and_keep_their_order():
    heights = [0.5, 0.51, 0.1, 0.52, 0.9]
    placed = apart(heights, 0.1)
    order = sorted(range(5), key=lambda i: heights[i])
    assert all(placed[b] - placed[a] >= 0.1 - 1e-12 for a, b in pairwise(order))
    assert (placed[2], placed[4]) == (0.1, 0.9)
    assert placed[1] == pytest.approx(0.51)
