"""Tables become recipes: names, ranges, and what errors suggest."""

import itertools
import re
import tomllib
from contextlib import nullcontext, suppress

import pytest

from surefoot import Penalty, SurefootError
from surefoot.recipes import base
from surefoot.recipes import fields as descriptions
from surefoot.recipes.base import nearest_divisor
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.fields import KINDS, recipe_fields
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import OTHER_LIBRARIES, flatten, make_recipe, merge_tables, named_functions, to_table
from surefoot.runs import api


def test_another_librarys_name_gets_our_field_as_a_suggestion():
    text = {"model": "pocket", "data": {"train": "rows.jsonl"}}
    for task, fields, meant in (
        ("CartPole-v1", {"total_timesteps": 100}, "steps"),
        ("CartPole-v1", {"learning_rate": 1e-3}, "optimizer.learning_rate"),
        ("CartPole-v1", {"rollout": {"num_envs": 8}}, "rollout.environments"),
        ("CartPole-v1", {"batch_size": 64}, "objective.reuse.minibatches"),
        ("CartPole-v1", {"clip_range": 0.1}, "objective.trust_region.clip"),
        ("CartPole-v1", {"policy_kwargs": {"net_arch": [8]}}, "network"),
        ("sft", {"batch_size": 64, **text}, "data.batch"),
        ("guess", {"num_generations": 8, **text}, "sampling.samples"),
    ):
        with pytest.raises(SurefootError, match=rf"unknown key; did you mean '{meant}'\?$"):
            api.train(task, **fields)


def test_every_suggested_field_exists():
    expected = {name for name, _ in recipe_fields()} | {name.partition(".")[0] for name, _ in recipe_fields()}
    assert {name for names in OTHER_LIBRARIES.values() for name in names} <= expected


COUNTS = [(kind, name) for kind in KINDS for name, field in recipe_fields(kind) if "whole number" in field.type]
MINIMAL = {
    "control": {"task": "CartPole-v1", "cloning": {"data": "x"}},
    "language": {"data": {"train": "x"}, "model": "pocket", "reward": {"terms": [{"function": "x:y"}]}},
}


def test_every_count_has_an_upper_bound():
    for (kind, name), value in zip(COUNTS, itertools.cycle((10**16, 10**400, 10**5000))):
        least = {"kind": kind, "algorithm": "custom", **MINIMAL.get(kind, {"model": "pocket", "data": {"train": "x"}})}
        changes = value
        for key in reversed(name.split(".")):
            changes = {key: changes}
        with pytest.raises(SurefootError, match=rf"^{re.escape(name)}[=:]") as rejection:
            make_recipe(merge_tables(least, changes))
        assert len(str(rejection.value)) < 300


def test_the_nearest_divisor_is_found_without_trying_all_numbers():
    assert nearest_divisor(10**12, 7) == 8
    assert [nearest_divisor(12, wanted) for wanted in (1, 5, 7, 9, 100)] == [1, 4, 6, 6, 12]


def test_a_run_of_less_than_ten_iterations_is_evaluated_only_at_its_end_unless_the_recipe_says_when():
    few = {"task": "CartPole-v1", "rollout": {"environments": 8, "steps": 32}}
    assert [make_recipe({**few, "steps": 256 * n}).evaluate_every for n in (1, 9, 10, 100)] == [256, 2304, 256, 2560]
    assert make_recipe({**few, "steps": 512, "evaluation": {"every": 100}}).evaluate_every == 100
    assert make_recipe({**few, "steps": 512, "algorithm": "REINFORCE"}).evaluate_every == 51  # its iterations are episodes


def test_traces_are_at_least_four_iterations_apart_unless_the_recipe_says_when():
    few = {"task": "CartPole-v1", "rollout": {"environments": 8, "steps": 32}}
    assert [make_recipe({**few, "steps": 256 * n}).trace_every for n in (1, 10, 40, 100)] == [1024, 1024, 1024, 2560]
    assert make_recipe({**few, "steps": 512, "traces": {"every": 100}}).trace_every == 100
    assert make_recipe({**few, "steps": 512, "algorithm": "REINFORCE"}).trace_every == 51  # its iterations are episodes


def test_every_field_has_a_description():
    for name, described in recipe_fields():
        if "." in name or name not in ("rollout", "network"):
            assert described.meaning, name


def test_a_run_parses_its_recipe_once_and_writes_it_once(monkeypatch, tmp_path):
    calls = []
    parse, write = ControlRecipe.model_validate, base.to_table
    monkeypatch.setattr(ControlRecipe, "model_validate", lambda table: calls.append("parse") or parse(table))
    monkeypatch.setattr(base, "to_table", lambda recipe: calls.append("write") or write(recipe))
    few = {"rollout": {"environments": 2, "steps": 16}, "objective": {"reuse": {"epochs": 1}}, "evaluation": {"episodes": 0}}
    agent = api.train("CartPole-v1", run_dir=tmp_path / "run", steps=32, **few)
    assert calls == ["parse", "write"]
    assert agent.recipe.with_value("rollout.steps", 8).table["rollout"]["steps"] == 8
    assert agent.recipe.table == to_table(agent.recipe) == tomllib.loads((tmp_path / "run" / "config.toml").read_text())


def test_two_classes_of_recipes_have_different_names():
    modules = descriptions._recipe_modules()
    own = [
        name for module in modules for name, cls in vars(module).items() if getattr(cls, "__module__", "") == module.__name__
    ]
    classes = [name for name in own if name[0].isupper()]
    assert {"LanguageRecipe", "RewardTerm", "DataSettings", "Objective"} <= set(classes)
    assert len(set(classes)) == len(classes)


