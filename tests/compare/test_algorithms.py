"""``compare-algorithms``: the algorithms and settings it compares, and its report."""

import json

import pytest

from surefoot import Clip, Constraint, Penalty, Reuse, SurefootError
from surefoot.compare.algorithms import ablation_of, recipes_for, report_text
from surefoot.compare.plots import draw_comparison
from surefoot.compare.statistics import finite, mean_interval, number
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import to_table

from .conftest import TINY


def test_each_algorithm_has_the_settings_of_train():
    made = recipes_for("CartPole-v1", ["REINFORCE", "A2C", "PPO_CLIP"], {"steps": 500, "seed": 4})
    for name, recipe in made.items():
        assert recipe == find_recipe("CartPole-v1", {"algorithm": name, "steps": 500, "seed": 4})


def test_another_trust_region_changes_nothing_else_of_the_preset():
    regions = ["PPO_CLIP", "PPO_UNCLIPPED", "PPO_PENALTY", "PPO_PENALTY_ADAPTIVE", "TRPO"]
    for task in ("CartPole-v1", "Hopper-v5"):
        tables = [to_table(recipe) for recipe in recipes_for(task, regions, {}).values()]
        for table in tables:
            del table["algorithm"], table["objective"]["trust_region"]
        assert all(table == tables[0] for table in tables)


def test_a_file_s_trust_region_is_for_the_algorithm_that_has_it(tmp_path):
    (tmp_path / "mine.toml").write_text('task = "CartPole-v1"\nobjective.trust_region = { delta = 0.05, damping = 0.3 }\n')
    made = recipes_for(str(tmp_path / "mine.toml"), ["PPO_CLIP", "TRPO"], {})
    assert isinstance(made["PPO_CLIP"].objective.trust_region, Clip)
    assert made["TRPO"].objective.trust_region == Constraint(0.05, 0.3)


def test_a_fixed_coefficient_stays_fixed():
    changes = {"objective": {"trust_region": {"beta": 2.0, "target": 0.05}}}
    made = recipes_for("CartPole-v1", ["PPO_PENALTY", "PPO_PENALTY_ADAPTIVE"], changes)
    assert [recipe.objective.trust_region for recipe in made.values()] == [Penalty(2.0), Penalty(2.0, target=0.05)]


def test_a_switch_that_is_off_in_an_algorithm_stays_off():
    changes = {"objective": {"reuse": {"epochs": 2}, "gae_lambda": 0.5, "trust_region": {"clip": 0.1}}}
    made = recipes_for("CartPole-v1", ["REINFORCE", "ACTOR_CRITIC", "A2C", "PPO_CLIP"], changes)
    assert [r.objective.gae_lambda for r in made.values()] == [1, 1, 0.5, 0.5]
    assert [r.objective.reuse for r in made.values()] == [None, None, None, Reuse(2, 1)]
    assert made["PPO_CLIP"].objective.trust_region.clip == 0.1


def test_an_ablation_adds_the_terms_of_ppos_objective_one_by_one_and_changes_nothing_else():
    made = ablation_of("CartPole-v1", {"steps": 500, "objective": {"entropy_coefficient": 0.02}})
    objectives = [recipe.objective for recipe in made.values()]
    assert list(made) == ["no-clip", "fixed-penalty", "adaptive-penalty", "clip", "clip+value", "clip+value+entropy"]
    assert [o.trust_region and type(o.trust_region) for o in objectives] == [None, Penalty, Penalty, Clip, Clip, Clip]
    assert [o.trust_region.target is None for o in objectives[1:3]] == [True, False]
    assert [o.value_coefficient > 0 for o in objectives] == [False] * 4 + [True] * 2
    assert [o.entropy_coefficient for o in objectives] == [0.0] * 5 + [0.02]
    assert objectives[-1] == find_recipe("CartPole-v1", {"objective": {"entropy_coefficient": 0.02}}).objective
    same = [{**to_table(recipe), "algorithm": 0, "objective": 0} for recipe in made.values()]
    assert all(table == same[0] for table in same)
    assert ablation_of("CartPole-v1", {})["clip+value+entropy"].objective.entropy_coefficient == 0.01


@pytest.mark.parametrize(
    ("names", "changes", "part"),
    [
        (["A2C", "PPO_CLOP"], {}, "algorithms='PPO_CLOP': unknown; did you mean 'PPO_CLIP'"),
        (["A2C", "a2c"], {}, "'A2C' is listed twice"),
        (["REINFORCE", "A2C"], {"reuse": {"epochs": 3}}, "objective.reuse.epochs: this switch is off in REINFORCE, A2C"),
        (["A2C", "PPO_CLIP"], {"gamma": 3.0}, "A2C: objective.gamma=3.0: must lie in"),
    ],
)
def test_bad_requests_are_rejected(names, changes, part):
    with pytest.raises(SurefootError) as rejected:
        recipes_for("CartPole-v1", names, {"objective": changes})
    assert part in str(rejected.value)


