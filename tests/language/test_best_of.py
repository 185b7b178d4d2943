"""Best of n: the chosen responses, rows for training, and errors in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.errors import SurefootError
from surefoot.language.analysis.best_of import BestOfSettings, best_of_n, chosen_row
from surefoot.language.data import datasets as data
from surefoot.language.data.rows import write_rows
from surefoot.language.data.sources import read_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.language_model import LanguageModel
from surefoot.language.models.loading import load_model
from surefoot.language.rewards.terms import FunctionReward, load_flag_reward, parse_term

from .tiny import rejected, set_probabilities

Command = Callable[..., tuple[int, str, str]]
DRAWING = BestOfSettings(4, max_tokens=3)
REWARDS = """
def letters(responses):
    return [float(text.count("a")) for text in responses]

def codes(responses):
    return [float(sum(map(ord, text))) for text in responses]

def same(responses):
    return [1.0] * len(responses)
"""


@pytest.fixture
def writer(folders: dict[str, Path]) -> LanguageModel:
    """Says a (0.4), b (0.3) or ends (0.3)."""
    model, tokenizer = load_model(folders["llama"])
    tokens = Tokens(tokenizer, model)
    set_probabilities(model, [*(tokens.encode_prompt(letter)[-1] for letter in "ab"), tokens.eos_id], (0.4, 0.3, 0.3))
    return LanguageModel(model, tokens)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    write_rows(path, [{"prompt": f"{row} is ", "worth": row} for row in range(8)])
    return path


class Watching:
    """Counts the a's of a response, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def __call__(self, prompts: list[str], responses: list[str], worth: list[int]) -> list[float]:
        assert [f"{row} is " for row in worth] == prompts, "columns follow their prompts"
        self.asked += zip(prompts, responses, strict=True)
        return [float(text.count("a")) for text in responses]


def groups_of(watching: Watching, n: int = 4) -> list[list[str]]:
    texts = [text for _, text in watching.asked]
    return [texts[at : at + n] for at in range(0, len(texts), n)]


def test_the_first_of_the_best_that_ended_is_chosen(writer: LanguageModel, prompts: Path) -> None:
    watching = Watching()
    result = best_of_n(writer, prompts, FunctionReward(watching), DRAWING)
    wanted = {}
    for row, group in enumerate(groups_of(watching)):
        ended = [text for text in group if len(text) < 3]  # three letters are three tokens, and no end
        if ended:
            wanted[f"{row} is "] = max(ended, key=lambda text: text.count("a"))
    assert {row["prompt"]: row["completion"] for row in result.rows} == wanted
    texts = [text for _, text in watching.asked]
    assert 0 < result.cut < 1
    assert result.cut == pytest.approx(sum(len(text) == 3 for text in texts) / 32)
    assert result.mean_reward == pytest.approx(sum(text.count("a") for text in texts) / 32)
    assert result.best_reward == pytest.approx(sum(text.count("a") for text in wanted.values()) / len(wanted))


def test_truncated_responses_may_be_chosen_with_keep_cut(writer: LanguageModel, prompts: Path) -> None:
    watching = Watching()
    result = best_of_n(writer, prompts, FunctionReward(watching), BestOfSettings(4, max_tokens=3, keep_cut=True))
    assert [row["reward"] for row in result.rows] == [max(text.count("a") for text in group) for group in groups_of(watching)]
    assert any(len(row["completion"]) == 3 for row in result.rows)


def test_pairs_are_the_best_and_the_worst_unless_rewards_are_equal(writer: LanguageModel, prompts: Path) -> None:
    watching = Watching()
    result = best_of_n(writer, prompts, FunctionReward(watching), BestOfSettings(3, max_tokens=2, keep_cut=True), worst=True)
    counts = [[text.count("a") for text in group] for group in groups_of(watching, 3)]
    differ = [each for each in counts if max(each) > min(each)]
    assert 0 < len(differ) < 8
    assert [(row["reward"], row["reward_rejected"]) for row in result.rows] == [(max(each), min(each)) for each in differ]
    for row in result.rows:
        assert (row["chosen"].count("a"), row["rejected"].count("a")) == (row["reward"], row["reward_rejected"])


def test_a_seed_gives_the_same_rows_whatever_the_batch_and_another_gives_others(writer: LanguageModel, prompts: Path) -> None:
    reward = FunctionReward(Watching())
    one, again, parts, other = (
        best_of_n(writer, prompts, reward, BestOfSettings(4, max_tokens=3, seed=seed, batch=batch))
        for seed, batch in ((1, 256), (1, 256), (1, 4), (2, 256))
    )
    assert one == again == parts
    assert one.rows != other.rows


def test_rows_below_the_threshold_are_left_out(writer: LanguageModel, prompts: Path) -> None:
    reward = FunctionReward(Watching())
    everything = best_of_n(writer, prompts, reward, DRAWING).rows
    some = best_of_n(writer, prompts, reward, BestOfSettings(4, max_tokens=3, at_least=1.0))
    assert some.rows == [row for row in everything if row["reward"] >= 1]
    assert 0 < len(some.rows) < len(everything)
    assert "leaving rows out adds more" in some.lines()[2]
    with pytest.raises(SurefootError, match="no reward reaches --at-least 9: lower it"):
        best_of_n(writer, prompts, reward, BestOfSettings(4, max_tokens=3, at_least=9.0))


