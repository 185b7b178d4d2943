"""The origin of each value of a resolved recipe: default, preset, or the recipe itself."""

from dataclasses import asdict
from typing import Any

from surefoot.recipes.presets import presets, resolve_recipe, settings_of
from surefoot.recipes.reading import flatten, make_recipe, to_table

GIVEN = {"task", "model", "data.train", "reward.terms", "algorithm"}
TEXT = {"model": "pocket", "data": {"train": "rows.jsonl"}}
REWARD = {"terms": [{"function": "a:b"}]}


def of(what: str, changes: dict[str, Any], **more: Any) -> dict[str, Any]:
    resolved = resolve_recipe(what, changes, **more)
    origin = None if resolved.origin is None else asdict(resolved.origin)
    settings = settings_of(to_table(resolved.recipe), origin)
    assert {setting.name: setting.value for setting in settings} == dict(flatten(to_table(resolved.recipe))), "every field"
    return {setting.name: setting for setting in settings}


NAMES = [name for name, table in presets().items() if table.get("task") or name in ("sft", "reward", "dpo", "language")]


def test_a_preset_alone_sets_nothing_by_the_recipe() -> None:
    for name in NAMES:
        kind = presets()[name].get("kind", "control")
        changes = {} if kind == "control" else {**TEXT, **({"reward": REWARD} if kind == "language" else {})}
        settings = of(name, changes)
        assert {field for field, setting in settings.items() if setting.source == "recipe"} <= GIVEN, name
        for setting in settings.values():
            if setting.source == "preset":
                assert setting.value == setting.before != setting.default
            elif setting.source == "default" and setting.name not in ("kind",):
                assert setting.value == setting.default


def test_a_changed_field_has_the_value_that_it_replaces() -> None:
    settings = of("CartPole-v1", {"optimizer": {"learning_rate": 1e-2}, "rollout": {"environments": 4}})
    rate, environments = settings["optimizer.learning_rate"], settings["rollout.environments"]
    assert (rate.source, rate.value, rate.before, rate.default) == ("recipe", 1e-2, 1e-3, 3e-4)
    assert (environments.source, environments.before) == ("recipe", 8)
    assert settings["objective.gamma"].source == "preset"
    assert settings["optimizer.epsilon"].source == "default"


def test_without_a_preset_values_are_compared_with_the_defaults_of_the_algorithm() -> None:
    settings = of("CartPole-v1", {"seed": 7, "algorithm": "TRPO"}, preset="none")
    assert {name for name, setting in settings.items() if setting.source != "default"} == {"task", "seed", "algorithm"}
    assert (settings["seed"].before, settings["algorithm"].before) == (1, "PPO_CLIP")


def test_settings_recorded_from_a_preset_that_has_changed_since_are_still_the_presets() -> None:
    table = to_table(resolve_recipe("CartPole-v1", {}).recipe)
    table["objective"]["gamma"] = 0.5
    origin = {"name": "cartpole", "fields": ["objective.gamma"]}
    gamma = next(setting for setting in settings_of(table, origin) if setting.name == "objective.gamma")
    assert gamma.source == "preset"


def test_truncated_answers_are_scored_like_others_unless_a_recipe_sets_a_penalty() -> None:
    table: dict[str, Any] = {"kind": "language", "model": "m", "data": {"train": "p.jsonl"}}
    terms = {"terms": [{"function": "a.py:f"}]}
    for algorithm in ("PPO_CLIP", "GRPO", "DAPO", "RLOO"):
        assert make_recipe({**table, "algorithm": algorithm, "reward": terms}).reward.missing_eos is None
    reward = presets()["reviews"]["reward"]
    assert (reward["missing_eos"], reward["missing_eos_value"]) == ("penalty", -1.0), "a learned reward"
