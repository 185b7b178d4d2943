"""The commands: options, output and exit codes."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from functools import partial

import click
import pytest

from surefoot.cli import lasting_imports
from surefoot.cli.main import COMMANDS, GROUPS, cli, fail
from surefoot.cli.options import changes_from
from surefoot.demos import command_here
from surefoot.recipes.control import with_class
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import make_recipe, merge_tables, parse_flag
from surefoot.terminal import LOG_COLUMNS


def test_the_inspector_imports_no_recipes():
    code = "import sys; from surefoot.cli.main import cli; cli.main(['inspect', '--help'], standalone_mode=False); "
    code += "import surefoot.inspector.server; assert not {'torch', 'gymnasium', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_short_run_imports_no_compiler_and_no_tracker_and_leaves_its_imports_to_the_end_of_the_process(tmp_path):
    code = "import gc, sys; from surefoot.cli.main import cli; "
    code += (
        f"cli.main(['train', 'CartPole-v1', '--steps', '256', '--run-dir', {str(tmp_path / 'run')!r}], standalone_mode=False); "
    )
    code += "heavy = {'torch._dynamo', 'torch._inductor', 'sympy', 'tensorboard', 'pandas', 'transformers', 'matplotlib'}; "
    code += "assert not heavy & set(sys.modules); assert gc.isenabled() and gc.get_freeze_count() > 100_000"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_ctrl_c_during_the_imports_leaves_no_traceback(tmp_path):
    (tmp_path / "click.py").write_text("import signal, time; signal.raise_signal(signal.SIGINT); time.sleep(9)")
    where = {"env": {**os.environ, "PYTHONPATH": str(tmp_path)}, "capture_output": True, "check": False}
    usual = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it
    done = subprocess.run([sys.executable, "-m", "surefoot"], preexec_fn=usual, **where)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_a_program_that_calls_the_command_keeps_its_own_objects_collectable():
    import torch  # noqa: F401

    before = gc.get_freeze_count()
    with lasting_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_every_command_exists_under_its_own_name():
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert command.name == name
    assert cli.get_command(click.Context(cli), "no-such") is None


def test_a_command_group_lists_its_commands(command):
    for group in ((), ("data",)):
        code, out, err = command(*group)
        assert (code, out) == (2, "")
        assert err.startswith("Usage: surefoot")
        assert len(err.splitlines()) > 6


def test_train_then_evaluate_then_resume(surefoot, tmp_path):
    words = "train CartPole-v1 --steps 512 --name one --seed 3 --objective.gae-lambda 0.9 --evaluation.every 256"
    out = surefoot(*words.split())
    assert re.search(r"512 steps \(first [\d.]+ at 256, best [\d.]+ at [\d,]+\) -> runs/one", out)
    recipe = tomllib.loads((tmp_path / "runs" / "one" / "config.toml").read_text())
    assert recipe["objective"]["gae_lambda"] == 0.9
    assert recipe["seed"] == 3
    result = json.loads(surefoot("evaluate", "runs/one", "--episodes", "3", "--seed", "5", "--json"))
    assert set(result) == {"mean_return", "std_return", "returns", "lengths", "episodes", "seed", "checkpoint", "info", "note"}
    assert result["mean_return"] == sum(result["returns"]) / 3
    assert result["returns"] == [float(n) for n in result["lengths"]], "CartPole pays 1 per step"
    assert result == json.loads(surefoot("evaluate", "runs/one", "--episodes", "3", "--seed", "5", "--json"))
    assert "runs/one/checkpoints/512" in surefoot("evaluate", "runs/one", "--episodes", "1", "--checkpoint", "last")
    assert "1,024 steps" in surefoot("resume", "runs/one", "--steps", "1024", "--quiet")


def test_the_demo_prints_a_command_that_the_shell_can_run(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [".venv/bin/surefoot", "demo"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_here() == ".venv/bin/surefoot", "make demo does not activate what it makes"
    (tmp_path / "surefoot").touch(mode=0o755)
    assert command_here() == "surefoot"
    monkeypatch.setattr(sys, "argv", ["surefoot/__main__.py", "demo"])
    monkeypatch.setenv("PATH", "")
    assert command_here() == "surefoot"


def test_long_result_lines_are_wrapped(surefoot, tmp_path):
    run = ("--steps", "64", "--rollout.environments", "2", "--rollout.steps", "32", "--evaluation.episodes", "1")
    out = surefoot("train", "CartPole-v1", *run, "--name", "n" * 80)
    assert max(map(len, out.splitlines())) <= LOG_COLUMNS
    assert " ".join(out.split()).endswith(f"steps -> runs/{'n' * 80}")


def test_several_seeds_are_all_checked_before_the_first_trains(command, tmp_path):
    taken = tmp_path / "runs" / "many-seed2"
    taken.mkdir(parents=True)
    (taken / "notes.txt").touch()
    code, _, err = command("train", "CartPole-v1", "--steps", "256", "--seeds", "2", "--name", "many", "--quiet")
    assert (code, "many-seed2: contains other files (notes.txt)" in err) == (2, True), err
    assert not (tmp_path / "runs" / "many-seed1").exists()
    code, _, err = command("train", "CartPole-v1", "--steps", "256", "--seeds", "2", "--seed", str(2**53), "--quiet")
    assert (code, "--seeds=2: the last seed would be above" in err) == (2, True), err


def test_generated_names_never_collide(surefoot, tmp_path):
    for _ in range(2):
        surefoot("train", "CartPole-v1", "--steps", "256", "--quiet")
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["cartpole-v1-ppo_clip-1", "cartpole-v1-ppo_clip-1-2"]


def test_a_dry_run_prints_a_recipe_that_can_be_run(surefoot, tmp_path):
    out = surefoot("train", "CartPole-v1", "--dry-run", "--rollout.environments", "4")
    assert "# batch: 4 environments x 32 steps = 128 steps" in out
    assert "# iterations: 100,000 / 128 = 782" in out
    assert "# parameters: 9,155 in total, 4,545 of them in a separate critic" in out
    (tmp_path / "mine.toml").write_text(out)
    assert surefoot("train", "mine.toml", "--dry-run").splitlines() == [
        line for line in out.splitlines() if not line.startswith("# preset cartpole: ")
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.toml"]


def test_the_config_of_a_run_trains_the_same_run_again(surefoot, tmp_path):
    surefoot("train", "CartPole-v1", "--steps", "256", "--name", "a", "--quiet")
    surefoot("train", "runs/a/config.toml", "--name", "b", "--quiet")
    assert (tmp_path / "runs/a/config.toml").read_text() == (tmp_path / "runs/b/config.toml").read_text()
    weights = [(tmp_path / f"runs/{name}/checkpoints/256/agent.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]


def test_list_names_recipes_algorithms_and_ids(surefoot):
    out = surefoot("list")
    for word in ("cartpole", "mujoco", "HalfCheetah-v5", "PPO_CLIP", "REINFORCE", "Acrobot-v1", "tensor/CartPole-v1"):
        assert word in out
    assert max(map(len, out.splitlines())) <= LOG_COLUMNS


def test_the_arithmetic_of_trpo_separates_policy_and_critic(surefoot, tmp_path):
    out = surefoot("train", "CartPole-v1", "--algorithm", "TRPO", "--dry-run")
    assert "# updates of the critic: 20 epochs x 1 minibatches = 20 per iteration" in out
    assert "# updates of the policy: 1 natural step per iteration on all 256 steps: 10 + 1 Fisher-vector products" in out
    assert f"# total updates: {391 * 21:,}" in out


def test_flags_are_read_as_toml():
    texts = {"0.9": 0.9, "3": 3, "true": True, "[64, 32]": [64, 32], "none": "none", "PPO_CLIP": "PPO_CLIP"}
    assert {text: parse_flag(text) for text in texts} == texts


ON, OFF = ["--normalise.rewards"], ["--normalise.rewards", "false"]
BOOLEANS = [
    (["train", *ON, "--optimizer.learning-rate", "2e-3", "CartPole-v1"], True),
    (["train", "--optimizer.learning-rate", "2e-3", *ON, "CartPole-v1"], True),
    (["train", "CartPole-v1", "--optimizer.learning-rate", "2e-3", *ON], True),
    (["train", "CartPole-v1", "--optimizer.learning-rate=2e-3", *ON, "yes"], True),
    (["train", "CartPole-v1", "--optimizer.learning-rate", "2e-3", *OFF], False),
    (["train", *OFF, "CartPole-v1", "--optimizer.learning-rate", "2e-3"], False),
    (["train", "--optimizer.learning-rate", "2e-3", "--normalise.rewards=false", "--", "CartPole-v1"], False),
]


def params_of(words):
    name, resolved, rest = cli.resolve_command(click.Context(cli), words)
    with resolved.make_context(name, rest) as context:
        return dict(context.params)


def test_a_boolean_option_without_a_value_is_on_and_takes_no_other_word():
    for words, on in BOOLEANS:
        params = params_of(words)
        assert params["what"] == "CartPole-v1"
        assert parse_flag(params["optimizer__learning_rate"]) == 2e-3
        changes = changes_from({"normalise__rewards": params["normalise__rewards"]})
        assert find_recipe("CartPole-v1", changes).normalise.rewards is on, words


@pytest.mark.parametrize("task_first", [True, False])
def test_an_option_that_is_a_boolean_or_a_list_takes_either(task_first):
    for words, value in ((['["arm"]'], ("arm",)), (["arm,leg"], ("arm", "leg")), ([], True), (["no"], False)):
        option, task = ["--normalise.observations", *words], ["CartPole-v1"]
        params = params_of(["train", *(task + option if task_first else option + task)])
        assert params["what"] == "CartPole-v1"
        changes = changes_from({"normalise__observations": params["normalise__observations"]})
        assert find_recipe("CartPole-v1", changes).normalise.observations == value


def test_an_option_for_a_list_of_names_takes_bare_words():
    start = {"model": "m", "data": {"train": "rows.jsonl"}, "reward": {"terms": "file.py:score"}}
    for flag, word, values in (
        ("offload", "critic,reference", ("critic", "reference")),
        ("adapter__targets", "q_proj, v_proj", ("q_proj", "v_proj")),
        ("adapter__targets", "all-linear", "all-linear"),
        ("sampling__stop", "one, two", ("one, two",)),
        ("trackers", "tensorboard,wandb", ("tensorboard", "wandb")),
    ):
        own = {"critic": {"own_model": True}} if flag == "offload" else {}
        recipe = make_recipe({"kind": "language", **merge_tables(start | own, changes_from({flag: word}))})
        for part in flag.split("__"):
            recipe = getattr(recipe, part)
        assert recipe == values


def test_an_option_never_takes_another_option_as_its_value(command, tmp_path):
    for words in (
        ["train", "CartPole-v1", "--name", "--quiet"],
        ["train", "CartPole-v1", "--seed", "1", "--steps", "--"],
        ["data", "make", "sorting", "--out", "--test"],
    ):
        option, following = words[-2:]
        code, out, err = command(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"surefoot: {option}: has no value before {following}; give one, or write {option}={following}")
    assert list(tmp_path.iterdir()) == []


def test_a_value_may_begin_with_a_dash_or_be_joined_by_an_equals_sign(surefoot):
    assert "log_std = -1.0" in surefoot("train", "CartPole-v1", "--network.log-std", "-1", "--dry-run")
    assert "log_std = -1.0" in surefoot("train", "CartPole-v1", "--network.log-std=-1", "--dry-run")


def test_training_survives_a_closed_pipe(tmp_path):
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


def test_errors_make_control_characters_visible(capsys):
    with pytest.raises(SystemExit):
        fail("it said \x1b[2J\n\u202e", 2)
    assert capsys.readouterr().err == "surefoot: it said \\x1b[2J \\u202e\n"


ENVIRONMENT = """
import gymnasium as gym


