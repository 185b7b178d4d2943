"""Presets, algorithms by name, trust regions, and recipe files."""

import json
import re
import tomllib
from dataclasses import fields, replace

import pytest
import tomli_w

from surefoot import ALGORITHMS, PPO_CLIP, Clip, Constraint, Objective, Penalty, train
from surefoot.core.algorithms import TRUST_REGIONS, switches_between
from surefoot.errors import SurefootError
from surefoot.recipes.presets import ResolvedRecipe, find_recipe, presets, resolve_recipe
from surefoot.recipes.reading import make_recipe, to_toml


def test_every_preset_is_a_recipe_and_survives_the_round_trip():
    for name, table in presets().items():
        if "task" in table:
            recipe = find_recipe(name)
            assert make_recipe(tomllib.loads(to_toml(recipe))) == recipe
            for pattern in table["tuned_for"]:
                task = pattern.replace("*", "Breakout")
                assert find_recipe(task) == find_recipe(name, {"task": task})


IN_CONTROL = [name for name, value in ALGORITHMS.items() if not value.compares_in_groups]
OFF_WITHOUT = {"normalise_advantages"}
"""settings of the presets that an algorithm without a baseline has no use for"""


@pytest.mark.parametrize("task", ["CartPole-v1", "FrozenLake-v1"])
def test_naming_an_algorithm_changes_the_switches_that_define_it_and_nothing_else(task, tmp_path):
    there = {name: find_recipe(task, {"algorithm": name}) for name in IN_CONTROL}
    for own, recipe in there.items():
        file = tmp_path / f"{own}.toml"
        file.write_text(to_toml(recipe))
        for named in IN_CONTROL:
            changed = find_recipe(str(file), {"algorithm": named})
            assert replace_objective(changed, recipe) == recipe
            defining = switches_between(ALGORITHMS[own], ALGORITHMS[named])
            unused = OFF_WITHOUT if ALGORITHMS[named].baseline is None else set()
            assert set(switches_between(recipe.objective, changed.objective)) - unused <= set(defining)
            assert {name: getattr(changed.objective, name) for name in defining} == {
                name: now for name, (_, now) in defining.items()
            }


def replace_objective(recipe, other):
    """A recipe with the algorithm of another."""
    return recipe.model_copy(update={"algorithm": other.algorithm, "objective": other.objective})


def test_settings_of_a_switch_that_is_off_are_dropped(tmp_path):
    text = 'task = "CartPole-v1"\nalgorithm = "PPO_CLIP"\nobjective = { value_clip = 0.2, target_kl = 0.02, gamma = 0.9 }\n'
    (tmp_path / "mine.toml").write_text(text + "optimizer = { critic_learning_rate = 1e-3, learning_rate = 2e-3 }\n")
    for name in ("REINFORCE", "REINFORCE_BASELINE"):
        recipe = find_recipe(str(tmp_path / "mine.toml"), {"algorithm": name})
        assert recipe.objective == replace(ALGORITHMS[name], gamma=0.9)
        assert (recipe.optimizer.critic_learning_rate, recipe.optimizer.learning_rate) == (None, 2e-3)
    trpo = find_recipe(str(tmp_path / "mine.toml"), {"algorithm": "TRPO"})
    assert trpo.objective == replace(ALGORITHMS["TRPO"], gamma=0.9, value_clip=0.2)


def test_another_algorithm_has_its_own_baseline_and_reuse(tmp_path):
    text = 'task = "CartPole-v1"\nalgorithm = "TRPO"\nobjective = { baseline = "mean", reuse = "none", gae_lambda = 1 }\n'
    (tmp_path / "mine.toml").write_text(text)
    recipe = find_recipe(str(tmp_path / "mine.toml"), {"algorithm": "PPO_CLIP"})
    assert recipe.objective == replace(PPO_CLIP, gae_lambda=1.0)


