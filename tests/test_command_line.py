"""The command line as a user types it."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, replace

import click
import pytest
import tomli_w

from surefoot import ALGORITHMS, PPO_CLIP, Clip, Constraint, Objective, Penalty, train
from surefoot.algorithms import TRUST_REGIONS, switches_between
from surefoot.cli import COMMANDS, cli, fail
from surefoot.cli_train import changes_from
from surefoot.config import make_recipe, recipe_fields, to_toml
from surefoot.demo_stages import command_here
from surefoot.errors import SurefootError
from surefoot.recipes import Found, find, find_recipe, presets, recipe_for
from surefoot.toml import parse_value


@pytest.fixture
def surefoot(command):
    """What a command that must succeed writes to stdout."""

    def run(*words):
        code, out, err = command(*words)
        assert code == 0, err
        return out

    return run


def test_help_waits_for_neither_torch_nor_gymnasium():
    code = "import sys; from surefoot.cli import cli; cli.main(['train', '--help'], standalone_mode=False); "
    code += "assert not {'torch', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_who_only_looks_waits_for_no_recipes():
    code = "import sys; from surefoot.cli import cli; cli.main(['inspect', '--help'], standalone_mode=False); "
    code += "import surefoot.inspector.server; assert not {'torch', 'gymnasium', 'surefoot.kinds'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_command_is_where_the_table_says_under_its_own_name():
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert command.name == name
    assert cli.get_command(click.Context(cli), "no-such") is None


def test_a_command_that_is_misspelled_is_suggested(command):
    code, out, err = command("trian", "CartPole-v1")
    assert (code, out) == (2, "")
    assert err.startswith("surefoot: trian: no such command; did you mean 'train'? (see: surefoot --help)")


@pytest.mark.parametrize("group", [(), ("data",)])
def test_a_group_by_itself_shows_its_commands_line_by_line(command, group):
    code, out, err = command(*group)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: surefoot")
    assert len(err.splitlines()) > 6


def test_version(surefoot):
    assert surefoot("--version").strip().endswith("0.1.0")


def test_train_then_evaluate_then_resume(surefoot, tmp_path):
    out = surefoot("train", "CartPole-v1", "--steps", "512", "--name", "one", "--seed", "3", "--objective.gae-lambda", "0.9")
    assert "512 steps -> runs/one" in out
    recipe = tomllib.loads((tmp_path / "runs" / "one" / "config.toml").read_text())
    assert recipe["objective"]["gae_lambda"] == 0.9
    assert recipe["seed"] == 3
    result = json.loads(surefoot("evaluate", "runs/one", "--episodes", "3", "--seed", "5", "--json"))
    assert set(result) == {"mean_return", "std_return", "returns", "lengths", "episodes", "seed", "checkpoint"}
    assert result["mean_return"] == sum(result["returns"]) / 3
    assert result["returns"] == [float(n) for n in result["lengths"]], "CartPole pays 1 per step"
    assert result == json.loads(surefoot("evaluate", "runs/one", "--episodes", "3", "--seed", "5", "--json"))
    assert "1,024 steps" in surefoot("resume", "runs/one", "--steps", "1024", "--quiet")


def test_the_demo_names_a_command_that_the_shell_finds(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [".venv/bin/surefoot", "demo"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_here() == ".venv/bin/surefoot", "make demo does not activate what it makes"
    (tmp_path / "surefoot").touch(mode=0o755)
    assert command_here() == "surefoot"
    monkeypatch.setattr(sys, "argv", ["surefoot/__main__.py", "demo"])
    monkeypatch.setenv("PATH", "")
    assert command_here() == "surefoot"


def test_several_seeds_make_several_runs_and_a_spread(surefoot, tmp_path):
    out = surefoot("train", "CartPole-v1", "--steps", "256", "--seeds", "2", "--name", "many", "--quiet")
    assert "2 seeds: mean" in out
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["many-seed1", "many-seed2"]


def test_a_name_made_up_never_collides(surefoot, tmp_path):
    for _ in range(2):
        surefoot("train", "CartPole-v1", "--steps", "256", "--quiet")
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["cartpole-v1-ppo_clip-1", "cartpole-v1-ppo_clip-1-2"]


def test_a_dry_run_prints_a_recipe_that_can_be_run(surefoot, tmp_path):
    out = surefoot("train", "CartPole-v1", "--dry-run", "--rollout.environments", "4")
    assert "# batch: 4 environments x 32 steps = 128 steps" in out
    assert "# iterations: 100,000 / 128 = 782" in out
    assert "# parameters: 9,155 in all, 4,545 of them in a separate critic" in out
    (tmp_path / "mine.toml").write_text(out)
    assert surefoot("train", "mine.toml", "--dry-run").splitlines() == [
        line for line in out.splitlines() if not line.startswith("# preset cartpole: ")
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.toml"]


def test_a_small_recipe_file_inherits_what_is_tuned_for_its_task(surefoot, tmp_path):
    (tmp_path / "mine.toml").write_text('task = "CartPole-v1"\nsteps = 256\n')
    assert "learning_rate = 0.001" in surefoot("train", "mine.toml", "--dry-run")


def test_the_config_of_a_run_trains_the_same_run_again(surefoot, tmp_path):
    surefoot("train", "CartPole-v1", "--steps", "256", "--name", "a", "--quiet")
    surefoot("train", "runs/a/config.toml", "--name", "b", "--quiet")
    assert (tmp_path / "runs/a/config.toml").read_text() == (tmp_path / "runs/b/config.toml").read_text()
    weights = [(tmp_path / f"runs/{name}/checkpoints/256/agent.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]


def test_list_names_recipes_algorithms_and_ids(surefoot):
    out = surefoot("list")
    for word in ("cartpole", "mujoco", "HalfCheetah-v5", "PPO_CLIP", "REINFORCE", "Acrobot-v1"):
        assert word in out


def test_every_preset_is_a_whole_recipe_and_survives_the_round_trip():
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


@pytest.mark.parametrize("task", ["CartPole-v1", "LunarLander-v3", "FrozenLake-v1"])
@pytest.mark.parametrize("own", IN_CONTROL)
def test_naming_an_algorithm_changes_the_switches_that_define_it_and_nothing_else(task, own, tmp_path):
    recipe, file = find_recipe(task, {"algorithm": own}), tmp_path / "mine.toml"
    file.write_text(to_toml(recipe))
    for named in IN_CONTROL:
        there = find_recipe(str(file), {"algorithm": named})
        assert replace_objective(there, recipe) == recipe
        defining = switches_between(ALGORITHMS[own], ALGORITHMS[named])
        unused = OFF_WITHOUT if ALGORITHMS[named].baseline is None else set()
        assert set(switches_between(recipe.objective, there.objective)) - unused <= set(defining)
        assert {name: getattr(there.objective, name) for name in defining} == {name: now for name, (_, now) in defining.items()}


def replace_objective(recipe, other):
    """A recipe with the algorithm of another."""
    return recipe.model_copy(update={"algorithm": other.algorithm, "objective": other.objective})


def test_an_algorithm_without_a_clip_makes_as_many_updates_as_the_preset():
    tuned, unclipped = find_recipe("CartPole-v1"), find_recipe("CartPole-v1", {"algorithm": "PPO_UNCLIPPED"})
    assert unclipped.objective == replace(tuned.objective, trust_region=None)


def test_what_belongs_to_a_switch_that_is_off_does_not_stay(tmp_path):
    text = 'task = "CartPole-v1"\nalgorithm = "PPO_CLIP"\nobjective = { value_clip = 0.2, target_kl = 0.02, gamma = 0.9 }\n'
    (tmp_path / "mine.toml").write_text(text + "optimizer = { critic_learning_rate = 1e-3, learning_rate = 2e-3 }\n")
    for name in ("REINFORCE", "REINFORCE_BASELINE"):
        recipe = find_recipe(str(tmp_path / "mine.toml"), {"algorithm": name})
        assert recipe.objective == replace(ALGORITHMS[name], gamma=0.9)
        assert (recipe.optimizer.critic_learning_rate, recipe.optimizer.learning_rate) == (None, 2e-3)
    trpo = find_recipe(str(tmp_path / "mine.toml"), {"algorithm": "TRPO"})
    assert trpo.objective == replace(ALGORITHMS["TRPO"], gamma=0.9, value_clip=0.2)


def test_another_algorithm_has_its_baseline_and_its_reuse_whatever_a_recipe_made_of_its_own(tmp_path):
    text = 'task = "CartPole-v1"\nalgorithm = "TRPO"\nobjective = { baseline = "mean", reuse = "none", gae_lambda = 1 }\n'
    (tmp_path / "mine.toml").write_text(text)
    recipe = find_recipe(str(tmp_path / "mine.toml"), {"algorithm": "PPO_CLIP"})
    assert recipe.objective == replace(PPO_CLIP, gae_lambda=1.0)


def test_custom_starts_from_nothing_but_the_discount():
    assert find_recipe("CartPole-v1", {"algorithm": "custom"}).objective == Objective(gamma=0.98)
    assert find_recipe("CartPole-v1", {"algorithm": "REINFORCE"}).objective == Objective(gamma=0.98)
    assert find_recipe("CartPole-v1", {"algorithm": "PPO_CLIP"}) == find_recipe("CartPole-v1")


@pytest.mark.parametrize("name", ["PPO_PENALTY", "PPO_PENALTY_ADAPTIVE", "TRPO"])
def test_another_trust_region_keeps_all_that_is_tuned_but_the_trust_region(name):
    tuned = find_recipe("CartPole-v1")
    recipe = find_recipe("CartPole-v1", {"algorithm": name})
    assert set(switches_between(tuned.objective, recipe.objective)) == {"trust_region"}
    assert recipe.objective.trust_region == ALGORITHMS[name].trust_region
    assert recipe_for("CartPole-v1", ALGORITHMS[name], {}) == recipe
    assert make_recipe(tomllib.loads(to_toml(recipe))) == recipe


@pytest.mark.parametrize(
    ("algorithm", "table", "expected"),
    [
        ("PPO_CLIP", {"clip_high": 0.3}, Clip(0.2, clip_high=0.3, schedule="linear")),
        ("PPO_CLIP", "none", None),
        ("PPO_PENALTY_ADAPTIVE", {"beta": 3}, Penalty(3.0, target=0.01)),
        ("PPO_PENALTY_ADAPTIVE", {"target": "none"}, Penalty(1.0)),
        ("TRPO", {"tries": 5}, Constraint(tries=5)),
        ("TRPO", {}, Constraint()),
        ("custom", {"beta": 3}, Penalty(3.0)),
        ("custom", {"schedule": "linear"}, Clip(schedule="linear")),
    ],
)
def test_a_trust_region_is_the_one_whose_keys_are_given_and_replaces_any_other(algorithm, table, expected):
    changes = {"algorithm": algorithm, "objective": {"trust_region": table}}
    if algorithm == "custom":
        changes["objective"]["reuse"] = {"epochs": 2}
    recipe = find_recipe("CartPole-v1", changes)
    assert recipe.objective.trust_region == expected
    assert make_recipe(tomllib.loads(to_toml(recipe))) == recipe


@pytest.mark.parametrize(
    ("table", "algorithm", "expected"),
    [
        ({"beta": 3}, "PPO_PENALTY", Penalty(3.0)),
        ({"target": 0.02}, "PPO_PENALTY_ADAPTIVE", Penalty(1.0, target=0.02)),
        ({"beta": 3, "target": "none"}, "PPO_PENALTY", Penalty(3.0)),
        ({"delta": 0.02}, "TRPO", Constraint(0.02)),
        ({"clip": 0.1}, "PPO_CLIP", Clip(0.1, schedule="linear")),
    ],
)
def test_keys_of_a_trust_region_name_the_algorithm_that_has_it(table, algorithm, expected):
    """A run is called what it is."""
    tuned, recipe = find_recipe("CartPole-v1"), find_recipe("CartPole-v1", {"objective": {"trust_region": table}})
    assert (recipe.algorithm, recipe.objective.trust_region) == (algorithm, expected)
    assert set(switches_between(tuned.objective, recipe.objective)) == {"trust_region"}


@pytest.mark.parametrize(
    ("algorithm", "file", "flags", "called", "expected"),
    [
        (None, {"beta": 3.0}, None, "PPO_PENALTY", Penalty(3.0)),
        ("PPO_CLIP", {"beta": 3.0}, None, "PPO_PENALTY", Penalty(3.0)),
        (None, {"beta": 3.0}, {"target": 0.05}, "PPO_PENALTY_ADAPTIVE", Penalty(3.0, target=0.05)),
        ("PPO_CLIP", {"delta": 0.05, "damping": 0.3}, {"cg_iterations": 20}, "TRPO", Constraint(0.05, 0.3, 20)),
        ("PPO_PENALTY_ADAPTIVE", {"beta": 3.0}, {"beta": 2.0}, "PPO_PENALTY_ADAPTIVE", Penalty(2.0, target=0.01)),
        ("PPO_PENALTY_ADAPTIVE", {"target": "none"}, None, "PPO_PENALTY", Penalty(1.0)),
        ("PPO_CLIP", {"clip": 0.1}, "none", "PPO_UNCLIPPED", None),
    ],
)
def test_a_file_s_own_trust_region_stays_and_its_recipe_is_called_what_it_is(
    algorithm, file, flags, called, expected, tmp_path
):
    label = {} if algorithm is None else {"algorithm": algorithm}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps({"task": "Acrobot-v1", **label, "objective": {"trust_region": file}}))
    recipe = find_recipe(str(tmp_path / "mine.toml"), {} if flags is None else {"objective": {"trust_region": flags}})
    assert (recipe.algorithm, recipe.objective.trust_region) == (called, expected)


def test_a_trust_region_may_be_a_value():
    tuned = find_recipe("CartPole-v1")
    recipe = recipe_for("CartPole-v1", None, {"objective": {"trust_region": Penalty(3.0)}})
    assert (recipe.algorithm, recipe.objective) == ("PPO_PENALTY", replace(tuned.objective, trust_region=Penalty(3.0)))
    with pytest.raises(SurefootError, match="algorithm='TRPO' has a constraint; name PPO_CLIP"):
        recipe_for("CartPole-v1", "TRPO", {"objective": {"trust_region": Clip(0.1)}})


@pytest.mark.parametrize(
    ("algorithm", "table", "part"),
    [
        ("TRPO", {"clip": 0.1}, "has keys of a clip (clip), and algorithm='TRPO' has a constraint; name PPO_CLIP"),
        ("PPO_CLIP", {"beta": 3}, "has keys of a penalty (beta), and algorithm='PPO_CLIP' has a clip; name PPO_PENALTY"),
        ("GRPO", {"beta": 3}, "has keys of a penalty (beta), and algorithm='GRPO' has a clip; give keys of that"),
    ],
)
def test_keys_of_another_trust_region_than_the_named_algorithms_are_refused(algorithm, table, part):
    with pytest.raises(SurefootError, match=re.escape(f"objective.trust_region: {part}")):
        find_recipe("CartPole-v1", {"algorithm": algorithm, "objective": {"trust_region": table}})


def test_no_two_trust_regions_share_a_key():
    names = [field.name for kind in TRUST_REGIONS for field in fields(kind)]
    assert len(names) == len(set(names))


def test_the_arithmetic_of_trpo_tells_policy_and_critic_apart(surefoot, tmp_path):
    out = surefoot("train", "CartPole-v1", "--algorithm", "TRPO", "--dry-run")
    assert "# updates of the critic: 20 epochs x 1 minibatches = 20 per iteration" in out
    assert "# updates of the policy: 1 natural step per iteration on all 256 steps: 10 + 1 Fisher-vector products" in out
    assert f"# updates in all: {391 * 21:,}" in out


def test_a_value_is_a_name_or_is_taken_as_it_stands():
    assert recipe_for("CartPole-v1", PPO_CLIP, {}) == find_recipe("CartPole-v1")
    for own in (Objective(baseline="critic", gamma=0.5), replace(PPO_CLIP, gamma=0.9), replace(PPO_CLIP, value_lambda=1.0)):
        recipe = recipe_for("CartPole-v1", own, {})
        assert recipe.objective == own
        assert recipe.algorithm == "custom"
        assert make_recipe(tomllib.loads(to_toml(recipe))) == recipe


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.9", 0.9), ("3", 3), ("true", True), ("[64, 32]", [64, 32]), ("none", "none"), ("PPO_CLIP", "PPO_CLIP")],
)
def test_flags_are_read_as_toml(text, value):
    assert parse_value(text) == value


FROM_CARTPOLE = "steps objective.gamma objective.gae_lambda objective.normalise_advantages objective.reuse "
FROM_CARTPOLE += "objective.trust_region rollout.environments rollout.steps optimizer.learning_rate optimizer.schedule"


@pytest.mark.parametrize(
    ("changes", "decided", "parts"),
    [
        ({}, "", ""),
        ({"optimizer": {"learning_rate": 0.002}}, "optimizer.learning_rate", ""),
        ({"objective": {"reuse": {"epochs": 3}}, "steps": 512}, "steps objective.reuse", "objective.reuse.minibatches"),
        ({"objective": {"trust_region": {"clip": 0.1}}}, "objective.trust_region", "objective.trust_region.schedule"),
        ({"objective": {"trust_region": {"beta": 3}}}, "objective.trust_region", ""),
        ({"objective": {"trust_region": "none"}}, "objective.trust_region", ""),
        ({"algorithm": "A2C"}, "objective.reuse objective.trust_region", ""),
        ({"algorithm": "custom"}, " ".join(FROM_CARTPOLE.split()[2:6]), ""),
    ],
)
def test_a_recipe_knows_what_it_has_from_its_preset(changes, decided, parts):
    origin = find("CartPole-v1", changes).origin
    assert origin.name == "cartpole"
    assert set(origin.fields) == set(FROM_CARTPOLE.split()) - set(decided.split()) | set(parts.split())


def test_what_stands_alone_has_nothing_from_a_preset(tmp_path):
    (tmp_path / "whole.toml").write_text(to_toml(find_recipe("CartPole-v1")))
    assert find(str(tmp_path / "whole.toml")).origin is None
    (tmp_path / "part.toml").write_text('task = "CartPole-v1"\n[optimizer]\nlearning_rate = 1\nschedule = "cosine"\n')
    assert "optimizer" not in " ".join(find(str(tmp_path / "part.toml")).origin.fields)


def test_a_run_begins_with_what_it_has_from_its_preset_and_keeps_it(surefoot, tmp_path):
    words = ["train", "CartPole-v1", "--steps", "256", "--evaluation.episodes", "0", "--optimizer.learning-rate", "2e-3"]
    title, line, *_ = surefoot(*words, "--name", "one").splitlines()
    names = [name for name in FROM_CARTPOLE.split() if name not in ("steps", "optimizer.learning_rate")]
    assert (title, line) == ("PPO_CLIP on CartPole-v1, seed 1 -> runs/one", f"preset cartpole: {', '.join(names)}")
    kept = json.loads((tmp_path / "runs/one/environment.json").read_text())["preset"]
    assert kept == {"name": "cartpole", "fields": names}
    assert f"# {line}" in surefoot(*words, "--dry-run").splitlines()
    again = surefoot("train", "runs/one/config.toml", "--name", "two")
    assert "preset" not in again
    assert json.loads((tmp_path / "runs/two/environment.json").read_text())["preset"] is None
    assert (tmp_path / "runs/one/config.toml").read_text() == (tmp_path / "runs/two/config.toml").read_text()


def test_without_a_preset_a_recipe_has_the_plain_defaults(surefoot, tmp_path):
    plain = make_recipe({"task": "CartPole-v1"})
    assert find("CartPole-v1", preset="none") == find("cartpole", preset="None") == Found(plain, None)
    assert surefoot("train", "CartPole-v1", "--preset", "none", "--dry-run").startswith(to_toml(plain))
    (tmp_path / "mine.toml").write_text('task = "CartPole-v1"\nsteps = 512\n')
    assert find("mine.toml", preset="none").recipe == make_recipe({"task": "CartPole-v1", "steps": 512})
    agent = train("CartPole-v1", preset="none", steps=256, rollout={"steps": 32}, evaluation={"episodes": 0})
    assert agent.recipe.objective == PPO_CLIP


def test_another_preset_may_lie_below():
    acrobot, there = find_recipe("Acrobot-v1"), find("CartPole-v1", preset="acrobot")
    assert there.recipe == acrobot.model_copy(update={"task": "CartPole-v1"})
    assert there.origin.name == "acrobot"
    with pytest.raises(SurefootError, match="preset='acrobat': unknown; did you mean 'acrobot'"):
        find("CartPole-v1", preset="acrobat")
    with pytest.raises(SurefootError, match="preset='sft': is for kind = 'sft', and this is of kind 'control'"):
        find("CartPole-v1", preset="sft")


def test_another_preset_below_a_file_has_the_file_s_algorithm(tmp_path):
    (tmp_path / "mine.toml").write_text('task = "Acrobot-v1"\nalgorithm = "A2C"\n')
    assert find(str(tmp_path / "mine.toml"), preset="cartpole").recipe == find("Acrobot-v1", {}, "A2C", "cartpole").recipe


ON, OFF = ["--normalise.rewards"], ["--normalise.rewards", "false"]
SWITCHED = [
    (["train", *ON, "--optimizer.learning-rate", "2e-3", "CartPole-v1"], True),
    (["train", "--optimizer.learning-rate", "2e-3", *ON, "CartPole-v1"], True),
    (["train", "CartPole-v1", "--optimizer.learning-rate", "2e-3", *ON], True),
    (["train", "CartPole-v1", "--optimizer.learning-rate=2e-3", *ON, "yes"], True),
    (["train", "CartPole-v1", "--optimizer.learning-rate", "2e-3", *OFF], False),
    (["train", *OFF, "CartPole-v1", "--optimizer.learning-rate", "2e-3"], False),
    (["train", "--optimizer.learning-rate", "2e-3", "--normalise.rewards=false", "--", "CartPole-v1"], False),
]


@pytest.mark.parametrize(("words", "on"), SWITCHED, ids=lambda x: " ".join(x) if isinstance(x, list) else str(x))
def test_a_switch_without_a_value_is_on_and_swallows_no_other_word(words, on):
    name, found, rest = cli.resolve_command(click.Context(cli), words)
    with found.make_context(name, rest) as context:
        given = dict(context.params)
    assert given["what"] == "CartPole-v1"
    assert parse_value(given["optimizer__learning_rate"]) == 2e-3
    changes = changes_from({"normalise__rewards": given["normalise__rewards"]})
    assert find_recipe("CartPole-v1", changes).normalise.rewards is on


@pytest.mark.parametrize(
    "words",
    [
        ["train", "CartPole-v1", "--steps", "--seed", "3"],
        ["train", "CartPole-v1", "--name", "--quiet"],
        ["train", "CartPole-v1", "--seed", "1", "--steps", "--"],
        ["evaluate", "runs/one", "--episodes", "--json"],
        ["data", "make", "sorting", "--out", "--test"],
    ],
    ids=" ".join,
)
def test_no_option_takes_another_for_its_value(command, words, tmp_path):
    option, following = words[-2:] if words[-1] != "3" else words[2:4]
    code, out, err = command(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"surefoot: {option}: has no value before {following}; give one, or write {option}={following}")
    assert list(tmp_path.iterdir()) == []


def test_a_value_may_begin_with_a_dash_or_be_joined_by_an_equals_sign(surefoot):
    assert "log_std = -1.0" in surefoot("train", "CartPole-v1", "--network.log-std", "-1", "--dry-run")
    assert "log_std = -1.0" in surefoot("train", "CartPole-v1", "--network.log-std=-1", "--dry-run")


def test_every_field_says_what_it_means():
    for name, described in recipe_fields():
        if "." in name or name not in ("rollout", "network"):
            assert described.meaning, name


def test_a_listener_that_goes_away_ends_no_training(tmp_path):
    """As in ``surefoot train … | head -1``: both seeds are trained, and the exit code is that of a success."""
    words = ["train", "CartPole-v1", "--steps", "512", "--seeds", "2", "--quiet", "--run-dir", str(tmp_path / "runs")]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "surefoot", *words], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=240
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["seed1", "seed2"]


def test_what_an_error_quotes_can_not_move_the_cursor(capsys):
    with pytest.raises(SystemExit):
        fail("it said \x1b[2J\n\u202e", 2)
    assert capsys.readouterr().err == "surefoot: it said \\x1b[2J \\u202e\n"


@pytest.mark.parametrize(
    "words",
    [
        ("train", "CartPole-v1", "--seeds", "1000000000000"),
        ("compare-algorithms", "CartPole-v1", "--algorithms", "A2C,PPO_CLIP", "--seeds", "1000000000000"),
        ("ladder", "CartPole-v1", "--batches", "1000000000000"),
        ("evaluate", "run", "--episodes", "1000000000000"),
        ("compare-algorithms", "CartPole-v1", "--algorithms", "A2C,PPO_CLIP", "--jobs", "1000000000000"),
    ],
    ids=" ".join,
)
def test_every_count_on_the_command_line_has_an_upper_bound(words, command):
    code, _, err = command(*words)
    assert code == 2
    assert "is not in the range" in err
    assert err.count("\n") == 1