def results(scores):
    return [
        {"last_100_mean": s, "greedy_mean": 2 * s, "average_return": s / 2, "rollouts": 3, "updates": 4, "seconds": 1.0}
        for s in scores
    ]


def test_the_report_shows_mean_iqm_and_intervals_of_every_score():
    scores = [10.0, 20.0, 30.0, 90.0]
    recipes = recipes_for("CartPole-v1", ["A2C", "PPO_CLIP"], {"steps": 500})
    text = report_text({"A2C": results(scores), "PPO_CLIP": results([1.0] * 4)}, recipes, 4, 20)
    row = next(line for line in text.splitlines() if line.startswith("| A2C "))
    low, high = mean_interval(scores)
    for cell in ("37.5", f"{low:.1f} to {high:.1f}", "25.0", "10.0, 20.0, 30.0, 90.0"):
        assert f" {cell} |" in row
    assert text.count("| A2C ") == 4
    assert "500 environment steps for each of 4 seeds (1 to 4)" in text
    assert "critic, λ = 0.8, epochs 20, minibatches 1, clip 0.2 (schedule linear), advantages normalised" in text


def test_the_setting_lists_only_shared_fields():
    changes = {"steps": 500, "network": {"lstm": 8, "custom": "mine:net"}, "optimizer": {"schedule": "cosine", "warmup": 0.1}}
    changes["objective"] = {"reuse": {"epochs": 2, "minibatches": 2}}
    recipes = recipes_for("CartPole-v1", ["PPO_UNCLIPPED", "PPO_CLIP"], changes)
    cells = {name: results([1.0]) for name in recipes}
    (line,) = [line for line in report_text(cells, recipes, 1, 0).splitlines() if line.startswith("- Setting: ")]
    for words in ("mine:net, then an LSTM of 8", "falling to zero as a cosine after a warm-up of 0.1"):
        assert words in line
    other = find_recipe("CartPole-v1", {**changes, "optimizer": {**changes["optimizer"], "epsilon": 1e-3}})
    assert "\n- Settings differ; they are in results.json.\n" in report_text(cells, {**recipes, "PPO_CLIP": other}, 1, 0)


def test_a_seed_without_a_finished_episode_is_no_score():
    cells = [*results([10.0]), {**results([0.0])[0], "last_100_mean": None, "average_return": None}]
    recipes = recipes_for("CartPole-v1", ["A2C"], {})
    row = next(line for line in report_text({"A2C": cells}, recipes, 2, 0).splitlines() if line.startswith("| A2C "))
    assert "| 10.0 |             – |" in row
    nothing = [{**cell, "last_100_mean": None} for cell in cells]
    row = next(line for line in report_text({"A2C": nothing}, recipes, 2, 0).splitlines() if line.startswith("| A2C "))
    assert set(row.replace("A2C", "")) == set("| –")


def test_the_plot_of_a_comparison_is_a_valid_image(tmp_path):
    """Also with more algorithms than colours, with a single seed, and with one that never finished an episode."""
    curves = {"steps": [10, 20], "rollouts": [1, 2], "return": [1.0, 2.0], "ratio_max": [1.0, 1.0]}
    by_name = {f"ALGORITHM_{i}": [{**cell, "curves": curves} for cell in results([float(i)])] for i in range(8)}
    nothing = {"last_100_mean": None, "greedy_mean": None, "curves": {**curves, "return": [None, None]}}
    table = {"task": "CartPole-v1", "steps": 20}
    drawn = {"results": {**by_name, "NOTHING": [nothing]}, "recipes": {"ALGORITHM_0": table}, "seeds": 1}
    draw_comparison(drawn, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_numbers_have_about_four_digits_and_json_has_no_infinity():
    shown = {1234.5: "1,234", 12.34: "12.3", 1.234: "1.23", 0.01234: "0.0123", 0: "0.00", None: "–", float("inf"): "–"}
    assert {x: number(x) for x in shown} == shown
    assert json.dumps(finite({"a": [float("inf"), 1.0, float("nan")]}), allow_nan=False) == '{"a": [null, 1.0, null]}'


def test_compare_algorithms_from_the_command_line(command, no_plots, tmp_path):
    code, out, err = command("compare-algorithms", "CartPole-v1", "--algorithms", "REINFORCE, A2C", *TINY)
    assert (code, err) == (0, "")
    assert "[2/2] A2C, seed 1: return" in out
    assert "no baseline" in out
    folder = tmp_path / "runs" / "compare-cartpole-v1-192"
    assert not (folder / "plot.png").exists()
    assert "[plots]', and repeat the command" in out
    assert set(json.loads((folder / "results.json").read_text())["results"]) == {"REINFORCE", "A2C"}
    code, _, err = command("compare-algorithms", "CartPole-v1", "--algorithms", "A2C", *TINY)
    assert code == 2
    assert "was started with other settings (recipes.REINFORCE)" in err
    assert err.count("\n") == 1