def test_custom_starts_from_nothing_but_the_discount():
    assert find_recipe("CartPole-v1", {"algorithm": "custom"}).objective == Objective(gamma=0.98)
    assert find_recipe("CartPole-v1", {"algorithm": "REINFORCE"}).objective == Objective(gamma=0.98)
    assert find_recipe("CartPole-v1", {"algorithm": "PPO_CLIP"}) == find_recipe("CartPole-v1")


def test_another_trust_region_keeps_all_that_is_tuned_but_the_trust_region():
    tuned = find_recipe("CartPole-v1")
    for name in ("PPO_PENALTY", "PPO_PENALTY_ADAPTIVE", "TRPO"):
        recipe = find_recipe("CartPole-v1", {"algorithm": name})
        assert set(switches_between(tuned.objective, recipe.objective)) == {"trust_region"}
        assert recipe.objective.trust_region == ALGORITHMS[name].trust_region
        assert find_recipe("CartPole-v1", algorithm=ALGORITHMS[name]) == recipe
        assert make_recipe(tomllib.loads(to_toml(recipe))) == recipe


def test_a_trust_region_is_the_one_whose_keys_are_set_and_replaces_any_other():
    for algorithm, table, expected in (
        ("PPO_CLIP", {"clip_high": 0.3}, Clip(0.2, clip_high=0.3, schedule="linear")),
        ("PPO_CLIP", "none", None),
        ("PPO_PENALTY_ADAPTIVE", {"beta": 3}, Penalty(3.0, target=0.01)),
        ("PPO_PENALTY_ADAPTIVE", {"target": "none"}, Penalty(1.0)),
        ("TRPO", {"tries": 5}, Constraint(tries=5)),
        ("TRPO", {}, Constraint()),
        ("custom", {"beta": 3}, Penalty(3.0)),
        ("custom", {"schedule": "linear"}, Clip(schedule="linear")),
    ):
        changes = {"algorithm": algorithm, "objective": {"trust_region": table}}
        if algorithm == "custom":
            changes["objective"]["reuse"] = {"epochs": 2}
        recipe = find_recipe("CartPole-v1", changes)
        assert recipe.objective.trust_region == expected
        assert make_recipe(tomllib.loads(to_toml(recipe))) == recipe


def test_keys_of_a_trust_region_name_the_algorithm_that_has_it():
    for table, algorithm, expected in (
        ({"beta": 3}, "PPO_PENALTY", Penalty(3.0)),
        ({"target": 0.02}, "PPO_PENALTY_ADAPTIVE", Penalty(1.0, target=0.02)),
        ({"beta": 3, "target": "none"}, "PPO_PENALTY", Penalty(3.0)),
        ({"delta": 0.02}, "TRPO", Constraint(0.02)),
        ({"clip": 0.1}, "PPO_CLIP", Clip(0.1, schedule="linear")),
    ):
        tuned, recipe = find_recipe("CartPole-v1"), find_recipe("CartPole-v1", {"objective": {"trust_region": table}})
        assert (recipe.algorithm, recipe.objective.trust_region) == (algorithm, expected)
        assert set(switches_between(tuned.objective, recipe.objective)) == {"trust_region"}


def test_a_file_keeps_its_trust_region_and_gets_the_name_that_fits(tmp_path):
    for algorithm, file, flags, called, expected in (
        (None, {"beta": 3.0}, None, "PPO_PENALTY", Penalty(3.0)),
        ("PPO_CLIP", {"beta": 3.0}, None, "PPO_PENALTY", Penalty(3.0)),
        (None, {"beta": 3.0}, {"target": 0.05}, "PPO_PENALTY_ADAPTIVE", Penalty(3.0, target=0.05)),
        ("PPO_CLIP", {"delta": 0.05, "damping": 0.3}, {"cg_iterations": 20}, "TRPO", Constraint(0.05, 0.3, 20)),
        ("PPO_PENALTY_ADAPTIVE", {"beta": 3.0}, {"beta": 2.0}, "PPO_PENALTY_ADAPTIVE", Penalty(2.0, target=0.01)),
        ("PPO_PENALTY_ADAPTIVE", {"target": "none"}, None, "PPO_PENALTY", Penalty(1.0)),
        ("PPO_CLIP", {"clip": 0.1}, "none", "PPO_UNCLIPPED", None),
    ):
        label = {} if algorithm is None else {"algorithm": algorithm}
        (tmp_path / "mine.toml").write_text(tomli_w.dumps({"task": "Acrobot-v1", **label, "objective": {"trust_region": file}}))
        recipe = find_recipe(str(tmp_path / "mine.toml"), {} if flags is None else {"objective": {"trust_region": flags}})
        assert (recipe.algorithm, recipe.objective.trust_region) == (called, expected)