def test_a_package_installed_without_sources_has_the_same_fields_without_texts(monkeypatch):
    expected = [(name, field.type, field.default) for name, field in recipe_fields()]

    def getsource(module):
        raise OSError("could not get source code")

    monkeypatch.setattr("surefoot.recipes.fields.inspect.getsource", getsource)
    monkeypatch.setattr("surefoot.recipes.fields._texts_under_fields", descriptions._texts_under_fields.__wrapped__)
    monkeypatch.setattr("surefoot.recipes.fields._fields_of", descriptions._fields_of.__wrapped__)
    fields = list(recipe_fields())
    assert [(name, field.type, field.default) for name, field in fields] == expected
    assert not any(field.meaning for _, field in fields)


@pytest.mark.parametrize("algorithm", [None, "GRPO"])
def test_a_recipe_that_is_written_out_has_the_defaults_of_a_short_one(algorithm):
    """Deleting any one line of it gives the recipe that has never had the line."""
    for kind in KINDS:
        needed = {"task": "Pendulum-v1"} if kind == "control" else {"kind": kind, "model": "pocket", "data": {"train": "x"}}
        with suppress(SurefootError):  # some kinds have one algorithm
            short = make_recipe(needed | ({} if algorithm is None else {"algorithm": algorithm}))
            written = to_table(short)
            for name, _ in flatten(written):
                if name not in ("kind", "task", "model", "data.train", "algorithm"):
                    assert make_recipe(without(written, name)) == short, (kind, name)


def without(table, name):
    """Nested tables without the value named ``a.b.c``."""
    first, _, rest = name.partition(".")
    return {
        key: without(value, rest) if rest and key == first else value for key, value in table.items() if rest or key != first
    }


def test_minibatches_of_one_step_can_t_be_normalised() -> None:
    """(Â − mean)/std of one number is 0: the policy would never move."""
    for shape, minibatches, over, changes, alone in (
        ((4, 8), 32, "minibatch", {}, True),
        ((4, 8), 16, "minibatch", {}, False),
        ((4, 8), 32, "batch", {}, False),
        ((4, 8), 32, "none", {}, False),
        ((1, 1), 1, "batch", {}, True),
        ((1, 1), 1, "none", {}, False),
        ((2, 1), 2, "minibatch", {"network": {"lstm": 4}}, True),
        ((2, 2), 2, "minibatch", {"network": {"lstm": 4}}, False),
        ((4, 8), 32, "minibatch", {"algorithm": "TRPO"}, False),  # the minibatches are the critic's
        ((1, 1), 1, "minibatch", {"algorithm": "TRPO"}, True),
        ((1, 2), 2, "minibatch", {"rollout": {"symmetry": "mirror.py:mirrored"}}, False),
        ((1, 1), None, "minibatch", {"algorithm": "A2C"}, True),
    ):
        reuse = "none" if minibatches is None else {"epochs": 1, "minibatches": minibatches}
        rollout = {"environments": shape[0], "steps": shape[1], **changes.get("rollout", {})}
        table = {**changes, "rollout": rollout, "objective": {"reuse": reuse, "normalise_advantages": over}}
        rejected = pytest.raises(SurefootError, match=rf"objective\.normalise_advantages='{over}': normalises .* of one step, ")
        with rejected if alone else nullcontext():
            find_recipe("Pendulum-v1", table)


def test_a_recipe_without_an_algorithm_is_named_after_its_trust_region() -> None:
    """A recipe that names one keeps it: saved runs stay readable whatever they are called."""
    penalty = {"objective": {"trust_region": {"beta": 1.0}}}
    language = {"kind": "language", "model": "m", "reward": {"terms": ["r.py:score"]}, "data": {"train": "x.jsonl"}}
    for table in ({"task": "CartPole-v1"}, language):
        for name, expected in (
            ({}, "PPO_PENALTY"),
            ({"algorithm": "PPO_CLIP"}, "PPO_CLIP"),
            ({"algorithm": "PPO_UNCLIPPED"}, "PPO_UNCLIPPED"),
        ):
            recipe = make_recipe({**table, **name, **penalty})
            assert recipe == make_recipe({**table, **name, "objective": {"trust_region": Penalty(beta=1.0)}})
            assert recipe.algorithm == expected
            assert recipe.objective.trust_region == Penalty(beta=1.0)
            assert make_recipe(to_table(recipe)) == recipe


def test_every_field_with_a_function_has_its_name() -> None:
    tables = {"reward": {"terms": ["a:b", "c:d"], "gold": "g:g"}, "turns": {"tools": ["t:u"], "environment": "e:E"}}
    text = {"kind": "language", "model": "m", "data": {"train": "x"}, **tables, "optimizer": {"schedule": "s:t"}}
    named = named_functions(make_recipe(text))
    terms = {"reward.terms[0].function": "a:b", "reward.terms[1].function": "c:d", "reward.gold": "g:g"}
    turns = {"turns.tools[0]": "t:u", "turns.environment": "e:E"}
    assert {**terms, **turns, "optimizer.schedule": "s:t"}.items() <= named.items()
    own = {"network": {"custom": "n:n"}, "rollout": {"symmetry": "m:m"}, "objective": {"trust_region": {"schedule": "c:s"}}}
    named = named_functions(make_recipe({"task": "CartPole-v1", **own}))
    fields = ("network.custom", "rollout.symmetry", "objective.trust_region.schedule", "optimizer.schedule")
    assert [named[field] for field in fields] == ["n:n", "m:m", "c:s", "constant"]
