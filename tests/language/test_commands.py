"""The commands for language: output, and errors in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import surefoot
from surefoot.errors import SurefootError
from surefoot.files import read_toml
from surefoot.language.analysis.evaluate import with_evaluation_rows
from surefoot.language.language_model import LanguageModel
from surefoot.recipes.reading import make_recipe
from surefoot.store.checkpoint import load_checkpoint
from surefoot.store.folder import checkpoint_to_load
from surefoot.store.metrics import read_metrics

from .tiny import rejected

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    """Three small runs, each from the one before: ``sft``, ``reward`` and ``ppo``."""
    root = tmp_path_factory.mktemp("runs")
    texts = ("i love it.", "it is fine.", "no.")
    rows = ({"prompt": "old bike: ", "completion": text, "chosen": text, "rejected": "bad"} for text in texts * 4)
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(root / "rows.jsonl"), "held_out": str(root / "rows.jsonl"), "max_length": 64}
    batches = {"data": {**data, "batch": 6}, "steps": 12}
    surefoot.train("sft", run_dir=root / "sft", model=str(folders["llama"]), **batches)
    surefoot.train("reward", run_dir=root / "reward", model=str(root / "sft"), **batches)
    terms = {"terms": [{"model": str(root / "reward")}], "gold": "surefoot.language.tasks.reviews:gold"}
    sampling = {"prompts": 4, "max_tokens": 6}
    surefoot.train(
        "language", run_dir=root / "ppo", model=str(root / "sft"), data=data, steps=8, reward=terms, sampling=sampling
    )
    return root


def test_generate_answers_from_a_run_a_folder_and_a_file(command: Command, runs: Path) -> None:
    for model in (runs / "ppo", runs / "sft" / "model"):
        code, out, err = command("generate", str(model), "--prompt", "old bike: ", "--samples", "3", "--max-tokens", "5")
        assert (code, err) == (0, "")
        assert len([line for line in out.splitlines() if line.startswith("old bike: ")]) == 3
    words = ("generate", str(runs / "ppo"), "--file", str(runs / "rows.jsonl"), "--json", "--greedy", "--max-tokens", "5")
    results = [json.loads(line) for line in command(*words)[1].splitlines()]
    assert len(results) == 12
    assert {row["prompt"] for row in results} == {"old bike: "}
    assert len({row["response"] for row in results}) == 1, "greedy answers to one prompt are one"


def test_generate_prints_what_is_finished_before_a_signal_and_batches_change_no_response(
    command: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("generate", str(runs / "ppo"), "--file", str(runs / "rows.jsonl"), "--samples", "2", "--max-tokens", "5")
    whole = command(*words)
    monkeypatch.setattr("surefoot.cli.language.AT_ONCE", 6)
    assert command(*words) == whole
    monkeypatch.setattr(LanguageModel, "generate_ended", Mock(side_effect=[(["finished"] * 6, []), KeyboardInterrupt()]))
    code, out, err = command(*words)
    assert (code, out.count("finished"), err) == (130, 6, "\nsurefoot: stopped\n")


def test_evaluate_of_an_online_run_compares_it_with_its_start(command: Command, runs: Path) -> None:
    code, out, _ = command("evaluate", str(runs / "ppo"), "--json")
    report = json.loads(out)
    assert code == 0
    assert report["start"]["kl"] == pytest.approx(0, abs=1e-6), "the start is the reference"
    assert {"reward", "gold", "kl", "length", "eos_rate", "distinct_2"} <= set(report["trained"])
    assert 0 <= report["win_rate_gold"] <= 1
    assert len(report["samples"]) == 12
    assert report["calibration"]["first"]["kind"] == "returns"
    code, table, _ = command("evaluate", str(runs / "ppo"), "--rows", "4")
    assert code == 0
    assert "explained variance" in table
    assert "wins by gold" in table
    assert "on 4 held-out prompts" in table


@pytest.mark.parametrize(("run", "key"), [("sft", "held_out_loss"), ("reward", "held_out_accuracy")])
def test_evaluate_of_supervised_runs_shows_their_start_beside_them(run: str, key: str, command: Command, runs: Path) -> None:
    code, out, _ = command("evaluate", str(runs / run), "--json")
    assert code == 0
    report = json.loads(out)
    assert report["start"][key] > 0
    assert report["held_out_loss"] < report["start"]["held_out_loss"]
    assert ("samples" in report) is (run == "sft")


def test_evaluate_scores_the_answers_of_any_model_that_writes_by_a_given_reward(command: Command, runs: Path) -> None:
    reward = ("--reward", "surefoot.language.tasks.reviews:gold", "--rows", "4")
    code, out, _ = command("evaluate", str(runs / "sft"), "--json", *reward)
    assert code == 0
    report = json.loads(out)
    assert report["held_out_reward"] == sum(row["reward"] for row in report["samples"]) / 4
    assert {"prompt", "response", "start", "reward"} == set(report["samples"][0])
    assert 0 <= report["win_rate_reward"] <= 1
    code, table, _ = command("evaluate", str(runs / "sft"), *reward)
    assert "start:" in table
    assert "wins by reward" in table
    code, out, _ = command("evaluate", str(runs / "ppo"), "--json", *reward)
    assert code == 0
    assert {"reward", "gold"} <= set(json.loads(out)["start"])
    recipe = with_evaluation_rows(make_recipe(read_toml(runs / "ppo" / "config.toml")), None, 4, None, reward[1:2])
    assert [term.function for term in recipe.reward.terms] == [reward[1]]


def test_an_online_run_keeps_samples_and_logs_reward_kl_ratios_texts_and_times(runs: Path) -> None:
    """Reward and its anchor, how far θ moved, what responses are like, and where the time went."""
    story = "reward gold kl_reference kl_reference_response reference_beta kl ratio_outside clip_active ratio_min ratio_max"
    story += " ratio_at_start entropy explained_variance response_length eos_rate distinct_2 repeated without_score sampler_gap"
    story += " tokens_per_second seconds_sampling seconds_scoring seconds_collecting seconds_learning"
    files = sorted((runs / "ppo" / "samples").glob("*.jsonl"))
    assert {"prompt", "response", "reward", "gold", "kl"} <= set(json.loads(files[-1].read_text().splitlines()[0]))
    for row in read_metrics(runs / "ppo" / "metrics.jsonl"):
        assert set(story.split()) <= set(row)
        assert row["seconds_sampling"] + row["seconds_scoring"] <= row["seconds_collecting"]


def test_a_dry_run_prints_parameters_rows_and_updates_of_each_kind(command: Command, runs: Path) -> None:
    for run, message in (
        ("sft", "1.00 epochs"),
        ("reward", "updates: 12 / 6 = 2"),
        ("ppo", "4 prompts x 1 samples = 4 responses"),
    ):
        code, out, _ = command("train", str(runs / run / "config.toml"), "--dry-run")
        assert code == 0
        assert message in out


REJECTED: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("generate", "nowhere", "--prompt", "x"), ("model='nowhere'",)),
    (("generate", "RUNS/reward", "--prompt", "x"), ("kind = 'reward'", "generates no text")),
    (("generate", "RUNS/sft"), ("--prompt TEXT or --file FILE",)),
    (("train", "sft"), ("model: is missing", "model = 'pocket'")),
    (("train", "sft", "--model", "pocket"), ("data: is missing", "rows.jsonl")),
    (("train", "sft", "--data.train", "nowhere.jsonl", "--model", "pocket"), ("nowhere.jsonl",)),
    (("train", "reward", "--model", "RUNS", "--data.train", "RUNS/rows.jsonl"), ("model=",)),
    (("train", "language", "--model", "RUNS/sft", "--data.train", "RUNS/rows.jsonl"), ("reward: is missing",)),
    (("watch", "RUNS/sft"), ("has a language model and no agent",)),
    (("export", "RUNS/sft"), ("has a language model and no agent", "programs load RUN/model")),
    (("evaluate", "RUNS/sft/checkpoints/12"), ("has a language model and no agent",)),
    (("evaluate", "RUNS/reward", "--reward", "surefoot.language.tasks.reviews:gold"), ("a reward model writes none",)),
    (("ladder", "RUNS/sft/config.toml"), ("kind='sft'", "agents in environments")),
    (("evaluate", "RUNS/sft", "--data", "nowhere.jsonl"), ("nowhere.jsonl",)),
    (("evaluate", "RUNS/ppo", "--episodes", "4"), ("--episodes", "on held-out rows: --data, --rows; leave it out")),
    (("data", "make", "letters", "--out", "recipe.toml"), ("--out recipe.toml", "name a file that ends in .jsonl")),
    (("evaluate", "RUNS/sft", "--samples", "4"), ("--samples 4", "kind = 'sft'", "data accuracy")),
    (("evaluate", "RUNS/ppo", "--samples", "2"), ("neither 0 nor 1", "--threshold T")),
    (("evaluate", "RUNS/ppo", "--samples", "2", "--k", "4"), ("k=4", "1 <= k <= samples, which is 2")),
    (("evaluate", "RUNS/ppo", "--samples", "2", "--k", "1;2"), ("--k 1;2", "such as 1,4,8")),
    (("evaluate", "RUNS/ppo", "--samples", "2", "--threshold", "nan"), ("not a finite number",)),
    (("evaluate", "RUNS/ppo", "--threshold", "0.5"), ("--threshold 0.5", "add --samples N")),
    (("evaluate", "RUNS/ppo", "--after", "#"), ("--after #", "add --samples N")),
]


def test_invalid_settings_are_rejected_in_one_line(command: Command, runs: Path) -> None:
    for words, parts in REJECTED:
        rejected(command(*(word.replace("RUNS", str(runs)) for word in words)), *parts)


def test_a_checkpoint_that_would_write_outside_its_folder_is_rejected(runs: Path, tmp_path: Path) -> None:
    from surefoot.language.language_model import from_parts

    where = checkpoint_to_load(runs / "sft")
    for name in ("../escaped.json", str(tmp_path / "escaped.json"), "code.py"):
        parts = load_checkpoint(where)
        parts["model"]["tokenizer"][name] = "{}"
        with pytest.raises(SurefootError, match="never writes"):
            from_parts(parts, where)
    assert not list(tmp_path.iterdir())


def test_the_demo_rejects_unknown_options_before_it_writes(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = command("demo", "--no-anchor")
    assert (code, err) == (2, "surefoot: --no-anchor: is for the language demo; run: surefoot demo language --no-anchor\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rejected(command("demo", "language"), "needs transformers")
    assert not list(Path.cwd().iterdir())