def test_a_trust_region_may_be_a_value():
    tuned = find_recipe("CartPole-v1")
    recipe = find_recipe("CartPole-v1", {"objective": {"trust_region": Penalty(3.0)}})
    assert (recipe.algorithm, recipe.objective) == ("PPO_PENALTY", replace(tuned.objective, trust_region=Penalty(3.0)))
    with pytest.raises(SurefootError, match="algorithm='TRPO' has a constraint; name PPO_CLIP"):
        find_recipe("CartPole-v1", {"objective": {"trust_region": Clip(0.1)}}, "TRPO")


def test_keys_of_another_trust_region_than_the_named_algorithms_are_rejected():
    for algorithm, table, part in (
        ("TRPO", {"clip": 0.1}, "has keys of a clip (clip), and algorithm='TRPO' has a constraint; name PPO_CLIP"),
        ("PPO_CLIP", {"beta": 3}, "has keys of a penalty (beta), and algorithm='PPO_CLIP' has a clip; name PPO_PENALTY"),
        ("GRPO", {"beta": 3}, "has keys of a penalty (beta), and algorithm='GRPO' has a clip; use keys of a clip"),
    ):
        with pytest.raises(SurefootError, match=re.escape(f"objective.trust_region: {part}")):
            find_recipe("CartPole-v1", {"algorithm": algorithm, "objective": {"trust_region": table}})


def test_no_two_trust_regions_share_a_key():
    names = [field.name for kind in TRUST_REGIONS for field in fields(kind)]
    assert len(names) == len(set(names))


def test_an_algorithm_value_has_a_name_or_is_custom():
    assert find_recipe("CartPole-v1", algorithm=PPO_CLIP) == find_recipe("CartPole-v1")
    for own in (Objective(baseline="critic", gamma=0.5), replace(PPO_CLIP, gamma=0.9), replace(PPO_CLIP, value_lambda=1.0)):
        recipe = find_recipe("CartPole-v1", algorithm=own)
        assert recipe.objective == own
        assert recipe.algorithm == "custom"
        assert make_recipe(tomllib.loads(to_toml(recipe))) == recipe


FROM_CARTPOLE = "steps objective.gamma objective.gae_lambda objective.normalise_advantages objective.reuse "
FROM_CARTPOLE += "objective.trust_region rollout.environments rollout.steps optimizer.learning_rate optimizer.schedule"


def test_the_origin_lists_the_fields_from_the_preset():
    for changes, decided, parts in (
        ({}, "", ""),
        ({"optimizer": {"learning_rate": 0.002}}, "optimizer.learning_rate", ""),
        ({"objective": {"reuse": {"epochs": 3}}, "steps": 512}, "steps objective.reuse", "objective.reuse.minibatches"),
        ({"objective": {"trust_region": {"clip": 0.1}}}, "objective.trust_region", "objective.trust_region.schedule"),
        ({"objective": {"trust_region": {"beta": 3}}}, "objective.trust_region", ""),
        ({"objective": {"trust_region": "none"}}, "objective.trust_region", ""),
        ({"algorithm": "A2C"}, "objective.reuse objective.trust_region", ""),
        ({"algorithm": "custom"}, " ".join(FROM_CARTPOLE.split()[2:6]), ""),
    ):
        origin = resolve_recipe("CartPole-v1", changes).origin
        assert origin.name == "cartpole"
        assert set(origin.fields) == set(FROM_CARTPOLE.split()) - set(decided.split()) | set(parts.split())


