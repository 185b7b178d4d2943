"""Help pages, short flags, names of algorithms and runs, and shell completion."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from surefoot.cli.main import COMMANDS, cli
from surefoot.cli.options import ALIASES, changes_from
from surefoot.errors import SurefootError
from surefoot.recipes.fields import recipe_fields
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import make_recipe
from surefoot.store.reading import check_is_run


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_the_first_help_page_of_train_is_short_and_links_to_the_rest(command: Any) -> None:
    code, out, _ = command("train", "--help")
    assert code == 0
    assert len(out.splitlines()) < 80
    assert "--optimizer.learning-rate, --lr" in out
    assert "--sampling.stop" not in out
    assert "surefoot train --help all" in out


@pytest.mark.parametrize("kind", ["control", "language", "reward"])
def test_help_of_a_kind_lists_its_fields_and_no_others(kind: str, command: Any) -> None:
    _, out, _ = command("train", kind, "--help")
    listed = {word.rstrip(",") for line in out.splitlines() for word in line.split() if word.startswith("--")}
    aliases = {alias for names in ALIASES.values() for alias in names}
    assert listed - aliases == {flag(name) for name, _ in recipe_fields(kind) if name not in ("kind", "task")}


def test_help_of_a_kind_has_the_choices_of_that_kind_alone(command: Any) -> None:
    losses = (command("train", kind, "--help")[1].partition("--preference.loss")[2] for kind in ("dpo", "reward"))
    assert [("simpo" in loss, "bradley_terry" in loss) for loss in losses] == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("words", "kind"),
    [(("CartPole-v1", "--help"), "control"), (("sft", "--steps", "3", "-h"), "sft"), (("my.py:make", "--help"), "control")],
)
def test_help_after_a_task_is_that_of_its_kind(words: tuple[str, ...], kind: str, command: Any) -> None:
    assert command("train", *words)[1] == command("train", kind, "--help")[1]


def test_help_of_a_table_lists_its_fields_and_no_others(command: Any) -> None:
    _, out, _ = command("train", "--help", "rollout")
    listed = {word for line in out.splitlines() for word in line.split() if word.startswith("--")}
    assert listed == {flag(name) for name, _ in recipe_fields() if name.startswith("rollout.")}


def test_a_misspelled_topic_gets_one_line(command: Any) -> None:
    code, out, err = command("train", "--help", "rollot")
    assert (code, out) == (2, "")
    assert err.startswith("surefoot: --help rollot: no such topic; did you mean 'rollout'? (known: all, ")


def test_summaries_of_commands_are_not_truncated(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    _, out, _ = command("--help")
    assert out.count("...") == 1, "of [ARGS]... alone"
    text = "".join(out.split())
    for name in COMMANDS:
        found = cli.get_command(click.Context(cli), name)
        assert found is not None
        assert "".join(found.get_short_help_str(1_000).split()) in text


# ---- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["ppo", "Ppo-Clip"])
def test_algorithms_accept_all_usual_spellings(spelling: str, tmp_path: Path) -> None:
    assert make_recipe({"task": "CartPole-v1", "algorithm": spelling}).algorithm == "PPO_CLIP"
    named = find_recipe("CartPole-v1", {"algorithm": spelling})
    assert named == find_recipe("CartPole-v1", {"algorithm": "PPO_CLIP"}) == find_recipe("CartPole-v1")
    (tmp_path / "my.toml").write_text(f'task = "CartPole-v1"\nalgorithm = "{spelling}"\n')
    assert find_recipe(str(tmp_path / "my.toml")).algorithm == "PPO_CLIP"
    assert find_recipe("CartPole-v1", algorithm=spelling) == named


def test_short_flags_set_the_same_fields() -> None:
    train = cli.get_command(click.Context(cli), "train")
    assert train is not None
    for field, names in ALIASES.items():
        for name in names:
            with train.make_context("train", ["CartPole-v1", name, "0.5"]) as context:
                flags = {key: value for key, value in context.params.items() if "__" in key}
            assert find_recipe("CartPole-v1", changes_from(flags)) == find_recipe("CartPole-v1", _nested(field, 0.5))


def _nested(field: str, value: float) -> dict[str, Any]:
    table, _, key = field.partition(".")
    return {table: {key: value}}


def test_a_reward_term_may_be_a_text() -> None:
    def terms(value: Any) -> list[dict[str, Any]]:
        table = {"kind": "language", "model": "m", "data": {"train": "p"}, "reward": {"terms": value}}
        recipe: Any = make_recipe(table)
        return [term.model_dump(exclude_unset=True) for term in recipe.reward.terms]

    assert terms("my.py:length") == [{"function": "my.py:length"}]
    assert terms(["http://localhost:1/score", "runs/rm"]) == [{"url": "http://localhost:1/score"}, {"model": "runs/rm"}]
    assert terms([{"function": "a:b", "weight": 2.0}, "a:c"])[1] == {"function": "a:c"}


def test_a_run_in_runs_can_be_given_by_name(surefoot: Any, command: Any, tmp_path: Path) -> None:
    small = ("--steps", "64", "--rollout.environments", "2", "--rollout.steps", "32", "--evaluation.episodes", "0")
    surefoot("train", "CartPole-v1", *small, "--name", "cart")
    assert "checkpoint runs/cart/" in surefoot("evaluate", "cart", "--episodes", "1")
    assert "runs/cart" in surefoot("resume", "cart", "--steps", "128")
    assert surefoot("check", "cart").startswith("runs/cart: ")
    code, _, err = command("resume", "carts")
    assert code == 2
    assert err.startswith("surefoot: carts: no such run folder")
    assert "runs/next" in surefoot("train", "CartPole-v1", *small, "--start", "cart", "--name", "next")
    with pytest.raises(SurefootError, match=r"^cart: no such run folder; did you mean runs/cart\?$"):
        check_is_run(Path("cart"))
    assert command("label", "cart")[2].startswith("surefoot: runs/cart: has no pairs to label; ")
    (tmp_path / "cart").mkdir()
    code, _, err = command("resume", "cart")
    assert (code, err.startswith("surefoot: cart: has no run yet")) == (2, True), "what is here comes first"


# ---- completion -------------------------------------------------------------------------------------------------------


def completed(*words: str) -> set[str]:
    complete = ShellComplete(cli, {}, "surefoot", "_SUREFOOT_COMPLETE")
    return {item.value for item in complete.get_completions(list(words[:-1]), words[-1])}


COMPLETED = {
    ("tr",): {"train"},
    ("train", "cartp"): {"cartpole", "CartPole-v1"},
    ("train", "CartPole-v1", "--alg"): {"--algorithm"},
    ("train", "CartPole-v1", "--algorithm", "ppo_p"): {"PPO_PENALTY", "PPO_PENALTY_ADAPTIVE"},
    ("train", "CartPole-v1", "--network.activation", ""): {"tanh", "relu"},
    ("train", "CartPole-v1", "--normalise.observations", "t"): {"true"},
    ("train", "CartPole-v1", "--preset", "c"): {"cartpole"},
    ("train", "tensor/c"): {"tensor/CartPole-v1"},
    ("train", "sft", "--model", "p"): {"pocket"},
    ("resume", "ca"): {"cart"},
}


def test_completion_suggests_commands_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "cart").mkdir(parents=True)
    (tmp_path / "runs" / "cart" / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    for words, expected in COMPLETED.items():
        assert expected <= completed(*words), words


def test_fields_that_name_a_file_complete_files() -> None:
    complete = ShellComplete(cli, {}, "surefoot", "_SUREFOOT_COMPLETE")
    for flag in ("--data.train", "--reward.terms", "--start", "--model"):
        assert "file" in {item.type for item in complete.get_completions(["train", "sft", flag], "")}, flag


def test_the_shell_gets_completions_from_the_program_itself() -> None:
    """A new process, as the shell starts one at every Tab."""
    environment = {**os.environ, "_SUREFOOT_COMPLETE": "bash_complete", "COMP_WORDS": "surefoot resu", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-m", "surefoot"], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["plain,resume"])
