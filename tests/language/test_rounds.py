"""Iterated rounds: labels, training data, the starting point of each run, and exact continuation after a stop."""

import json
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from safetensors.torch import load_file

import surefoot
from surefoot.diagnostics.metrics import TIMING
from surefoot.errors import SurefootError
from surefoot.files import read_toml
from surefoot.language.data.rows import write_rows
from surefoot.language.data.sources import read_rows
from surefoot.people.log import LabelLog, Round
from surefoot.ranks import collectives
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.reading import make_recipe, to_toml
from surefoot.runs import rounds
from surefoot.runs.display import Display
from surefoot.runs.rounds import RoundsSettings, policy_before, ppo_recipe, rounds_table, run_rounds
from surefoot.store.folder import RunFolder
from surefoot.store.manifest import write_listed
from surefoot.store.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
from ranked import on_ranks

Command = Callable[..., tuple[int, str, str]]

SOURCE = """
import os, signal
from pathlib import Path

def judge(responses):
    return [sum(map(ord, text)) / 100 for text in responses]

def calm(responses):
    if Path("STOP").exists():
        os.kill(os.getpid(), signal.SIGTERM)
    return [0.0] * len(responses)

def bored(responses):
    return [0.0] * len(responses)
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [row.columns for row in read_rows(path)]


@pytest.fixture
def start(tmp_path: Path, folders: dict[str, Path]) -> Path:
    """A folder with a reward model trained on six pairs, a PPO recipe that uses it, and a judge."""
    (tmp_path / "judge.py").write_text(SOURCE)
    pairs = [{"prompt": f"{i} ", "chosen": "aeiou", "rejected": "bcdfg"} for i in range(6)]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    write_rows(tmp_path / "prompts.jsonl", ({"prompt": f"{i} says "} for i in range(40)))
    data = {"train": str(tmp_path / "pairs.jsonl"), "max_length": 32, "batch": 3}
    surefoot.train("reward", run_dir=tmp_path / "reward", model=str(folders["llama"]), steps=6, data=data)
    (tmp_path / "ppo.toml").write_text(
        f"""
        kind = "language"
        model = "{folders["llama"]}"
        steps = 16
        seed = 5
        [data]
        train = "{tmp_path}/prompts.jsonl"
        held_out = "{tmp_path}/prompts.jsonl"
        max_length = 16
        [evaluation]
        rows = 8
        [sampling]
        prompts = 8
        max_tokens = 6
        [reward]
        terms = [{{ model = "{tmp_path}/reward" }}, {{ function = "{tmp_path}/judge.py:calm" }}]
        gold = "{tmp_path}/judge.py:judge"
        missing_eos = "none"
        [critic]
        own_model = true
        start = "{tmp_path}/reward"
        [optimizer]
        learning_rate = 1e-3
        """
    )
    return tmp_path


def recipe_of(start: Path, **changes: Any) -> LanguageRecipe:
    return make_recipe({**read_toml(start / "ppo.toml"), **changes})


def timeless(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMING} for row in read_metrics(run / "metrics.jsonl")]


@pytest.mark.slow
def test_rounds_continue_each_other_and_an_interrupted_round_resumes_exactly(start: Path, command: Command) -> None:
    words = ("rounds", "ppo.toml", "--rounds", "2", "--pairs", "20", "--name", "r", "--quiet", "--json")
    code, out, err = command(*words)
    assert code == 0, err
    report = json.loads(out)["rounds"]
    folder = start / "runs" / "r"
    first, second = folder / "round-1", folder / "round-2"
    assert [one["round"] for one in report] == [1, 2]
    assert report[0]["kl"]["start"] == pytest.approx(0, abs=1e-5)
    assert report[1]["kl"]["start"] == pytest.approx(report[0]["kl"]["trained"], abs=1e-4), (
        "round 2 continues the last policy; KL is measured from the first one"
    )
    assert report[1]["gold"]["start"] == report[0]["gold"]["trained"]
    old, new = ([json.dumps(row) for row in lines(at / "pairs.jsonl")] for at in (first, second))
    given = [json.dumps(row) for row in lines(start / "pairs.jsonl")]
    assert set(given) < set(old) < set(new), "the first pairs, and those of earlier rounds"
    for row in map(json.loads, set(new) - set(given)):
        assert sum(map(ord, row["chosen"])) >= sum(map(ord, row["rejected"])), "labelled by the judge"
    labels = [one["labels"] for one in report]
    assert labels == [len(lines(at / "queue.jsonl")) for at in (first, second)]
    question = [{row["prompt"] for row in lines(at / "queue.jsonl")} for at in (first, second)]
    assert not question[0] & question[1], "prompts are not reused while unused ones remain"
    steps = read_toml(second / "reward" / "config.toml")["steps"]
    assert steps == 6 + sum(labels), "one pass, as for the first reward model"

    whole = {run: timeless(second / run) for run in ("reward", "ppo")}
    weights = load_file(second / "ppo" / "model" / "model.safetensors")
    shutil.rmtree(second)
    Path("STOP").touch()
    code, _, err = command(*words)
    assert code == 130
    assert "repeat the command to continue" in err
    assert not (second / "round.json").exists()
    started, recipe = (second / "ppo" / "config.toml").read_text(), (start / "ppo.toml").read_text()
    (start / "ppo.toml").write_text(recipe.replace("missing_eos", "deadline = 90\n        missing_eos"))
    with closing(RunFolder.open(second / "ppo")):
        assert "ppo: in use by another process" in command(*words)[2]
    assert (second / "ppo" / "config.toml").read_text() == started, "the process that holds the run keeps its config"
    (start / "ppo.toml").write_text(recipe)
    Path("STOP").unlink()
    code, again, _ = command(*words)
    assert code == 0
    assert json.loads(again)["rounds"] == report
    assert {run: timeless(second / run) for run in ("reward", "ppo")} == whole
    for name, actual in load_file(second / "ppo" / "model" / "model.safetensors").items():
        assert torch.equal(actual, weights[name]), name

    code, shown, _ = command(*words[:-1])
    assert code == 0
    assert rounds_table(report) in shown
    code, _, err = command(*words, "--noise", "1")
    assert code == 2
    assert "was started with other settings (noise: 0.0 -> 1.0); repeat those, or choose another --name" in err


@pytest.mark.slow
def test_rounds_on_two_ranks_match_one_process_resume_and_report_errors(start: Path) -> None:
    """Rank 0 labels and evaluates. PPO minibatches differ from one process because each rank has its own rows."""
    plan = RoundsSettings(recipe_of(start), f"{start}/judge.py:judge", pairs=20)

    def body(folder: Path, rounds: int) -> Callable[[int], Any]:
        return lambda rank: run_rounds(plan, folder, rounds, lambda recipe, run: Display())

    (alone,) = run_rounds(plan, start / "one", 1, lambda recipe, run: Display())
    first, second = on_ranks(2, body(start / "two", 1), start / "results")
    assert first == second
    assert lines(start / "two" / "round-1" / "pairs.jsonl") == lines(start / "one" / "round-1" / "pairs.jsonl")
    for name in ("reward", "gold", "kl", "length"):
        assert first[0][name]["start"] == pytest.approx(alone[name]["start"], rel=1e-3, abs=1e-4), name
    assert first[0]["predicted"] == alone["predicted"]
    (start / "two" / "round-1" / "round.json").unlink()
    assert on_ranks(2, body(start / "two", 1), start / "again") == [first, second]
    plan = replace(plan, judge=f"{start}/judge.py:bored")
    for rank, message in enumerate(on_ranks(2, body(start / "bored", 1), start / "errors")):
        assert message.startswith("SurefootError: " if rank == 0 else "SurefootError: rank 0: ")
        assert "the judge prefers an answer in none of 20 pairs" in message


def test_round_ppo_uses_last_policy_new_reward_model_and_first_reference(start: Path) -> None:
    plan, folder = RoundsSettings(recipe_of(start), "j:j"), start / "r"
    for number, model in ((1, plan.recipe.model), (3, folder / "round-2/ppo")):
        made = ppo_recipe(plan, folder, number)
        new = str(folder / f"round-{number}" / "reward")
        assert made.model == str(model) == str(policy_before(plan, folder, number))
        assert [term.model for term in made.reward.terms] == [new, None]
        assert made.critic.start == new
        assert made.reference.model == plan.recipe.model
        assert made.seed == 5 + number - 1
        rest = {"model", "reward", "critic", "reference", "seed"}
        assert made.model_dump(exclude=rest) == plan.recipe.model_dump(exclude=rest)


def test_refreshed_reward_model_is_merged_even_if_the_first_is_an_adapter(
    start: Path, folders: dict[str, Path], command: Command
) -> None:
    """A round needs a full model; the error about an unmerged first model says how to make one."""
    rows = {"train": str(start / "pairs.jsonl"), "max_length": 32, "batch": 3}
    settings = {"model": str(folders["llama"]), "steps": 6, "data": rows, "adapter": {"rank": 2, "merge": False}}
    surefoot.train("reward", run_dir=start / "thin", **settings)
    fields = {"reward": {"terms": [{"model": str(start / "thin")}]}, "critic": {}}
    with pytest.raises(SurefootError, match=r"has only an adapter.*surefoot merge .*thin --out .*thin/model"):
        RoundsSettings(recipe_of(start, **fields), "j:j")
    assert command("merge", str(start / "thin"), "--out", str(start / "thin" / "model"))[0] == 0
    (start / "ppo.toml").write_text(to_toml(recipe_of(start, **fields)))
    words = ("--judge", "judge.py:judge", "--rounds", "1", "--pairs", "20", "--name", "r", "--quiet", "--json")
    code, out, err = command("rounds", "ppo.toml", *words)
    assert code == 0, err
    assert json.loads(out)["rounds"][0]["round"] == 1
    assert (start / "runs" / "r" / "round-1" / "reward" / "model").is_dir()


@pytest.mark.parametrize("spelled", ["sub/../reward", "link", "reward/model"])
def test_critic_start_follows_the_reward_model_for_any_spelling_of_its_path(
    spelled: str, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(start)
    (start / "sub").mkdir()
    (start / "link").symlink_to(start / "reward")
    plan, folder = RoundsSettings(recipe_of(start, critic={"own_model": True, "start": spelled}), "j:j"), start / "r"
    assert ppo_recipe(plan, folder, 2).critic.start == str(folder / "round-2" / "reward")
    other = recipe_of(start, critic={"own_model": True, "start": "elsewhere"})
    assert ppo_recipe(RoundsSettings(other, "j:j"), folder, 2).critic.start == "elsewhere"


def test_judge_obeys_the_reward_deadline(start: Path, command: Command) -> None:
    source = "\ndef slow(responses):\n    import time\n    time.sleep(0.6)\n    return judge(responses)\n"
    (start / "judge.py").write_text(SOURCE + source)
    (start / "ppo.toml").write_text(
        (start / "ppo.toml").read_text().replace("missing_eos", "deadline = 0.3\n        missing_eos")
    )
    words = ("--rounds", "1", "--pairs", "20", "--name", "r", "--quiet", "--judge", "judge.py:slow")
    code, _, err = command("rounds", "ppo.toml", *words)
    assert code == 2
    assert "--judge='judge.py:slow': took longer than reward.deadline=0.3 s for 20 responses" in err
    assert "raise reward.deadline, then repeat the command" in err


def test_rounds_are_for_one_command_at_a_time(start: Path) -> None:
    plan = RoundsSettings(recipe_of(start), f"{start}/judge.py:judge", pairs=10)
    (start / "rounds").mkdir()
    (start / "rounds" / ".rounds.json.1-2.tmp").write_text("{")  # left by a kill
    with filelock.FileLock(start / "rounds" / ".lock"), pytest.raises(SurefootError, match="in use by another process"):
        run_rounds(plan, start / "rounds", 1, lambda recipe, run: Display())
    assert not (start / "rounds" / "round-1").exists()


@pytest.mark.parametrize("text", ['{"round": 1, "labels": "x"}', "[]"])
def test_a_damaged_report_of_a_round_is_one_line(text: str, start: Path) -> None:
    plan = RoundsSettings(recipe_of(start), f"{start}/judge.py:judge", pairs=10)
    (start / "rounds" / "round-1").mkdir(parents=True)
    (start / "rounds" / "rounds.json").write_text(json.dumps(plan.to_json()))
    write_listed(start / "rounds" / "round-1" / "round.json", text)
    with pytest.raises(SurefootError, match=r"round\.json: .*; remove this file"):
        run_rounds(plan, start / "rounds", 1, lambda recipe, run: Display())


def test_with_people_as_judge_a_command_samples_waits_for_labels_and_goes_on_from_them(start: Path, command: Command) -> None:
    words = ("rounds", "ppo.toml", "--rounds", "1", "--pairs", "12", "--judge", "people", "--name", "r", "--quiet")
    here = start / "runs" / "r" / "round-1"
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    assert "label them with: surefoot label runs/r, then repeat this command" in out
    queue = (here / "queue.jsonl").read_bytes()
    assert command(*words)[0] == 0
    assert (here / "queue.jsonl").read_bytes() == queue, "sampled once"
    at = Round(here)
    label_all(here, "ann", lambda key: "equal" if key == "2" else "left")
    code, out, err = command(*words)
    assert code == 0, err
    assert "warning: ann chose the left answer in" not in out, "12 labels prove nothing yet"
    rows, labels = lines(here / "pairs.jsonl"), len(at.queue.pairs)
    assert len(rows) == 2 * (6 + labels), "an equal pair has both orders, each with half the weight of another label"
    assert read_toml(here / "reward" / "config.toml")["steps"] == 6 + labels
    assert json.loads((here / "agreement.json").read_text())["model"]["of"] == labels - 1
    for bad, what in (
        (("--noise", "1"), "noise=1: is for the scores of a judge"),
        (("--stop-at-chance",), "stop_at_chance: False -> True"),
    ):
        code, _, err = command(*words, *bad)
        assert (code, err.count("\n"), what in err) == (2, 1, True), err


def label_all(here: Path, who: str, choice: Callable[[str], str] = lambda key: "left") -> None:
    """What a person does on the page."""
    at = Round(here)
    with closing(LabelLog(here / "labels" / f"{who}.jsonl", at.queue, who)) as log:
        for key in at.queue.order(who):
            log.choose(key, choice(key), 800)


def test_a_round_whose_labels_are_predicted_by_chance_stops_before_training_if_asked_to(start: Path) -> None:
    plan, printed = RoundsSettings(recipe_of(start), "people", pairs=4, stop_at_chance=True), []
    here = start / "r" / "round-1"
    assert run_rounds(plan, start / "r", 1, lambda recipe, run: Display(), printed.append) == []
    at = Round(here)
    for who, better in (("ann", "a"), ("bob", "b")):  # who agree on nothing, so any model predicts half
        label_all(
            here,
            who,
            lambda key, who=who, better=better: "left" if at.queue.b_is_left(key, who) == (better == "b") else "right",
        )
    count = len(at.queue.pairs)
    for _ in range(2):
        with pytest.raises(SurefootError, match=rf"^round 1: .* predicted 50% of {count} newly labelled pairs .*; label more"):
            run_rounds(plan, start / "r", 1, lambda recipe, run: Display(), printed.append)
    assert f"the reward model predicted 50% of {count} newly labelled pairs" in "".join(printed), "a finding"
    assert not (here / "reward").exists()


def test_waiting_for_labels_is_no_exchange_in_which_other_ranks_would_give_up(
    start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, printed, waited = RoundsSettings(recipe_of(start), "people", pairs=4), [], []

    def sleep(seconds: float, real: Any = time.sleep) -> None:
        if seconds != rounds.POLL:
            real(seconds)
            return
        waited.append(collectives._alone)
        if len(waited) == 3:
            label_all(start / "r" / "round-1", "ann")

    monkeypatch.setattr(rounds.time, "sleep", sleep)
    (report,) = run_rounds(plan, start / "r", 1, lambda recipe, run: Display(), printed.append, wait=True)
    assert waited == [False] * 3, "each look at the labels is an exchange of its own"
    assert report["labels"] == len(Round(start / "r" / "round-1").queue.pairs)
    assert [line.partition("; ")[2] for line in printed if "are labelled" in line] == [
        f"label them with: surefoot label {start / 'r'}; this command goes on when all are"
    ]


def test_a_function_that_gets_both_answers_fills_the_log_of_people(start: Path, command: Command) -> None:
    source = "def longer(first, second, prompts):\n    assert all(p.endswith('says ') for p in prompts)\n    return RETURN\n"
    pick = "['equal' if len(a) == len(b) else 'first' if len(a) > len(b) else 'second' for a, b in zip(first, second)]"
    words = ("rounds", "ppo.toml", "--rounds", "1", "--pairs", "12", "--judge", "both.py:longer", "--quiet", "--name")
    for name, returned, what in (
        ("r0", "['left'] * len(first)", 'must return a list of 12 entries, each "first", "second", "equal" or None'),
        ("r1", "first.nothing", "raised AttributeError"),
        ("r2", pick, ""),
    ):
        (start / "both.py").write_text(source.replace("RETURN", returned))
        code, _, err = command(*words, name)
        assert (code, what in err) == (2 if what else 0, True), err
    at = Round(start / "runs" / "r2" / "round-1")
    better = {label.key: label.preference for label in at.labels}
    for number, pair in enumerate(at.queue.pairs, 1):
        size = len(pair["a"]) - len(pair["b"])
        assert better[str(number)] == ("equal" if size == 0 else "a" if size > 0 else "b")


def test_recipes_that_rounds_cannot_refresh_are_rejected(start: Path) -> None:
    for changes, message in (
        ({"reward": {"terms": [{"function": "a:b"}]}}, "this recipe names 0"),
        ({"reward": {"terms": [{"model": "nowhere"}]}}, "is not a run of kind 'reward'"),
        ({"model": "pocket"}, "model='pocket'"),
        ({"adapter": {"merge": False}}, "adapter.merge=false: each round starts from the merged model"),
        ({"adapter": {}}, "critic.start=.*every round has another base; unset it"),
    ):
        with pytest.raises(SurefootError, match=message):
            RoundsSettings(recipe_of(start, **changes), "j:j")


def test_invalid_commands_print_a_one_line_error(start: Path, command: Command) -> None:
    text = (start / "ppo.toml").read_text()
    (start / "nobody.toml").write_text(text.replace("gold =", "# gold ="))
    cases = (
        (("nobody.toml",), "--judge: nothing labels the pairs"),
        (("reward/config.toml",), "is of kind 'reward'"),
        (("sft",), "name a .toml"),
        (("ppo.toml", "--name", "b", "--pairs", "20", "--judge", "judge.py:bored"), "prefers an answer in none of 20 pairs"),
        (("ppo.toml", "--name", "c", "--judge", "nowhere.py:judge"), "nowhere.py"),
    )
    for words, message in cases:
        code, _, err = command("rounds", *words)
        assert (code, err.count("\n")) == (2, 1), err
        assert message in err
    kept = {path.name for path in (start / "runs").iterdir()} if (start / "runs").exists() else set()
    assert kept <= {"b"}, "only the judge that compares the pairs needs a folder"
    code, _, err = command("rounds", "ppo.toml", "--run-dir", str(start / "reward"))
    assert (code, "contains a run or other files; choose another --name" in err) == (2, True)