class Coin(gym.Env):
    observation_space, action_space = gym.spaces.Discrete(1), gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, float(action), True, False, {}
"""


def test_a_file_with_one_environment_class_needs_no_name_and_its_run_is_found_from_folders_below(surefoot, command, tmp_path):
    (tmp_path / "coin.py").write_text(ENVIRONMENT + "\n\nclass Helper:\n    pass\n")
    short = ("--steps", "64", "--rollout.environments", "2", "--rollout.steps", "32", "--evaluation.episodes", "1")
    surefoot("train", "coin.py", *short, "--name", "coin", "--quiet")
    assert tomllib.loads((tmp_path / "runs/coin/config.toml").read_text())["task"] == "coin.py:Coin"
    (tmp_path / "notes" / "deep").mkdir(parents=True)
    os.chdir(tmp_path / "notes" / "deep")
    assert "over 2 greedy episodes" in surefoot("evaluate", "coin", "--episodes", "2")
    assert f"ls {tmp_path}/notes/deep" in command("evaluate", "coins")[2], "the error names the folder"


def test_a_file_with_no_or_several_environment_classes_is_rejected_and_not_run(command, tmp_path):
    for text, why in {
        "raise SystemExit(7)": "no class with the methods reset and step; name a class or function, as in 'x.py:make'",
        ENVIRONMENT + ENVIRONMENT.replace("Coin", "Die"): "(Coin, Die); name a class or function, as in 'x.py:Coin'",
        ENVIRONMENT + "class Die(Coin):\n    pass": "(Coin, Die)",
        ENVIRONMENT + "def make():\n    return TimeLimit(Coin(), 9)": "(Coin, make); name a class or function, as in",
        "class": "SyntaxError",
    }.items():
        (tmp_path / "x.py").write_text(text)
        code, _, error = command("train", "x.py", "--steps", "64")
        assert (code, why in error, error.count("\n")) == (2, True, 1), error


def test_a_class_that_inherits_reset_and_step_is_an_environment_too(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("class Heavy(CartPoleEnv):\n    pass\n\n\nclass Settings(dict):\n    pass\n")
    assert with_class(str(path)) == f"{path}:Heavy"


def test_train_without_what_shows_two_examples_that_can_be_tried(command):
    code, out, error = command("train")
    examples = [line.split() for line in error.splitlines() if line.startswith("  surefoot ")]
    assert (code, out, len(examples)) == (2, "", 2)
    for words in examples:
        assert command(*words[1:], "--dry-run")[2].count("No such option") == 0
    assert find_recipe(examples[0][2]).task == "CartPole-v1"


def test_surefoot_alone_has_every_command_in_one_group():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)


def test_the_option_of_a_reward_model_leads_to_the_terms(command):
    for word in ("--reward.model", "--reward-model"):
        assert "Did you mean '--reward.terms'?" in command("train", "language", word, "runs/rm", "--steps", "64")[2]
