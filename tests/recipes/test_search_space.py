"""Search spaces: every preset has one, its values make valid recipes, and a bad space is rejected in one line."""

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot import SurefootError
from surefoot.recipes.presets import find_recipe, presets
from surefoot.recipes.reading import flatten, to_table
from surefoot.recipes.spaces import (
    Choices,
    Range,
    Space,
    flat_entries,
    parsed_space,
    shipped_spaces,
    space_for,
    with_values,
    without_presets,
)

FIXED = {"task": "is part of how runs are scored", "evaluation": "is part of how runs are scored"}
BASE = find_recipe("CartPole-v1")


def recipe_of(preset: str):
    """The recipe of a preset, with what it leaves to the user."""
    table = presets()[preset]
    if "kind" not in table:
        return find_recipe("CartPole-v1" if preset == "default" else preset)
    rewarded = table["kind"] != "language" or "turns" in table or "terms" in table.get("reward", {})
    reward = {} if rewarded else {"reward": {"terms": [{"function": "a:b"}]}}
    return find_recipe(preset, {"model": "pocket", "data": {"train": "a.jsonl"}, **reward})


def values(space: Space, draw: st.DataObject) -> dict[str, Any]:
    """A value for each field."""
    drawn = {}
    for field, part in space.items():
        if isinstance(part, Choices):
            drawn[field] = draw.draw(st.sampled_from(part.values))
        else:
            drawn[field] = draw.draw((st.integers if part.whole else st.floats)(part.low, part.high))
    return drawn


def test_every_preset_has_exactly_one_space():
    listed = sorted(preset for table in shipped_spaces().values() for preset in table["presets"])
    assert listed == sorted(presets())


PRESETS = [name for name in presets() if name != "atari"]


@settings(max_examples=30, deadline=None)
@given(draw=st.data())
def test_all_values_of_a_shipped_space_make_a_recipe(draw: st.DataObject):
    preset = draw.draw(st.sampled_from(PRESETS))
    recipe = recipe_of(preset)
    chosen = values(space_for(preset, recipe, FIXED)[1], draw)
    made = dict(flatten(to_table(with_values(recipe, chosen))))
    assert {field: made[field] for field in chosen} == chosen


def test_a_shipped_space_contains_the_presets_own_values():
    for preset in PRESETS:
        recipe = recipe_of(preset)
        own, (name, space) = dict(flatten(to_table(recipe))), space_for(preset, recipe, FIXED)
        assert set(space) == set(flat_entries(without_presets(shipped_spaces()[name]))), f"no field is off in {preset}"
        assert {field: own[field] for field, part in space.items() if not part.has(own[field])} == {}, preset


def test_a_shipped_space_leaves_out_what_is_off_in_the_algorithm():
    _, space = space_for("CartPole-v1", find_recipe("CartPole-v1", algorithm="REINFORCE"), FIXED)
    assert "optimizer.learning_rate" in space
    assert not {"objective.gae_lambda", "objective.reuse.epochs", "objective.trust_region.clip"} & set(space)


def test_a_space_is_read_from_tables_and_from_dotted_names():
    text = "[optimizer]\nlearning_rate = { low = 1e-4, high = 1e-2, log = true }\n[network]\nhidden = [[8], [64, 64]]\n"
    dotted = {
        "optimizer.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
        "network.hidden": {"choices": [[8], [64, 64]]},
    }
    space = parsed_space(tomllib.loads(text), BASE, {}, "space")
    assert space == parsed_space(dotted, BASE, {}, "space")
    assert space == {"optimizer.learning_rate": Range(1e-4, 1e-2, True), "network.hidden": Choices(([8], [64, 64]))}
    assert parsed_space({"rollout.environments": {"low": 1, "high": 8}}, BASE, {}, "s")["rollout.environments"].whole
    assert not parsed_space({"objective.gamma": {"low": 0, "high": 1}}, BASE, {}, "s")["objective.gamma"].whole


def test_a_space_read_back_from_json_is_the_same():
    _, space = space_for("CartPole-v1", BASE, FIXED)
    stepped = {**space, "rollout.environments": Range(2, 8, step=2, whole=True)}
    assert parsed_space({field: part.to_json() for field, part in stepped.items()}, BASE, FIXED, "s") == stepped


def test_a_stepped_range_has_its_steps_only():
    part = Range(0.1, 0.5, step=0.1)
    assert [part.has(value) for value in (0.1, 0.3, 0.5, 0.35, 0.6, True, "0.1")] == [True, True, True, *[False] * 4]


LR = "optimizer.learning_rate"


REJECTED: list[tuple[dict[str, Any], str]] = [
    ({}, r"space: has no field to search"),
    ({"optimizer.learning_rat": [1, 2]}, r"no field of the recipe; did you mean 'optimizer\.learning_rate'\?"),
    ({"task": ["CartPole-v1", "Acrobot-v1"]}, r"space: task: is part of how runs are scored; leave it out"),
    ({"objective.trust_region.beta": [1.0, 2.0]}, r"this field is off in the recipe; turn it on, or leave it out"),
    ({LR: 1e-3}, r"space: optimizer\.learning_rate=0\.001: fixes the field; set it in the recipe, or give a list"),
    ({LR: [1e-3, 1e-3]}, r"needs at least two choices, and each once"),
    ({LR: {"low": 1e-3}}, r"lacks low or high; give a list"),
    ({LR: {"low": 1e-4, "high": 1e-3, "logg": True}}, r"unknown key 'logg'; did you mean 'log'\?"),
    ({LR: {"low": 1e-3, "high": 1e-4}}, r"low=0\.001 must be below high=0\.0001; swap them"),
    ({LR: {"low": 0.0, "high": 1e-4, "log": True}}, r"low=0\.0 has no logarithm; raise it above 0, or leave out log"),
    ({LR: {"low": "a", "high": 1e-4}}, r"low, high and step must be finite numbers, and log true or false"),
    ({LR: {"low": 0.1, "high": 1.0, "step": 2.0}}, r"step=2\.0 must lie between 0 and high - low, without log"),
    ({LR: {"low": -1.0, "high": 1.0}}, r"space: optimizer\.learning_rate=-1\.0: input should be greater than 0"),
    ({LR: ["fast", 1e-3]}, r"space: optimizer\.learning_rate='fast': must be a number, such as 3e-4"),
    ({"rollout.steps": {"low": 1.5, "high": 9}}, r"has whole numbers only; use whole numbers for low, high and step"),
    ({"optimizer.schedule": ["linear", "wavy"]}, r"space: optimizer\.schedule='wavy': must be constant, linear"),
]


def test_a_space_that_cannot_be_searched_is_rejected_in_one_line():
    for table, message in REJECTED:
        with pytest.raises(SurefootError, match=message):
            parsed_space(table, BASE, FIXED, "space")


def test_values_that_fit_only_together_are_accepted():
    """32 minibatches don't divide the recipe's own batch of 8 x 2 steps, but that of another choice."""
    small = find_recipe("CartPole-v1", {"rollout": {"steps": 2}})
    space = parsed_space({"objective.reuse.minibatches": [1, 32], "rollout.steps": [2, 64]}, small, {}, "space")
    assert space["objective.reuse.minibatches"] == Choices((1, 32))