def test_rows_of_conversations_are_conversations() -> None:
    talk = [{"role": "user", "content": "hi"}]
    row = chosen_row(talk, ["a", "b"], [0.0, 1.0], [True, True], None, worst=True)
    assert row["chosen"] == [{"role": "assistant", "content": "b"}]
    assert row["rejected"] == [{"role": "assistant", "content": "a"}]
    assert chosen_row(talk, ["a", "b"], [0.0, 1.0], [True, False], None, worst=False) == {
        "prompt": talk,
        "completion": [{"role": "assistant", "content": "a"}],
        "reward": 0.0,
    }
    assert chosen_row(talk, ["a", "b"], [0.0, 1.0], [False, False], None, worst=False) is None


def test_outside_a_run_the_remedy_is_to_repeat_the_command(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import time\ndef raises(responses):\n    raise RuntimeError('down')\n"
        "def slow(responses):\n    time.sleep(5)\n    return [0.0] * len(responses)\n"
    )
    for name, term in (("raises", ""), ("slow", ""), ("url", "{ url = 'http://127.0.0.1:9/x', retries = 0 }")):
        with pytest.raises(SurefootError) as raised:
            load_flag_reward([term or f"{tmp_path}/bad.py:{name}"], deadline=0.2)(["p"], ["r"], {})
        message = str(raised.value)
        assert message.startswith("--reward=")
        assert "checkpoint" not in message
        assert message.endswith(", then repeat the command")
        assert name != "slow" or "make it faster, or score fewer at a time" in message


def test_a_term_is_a_folder_a_function_or_a_table(tmp_path: Path) -> None:
    assert parse_term("runs/judge").model == "runs/judge"
    assert parse_term("mine.py:score").function == "mine.py:score"
    odd = tmp_path / "a:b"
    odd.mkdir()
    assert parse_term(str(odd)).model == str(odd), "a folder that is there is a folder"
    table = parse_term('{ function = "surefoot.verifiers:exact", arguments = { case = false }, weight = 2 }')
    assert (table.function, table.arguments, table.weight) == ("surefoot.verifiers:exact", {"case": False}, 2)


def test_the_command_writes_rows_that_sft_and_reward_models_train_on(
    command: Command, prompts: Path, writer: LanguageModel
) -> None:
    Path("mine.py").write_text(REWARDS)
    words = ["best-of-n", "pocket", "--prompts", str(prompts), "--samples", "3", "--max-tokens", "3", "--keep-cut"]
    code, out, err = command(*words, "--reward", "mine.py:codes", "--out", "new/best.jsonl", "--seed", "3")
    assert (code, err) == (0, "")
    assert "KL of the best of 3 to the model: at most 0.432 nats\n" in out
    rows = read_rows("new/best.jsonl")
    assert len(data.demonstrations(rows, writer.tokens, 64).ids) == 8
    code, out, _ = command(
        *words, "--reward", "mine.py:codes", "--reward", "mine.py:same", "--worst", "--out", "pairs.jsonl", "--json"
    )
    report = json.loads(out)
    assert code == 0
    pairs = read_rows("pairs.jsonl")
    assert report["rows"] == len(pairs) == len(data.pairs(pairs, writer.tokens, 64).chosen)
    assert report["kl_best_of_n"] == pytest.approx(0.43195, abs=1e-5)
    surefoot.train(
        "reward", run_dir=Path("judge"), model="pocket", data={"train": "pairs.jsonl", "max_length": 16, "batch": 2}, steps=2
    )
    code, out, err = command(*words, "--reward", "judge", "--out", "judged.jsonl", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["best_reward"] > json.loads(out)["mean_reward"]
    for out in (str(prompts), "judge/metrics.jsonl"):
        before = Path(out).read_bytes()
        rejected(command(*words, "--reward", "mine.py:codes", "--out", out), f"--out {out}: ", "choose another file")
        assert Path(out).read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"--reward": "mine.py:same", "--worst": None}, ("no prompt has a response to choose", "rewards differ")),
        ({"--keep-cut": False, "--max-tokens": "1"}, ("were truncated: raise --max-tokens, or add --keep-cut",)),
        ({"--worst": None, "--samples": "1"}, ("--samples 1", "use 2 or more")),
        ({"--out": "rows.parquet"}, ("--out rows.parquet", "ends in .jsonl")),
        ({"--prompts": "nowhere.jsonl"}, ("nowhere.jsonl: no such file",)),
        ({"--reward": "nowhere"}, ("--reward=",)),
        ({"--reward": "mine.py:lettres"}, ("--reward='mine.py:lettres'", "has no 'lettres'")),
        ({"--reward": "{ functoin = 'mine.py:letters' }"}, ("no key 'functoin'", "did you mean 'function'")),
        ({"--reward": "{ weight = 1.0 }"}, ("give one of model, function and url",)),
        ({"--reward": "surefoot.verifiers:exact"}, ("requires 'answer'",)),
        ({"--max-tokens": "100000"}, ("line 1", "--max-tokens 100000", "context")),
        ({"--temperature": "inf"}, ("not a finite number",)),
        ({"--device": "abacus"}, ("device='abacus'",)),
        ({"--stop": ""}, ("--stop",)),
    ],
)
def test_invalid_options_are_rejected_in_one_line_and_write_nothing(
    changed: dict[str, Any], parts: tuple[str, ...], command: Command, prompts: Path
) -> None:
    Path("mine.py").write_text(REWARDS)
    flags = {
        "--prompts": str(prompts),
        "--samples": "2",
        "--reward": "mine.py:letters",
        "--out": "rows.jsonl",
        "--max-tokens": "2",
        "--keep-cut": None,
        **changed,
    }
    words = [
        word for flag, value in flags.items() if value is not False for word in ([flag] if value is None else [flag, value])
    ]
    rejected(command("best-of-n", "pocket", *words), *parts)
    assert not Path("rows.jsonl").exists()