def test_a_complete_file_has_no_origin(tmp_path):
    (tmp_path / "whole.toml").write_text(to_toml(find_recipe("CartPole-v1")))
    assert resolve_recipe(str(tmp_path / "whole.toml")).origin is None
    (tmp_path / "part.toml").write_text('task = "CartPole-v1"\n[optimizer]\nlearning_rate = 1\nschedule = "cosine"\n')
    assert "optimizer" not in " ".join(resolve_recipe(str(tmp_path / "part.toml")).origin.fields)


def test_a_run_prints_and_saves_its_origin(surefoot, tmp_path):
    words = ["train", "CartPole-v1", "--steps", "256", "--evaluation.episodes", "0", "--optimizer.learning-rate", "2e-3"]
    title, line = surefoot(*words, "--name", "one").replace("\n    ", " ").splitlines()[:2]
    names = [name for name in FROM_CARTPOLE.split() if name not in ("steps", "optimizer.learning_rate")]
    assert (title, line) == ("PPO_CLIP on CartPole-v1, seed 1 -> runs/one", f"preset cartpole: {', '.join(names)}")
    kept = json.loads((tmp_path / "runs/one/environment.json").read_text())["preset"]
    assert kept == {"name": "cartpole", "fields": names}
    assert f"# {line}" in surefoot(*words, "--dry-run").splitlines()
    again = surefoot("train", "runs/one/config.toml", "--name", "two")
    assert "preset" not in again
    assert json.loads((tmp_path / "runs/two/environment.json").read_text())["preset"] is None
    assert (tmp_path / "runs/one/config.toml").read_text() == (tmp_path / "runs/two/config.toml").read_text()


def test_without_a_preset_a_recipe_has_the_defaults(surefoot, tmp_path):
    plain = make_recipe({"task": "CartPole-v1"})
    assert (
        resolve_recipe("CartPole-v1", preset="none") == resolve_recipe("cartpole", preset="None") == ResolvedRecipe(plain, None)
    )
    assert surefoot("train", "CartPole-v1", "--preset", "none", "--dry-run").startswith(to_toml(plain))
    (tmp_path / "mine.toml").write_text('task = "CartPole-v1"\nsteps = 512\n')
    assert resolve_recipe("mine.toml", preset="none").recipe == make_recipe({"task": "CartPole-v1", "steps": 512})
    agent = train("CartPole-v1", preset="none", steps=256, rollout={"steps": 32}, evaluation={"episodes": 0})
    assert agent.recipe.objective == PPO_CLIP


def test_another_preset_can_be_the_start():
    acrobot, there = find_recipe("Acrobot-v1"), resolve_recipe("CartPole-v1", preset="acrobot")
    assert there.recipe == acrobot.model_copy(update={"task": "CartPole-v1"})
    assert there.origin.name == "acrobot"
    with pytest.raises(SurefootError, match="preset='acrobat': unknown; did you mean 'acrobot'"):
        resolve_recipe("CartPole-v1", preset="acrobat")
    with pytest.raises(SurefootError, match="preset='sft': is for kind = 'sft', not 'control'"):
        resolve_recipe("CartPole-v1", preset="sft")


def test_another_preset_gets_the_algorithm_of_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text('task = "Acrobot-v1"\nalgorithm = "A2C"\n')
    assert (
        resolve_recipe(str(tmp_path / "mine.toml"), preset="cartpole").recipe
        == resolve_recipe("Acrobot-v1", {}, "A2C", "cartpole").recipe
    )


def test_presets_are_returned_as_copies() -> None:
    before = presets()["cartpole"]["objective"]["gamma"]
    presets()["cartpole"]["objective"]["gamma"] = before / 2
    assert presets()["cartpole"]["objective"]["gamma"] == before
