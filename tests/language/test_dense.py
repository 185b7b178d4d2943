"""Rewards of steps and tokens: their positions, their sums, and rejected forms."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.errors import SurefootError
from surefoot.language.analysis.evaluate import calibration
from surefoot.language.data.rows import write_rows
from surefoot.language.data.steps import split_steps, token_texts
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.loading import load_model
from surefoot.language.models.reward_model import RewardModel, new_reward_model
from surefoot.language.online.world import LanguageWorld
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.scores import Scores
from surefoot.language.rewards.terms import FunctionReward, WeightedSum
from surefoot.store.reading import traces_in
from surefoot.store.traces import read_trace

from . import tiny

TEXTS = ["a;bb;c", "été;日本;🙂!", "", ";; ;", "no separator", "  two  spaces ", "end;"]
TOKENS = [["a", ";b", "b;c", ""], ["x", ";", ""]]
"""of "a;bb;c" and "x;", with their ends"""
STEPS: dict[str, Any] = {"per": "step", "separator": ";"}


def byte_tokenizer() -> Any:
    """Bytes and some words of them: a character may be several tokens, and a token several characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=["<eos>", "<pad>"], show_progress=False
    )
    core.train_from_iterator(["the step;bb;the step;bb", " spaces", "été"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def spaced_tokenizer() -> Any:
    """Words that begin with a mark for a space, of which the first is not written; what it does not know is bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", "<unk>", "▁", "▁two", "▁spaces", "▁no", "▁separator", "a", "b", ";", "c"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    strip = decoders.Strip(content=" ", left=1, right=0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="module", params=["bytes", "spaced", "pocket"])
def tokens(request: pytest.FixtureRequest) -> Tokens:
    """Three ways to make tokens of text."""
    if request.param == "pocket":
        return Tokens(load_model("pocket")[1])
    return Tokens(byte_tokenizer() if request.param == "bytes" else spaced_tokenizer())


def marking(*of_each: Any) -> Any:
    return lambda responses: list(of_each)


def score(function: Any, responses: list[str] = ["a;bb;c", "x;"], tokens: Any = TOKENS, **options: Any) -> Scores:  # noqa: B006
    return FunctionReward(function, **options)([""] * len(responses), responses, {}, tokens)


def rejection(function: Any, **options: Any) -> str:
    with pytest.raises(SurefootError) as raised:
        score(function, tolerated=1.0, **options)
    return str(raised.value)


# ---- steps and tokens -----------------------------------------------------------------------------------------------------


def test_a_step_ends_with_its_separator_and_white_space_is_none() -> None:
    actual = [[(step.text, step.end) for step in split_steps(text, ";")] for text in TEXTS]
    assert actual[0] == [("a", 2), ("bb", 5), ("c", 6)]
    assert actual[1] == [("été", 4), ("日本", 7), ("🙂!", 9)]
    assert actual[2:4] == [[], []]
    assert actual[4] == [("no separator", 12)]
    assert actual[6] == [("end", 4)]
    assert [(step.text, step.end) for step in split_steps("a\n\nb\n\n\nc", "\n\n")] == [("a", 3), ("b", 6), ("\nc", 8)]


@given(st.text(alphabet="ab; \n", max_size=20), st.sampled_from([";", "\n\n", " "]))
def test_every_character_but_white_space_is_in_exactly_one_step(text: str, separator: str) -> None:
    steps = split_steps(text, separator)
    assert "".join("".join(step.text for step in steps).split()) == "".join(text.replace(separator, "").split())
    for step in steps:
        assert text[: step.end].endswith((step.text, step.text + separator))
    ends = [step.end for step in steps]
    assert ends == sorted(set(ends))


@given(data=st.data())
def test_texts_of_tokens_joined_are_the_text_whatever_was_sampled(tokens: Tokens, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokens.tokenizer) - 1), max_size=12))
    actual = token_texts(tokens.decode, ids)
    assert len(actual) == len(ids)
    assert "".join(actual) == tokens.decode(ids)


def test_the_reward_of_a_step_is_on_the_token_that_writes_its_last_character(tokens: Tokens) -> None:
    """By the law itself: that token is the first with which the text so far, decoded, holds the step."""
    for text in TEXTS:
        ids = tokens.encode_completion(text)
        written = tokens.decode(ids)  # pocket knows no é and says nothing in its place
        steps = split_steps(written, ";")
        values = [float(2**number) for number in range(len(steps))]
        scores = score(marking(values), [written], [token_texts(tokens.decode, ids)], **STEPS)
        expected = torch.zeros(len(ids))
        for step, value in zip(steps, values, strict=True):
            so_far = [tokens.decode(ids[: place + 1]).startswith(written[: step.end]) for place in range(len(ids))]
            expected[so_far.index(True)] += value
        assert scores.dense[0].tolist() == expected.tolist(), text
        assert scores.total.tolist() == [sum(values)], text


def test_a_score_per_token_is_there_and_the_function_may_see_the_tokens() -> None:
    def letters(tokens: list[list[str]]) -> list[list[float]]:
        return [[float(len(piece)) for piece in row] for row in tokens]

    scores = score(letters, per="token", weight=0.5)
    assert scores.dense.tolist() == [[0.5, 1, 1.5, 0], [0.5, 0.5, 0, 0]]
    assert scores.total.tolist() == [3, 1]
    assert scores.parts["<locals>.letters".rpartition(".")[2]].tolist() == [6, 2]


def test_numbers_per_token_of_every_kind_are_numbers() -> None:
    for rows in (
        ((1.0, 2.0, 3.0, 4.0), [5, True + 5, 7]),
        [np.array([1.0, 2, 3, 4]), torch.tensor([5.0, 6, 7])],
        np.array([[1.0, 2, 3, 4], [5, 6, 7, np.nan]]),
        torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]], requires_grad=True),
    ):
        scores = score(lambda responses, rows=rows: rows, per="token")
        assert scores.dense.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
        assert scores.valid.all()


def test_a_function_may_return_where_steps_end() -> None:
    def odd(responses: list[str]) -> list[Any]:
        return [[(1, 0.5), (4, 1.0), (6, -2)], np.array([[0, 3.0], [2, 4.0]])]

    odd.per = "step"
    scores = score(odd)
    assert scores.dense.tolist() == [[0.5, 0, -1, 0], [3, 4, 0, 0]], "of one token several add up; none is the first"
    assert scores.total.tolist() == [-0.5, 7]


def test_one_bad_number_masks_its_response() -> None:
    for bad, kind in ((None, "None"), ([1.0, None, 2.0], "None"), ([1.0, float("nan"), 2.0], "NaN"), ([1, "2", 3], "str")):
        scores = score(marking(bad, [1.0]), **STEPS, tolerated=0.5)
        assert scores.valid.tolist() == [False, True]
        assert scores.dense.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]
        with pytest.raises(SurefootError, match=rf"no number for 1 of 2 responses \({kind} 1\)"):
            score(marking(bad, [1.0]), **STEPS)


def test_another_count_or_form_is_rejected_in_one_line() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (marking([1.0], [1.0]), {"per": "token"}, "1 scores for the 4 tokens (EOS is one too) of response 0, 'a;bb;c'"),
        (lambda responses: np.zeros((2, 5)), {"per": "token"}, "returned 5 scores for the 4 tokens"),
        (marking([1.0] * 3, [1.0] * 2), STEPS, "2 scores for the 1 steps (separator ';') of response 1"),
        (marking([1.0] * 3), STEPS, "returned 1 lists of numbers for 2 responses"),
        (marking(1.0, 2.0), STEPS, "returned a float instead of a list with a score for every step"),
        (marking("abc", []), {"per": "token"}, "returned a str instead of a list"),
        (marking([1.0], []), {"per": "step"}, "returned 1.0 instead of (end, score); or set separator"),
        (marking([(7, 1.0)], []), {"per": "step"}, "returned the end 7 for a step; it must be a whole number from 0 to its 6"),
        (marking([(-1, 1.0)], []), {"per": "step"}, "returned the end -1 for a step"),
        (marking([(1.5, 1.0)], []), {"per": "step"}, "returned the end 1.5 for a step"),
        (lambda responses: 3, {"per": "token"}, "instead of a list of 2 lists of numbers, one per response"),
        (lambda tokens: tokens, {}, "requires 'tokens'; available: prompts, responses"),
    ]
    for function, options, what in cases:
        assert what in rejection(function, **options)


def test_where_texts_alone_are_known_steps_add_up_and_tokens_are_rejected() -> None:
    scores = score(lambda steps: [[1.0] * len(row) for row in steps], tokens=None, **STEPS)
    assert scores.total.tolist() == [3, 1]
    assert scores.dense is None
    complaint = rejection(lambda tokens: [[1.0] * 4], tokens=None, per="token")
    assert "scores tokens, and only whole texts are scored here" in complaint


def test_a_sum_puts_scores_of_whole_responses_on_their_last_tokens() -> None:
    steps = FunctionReward(marking([1, 2, 3], [None]), 2.0, **STEPS, tolerated=0.5, name="steps")
    whole = FunctionReward(marking(10.0, 20.0), name="whole")
    results = WeightedSum([whole, steps])(["", ""], ["a;bb;c", "x;"], {}, TOKENS)
    assert results.dense.tolist() == [[0, 2, 10, 10], [0, 0, 0, 0]]
    assert results.total.tolist() == [22, 0]
    assert results.valid.tolist() == [True, False]


# ---- a process reward model -------------------------------------------------------------------------------------------------


def test_a_model_scores_a_step_where_it_ends_and_in_one_pass(folders: dict[str, Path], tmp_path: Path) -> None:
    model, tokenizer = load_model(folders["llama"])
    scorer = new_reward_model(model, seed=3, tokenizer=tokenizer)
    scorer.standardise(torch.tensor([-1.0, 0.5, 3.5]))
    scorer.save(tmp_path / "process")
    loaded = RewardModel.load(tmp_path / "process")
    prompts, responses = ["one: ", "a longer one: ", "x"], ["a;bb;c", "x;", ""]
    tokens = [["a;b", "b;", "c", ""], ["x", ";"], [""]]
    reward = ModelReward(tmp_path / "process", 0.5, **STEPS, batch_tokens=30)
    results = reward(prompts, responses, {}, tokens)

    def by_hand(text: str) -> float:
        ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            hidden = loaded.backbone(input_ids=ids).last_hidden_state[0, -1]
            return float((loaded.head(hidden) - loaded.mean) / loaded.std)

    first = [by_hand(f"one: {text}") for text in ("a;", "a;bb;", "a;bb;c")]
    expected = torch.tensor([[first[0], first[1], first[2], 0], [0, by_hand("a longer one: x;"), 0, 0], [0, 0, 0, 0]]) * 0.5
    torch.testing.assert_close(results.dense, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results.total, expected.sum(-1), rtol=1e-4, atol=1e-4)
    assert expected.abs().sum() > 0.1


# ---- in a run ---------------------------------------------------------------------------------------------------------------

REWARDS = """
def places(tokens):
    return [[float(place + 1) for place in range(len(row))] for row in tokens]

places.per = "token"

def letters(responses):
    return [[(place + 1, float(letter in "aeiou ")) for place, letter in enumerate(text)] for text in responses]

letters.per = "step"

def length(responses):
    return [float(len(text)) for text in responses]
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "rewards.py").write_text(REWARDS)
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i % 7} says "} for i in range(40)])
    return {"prompts": str(tmp_path / "prompts.jsonl"), "rewards": str(tmp_path / "rewards.py")}


def fields(files: dict[str, str], model: Path, functions: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    terms = [{"function": f"{files['rewards']}:{name}"} for name in functions]
    table = {"sampling": {"prompts": 8, "samples": 2, "max_tokens": 6}, **changes}
    table["reward"] = {"terms": terms, "missing_eos": "none", **changes.get("reward", {})}
    return tiny.fields_of(model, files["prompts"], "", **table)


def collected(files: dict[str, str], model: Path, *functions: str, **changes: Any) -> tuple[LanguageWorld, Rollout]:
    made = tiny.world_of(fields(files, model, functions, **changes))
    return made, made.collector.collect(LearnerState.seeded(1, 64))


def test_rewards_lie_on_tokens_before_the_kl_and_their_sum_is_the_metric(
    files: dict[str, str], folders: dict[str, Path]
) -> None:
    made, r = collected(files, folders["llama"], "places", "length", reference={"beta": 0.3})
    lengths = r.mask.sum(-1)
    texts = [made.tokens.decode(ids[mask]) for ids, mask in zip(r.actions, r.mask, strict=True)]
    expected = torch.where(r.mask, torch.arange(1.0, r.mask.shape[1] + 1), 0.0)
    expected[torch.arange(len(lengths)), lengths - 1] += torch.tensor([float(len(text)) for text in texts])
    torch.testing.assert_close(r.reward_parts["score"], expected)
    torch.testing.assert_close(r.rewards, expected - 0.3 * r.reward_parts["kl"])
    assert r.metrics["reward"] == pytest.approx(float(expected.sum(-1).mean()))
    assert r.metrics["reward_places"] == pytest.approx(float((lengths * (lengths + 1) / 2).float().mean()))


@pytest.mark.parametrize("treatment", ["penalty", "subtract", "bootstrap"])
def test_a_truncated_response_is_treated_as_configured(treatment: str, files: dict[str, str], folders: dict[str, Path]) -> None:
    reward = {"missing_eos": treatment, "missing_eos_value": -4.0}
    made, r = collected(files, folders["llama"], "places", reward=reward)
    cut = r.mask.all(-1) & (r.actions[:, -1] != made.tokens.eos_id)
    assert cut.any()
    expected = torch.arange(1.0, r.mask.shape[1] + 1)
    if treatment == "penalty":
        expected = torch.zeros(r.mask.shape[1])
    if treatment in ("penalty", "subtract"):
        expected[-1] -= 4.0
    assert r.reward_parts["score"][cut].tolist() == [expected.tolist()] * int(cut.sum())
    assert r.truncated[cut].any(-1).all() == (treatment == "bootstrap")
    assert r.metrics["reward"] == pytest.approx(float(r.reward_parts["score"].sum(-1).mean()))


def test_groups_compare_the_sums_and_a_critic_sees_every_step(files: dict[str, str], folders: dict[str, Path]) -> None:
    grpo = {"algorithm": "GRPO", "objective": {"scale_by_group": False}}
    sampling = {"prompts": 8, "samples": 4, "max_tokens": 6}
    made, r = collected(files, folders["llama"], "letters", sampling=sampling, **grpo)
    sums = r.reward_parts["score"].sum(-1).view(-1, 4)
    advantages = assign_credit(r, made.recipe.objective).advantages
    expected = (sums - sums.mean(-1, keepdim=True)).flatten().unsqueeze(-1).expand_as(r.mask)
    torch.testing.assert_close(advantages, torch.where(r.mask, expected, 0.0))
    assert sums.std() > 0
    made, r = collected(files, folders["llama"], "letters", objective={"gae_lambda": 1.0}, reference={"beta": 0.0})
    to_go = r.reward_parts["score"].flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(assign_credit(r, made.recipe.objective).returns, torch.where(r.mask, to_go, 0.0))


def test_further_rounds_keep_the_positions_of_rewards(files: dict[str, str], folders: dict[str, Path]) -> None:
    sampling = {"prompts": 8, "samples": 2, "max_tokens": 6, "rounds": 3}
    made, r = collected(files, folders["llama"], "letters", algorithm="GRPO", sampling=sampling)
    assert r.metrics["sampling_rounds"] is not None
    for row in range(len(r.mask)):
        if r.mask[row].any():
            texts = [made.tokens.decode([i]) for i in r.actions[row][r.mask[row]].tolist()]
            assert r.reward_parts["score"][row][r.mask[row]].tolist() == [float(t in set("aeiou ")) for t in texts]


def test_a_run_with_steps_trains_and_evaluates_and_its_traces_show_them(files: dict[str, str], tmp_path: Path) -> None:
    table = fields(files, Path("pocket"), ("letters",), reward={"gold": f"{files['rewards']}:letters"})
    table["data"]["held_out"] = files["prompts"]
    surefoot.train("language", run_dir=tmp_path / "run", **{**table, "evaluation": {"rows": 8}, "steps": 32})
    for path in (tmp_path / "run" / "samples").glob("*.jsonl"):
        for sample in map(json.loads, path.read_text().splitlines()):
            assert sample["reward"] == sample["gold"] == sum(c in "aeiou " for c in sample["response"])
    (row, *_), *_ = (read_trace(path).rows for path in traces_in(tmp_path / "run" / "traces"))
    assert row.reward_parts["score"].tolist() == [float(token in set("aeiou ")) for token in row.about["tokens"]]


def test_a_stop_string_writes_nothing_as_eos_does(files: dict[str, str], folders: dict[str, Path]) -> None:
    """So the texts of the tokens joined are the response, and its last step ends before the stop string."""
    sampling = {"prompts": 16, "samples": 2, "max_tokens": 6, "stop": ["e", "o", "the"]}
    made, _ = collected(files, folders["llama"], "letters", sampling=sampling)
    seen: list[tuple[list[str], list[str]]] = []

    def joined(responses: list[str], tokens: list[list[str]]) -> list[list[float]]:
        seen.extend(zip(responses, tokens, strict=True))
        return [[0.0] * len(row) for row in tokens]

    answers = made.collector.respond(made.collector.prompts, range(40))
    answers.score_with(FunctionReward(joined, per="token"))
    assert [text for text, _ in seen] == answers.texts == ["".join(pieces) for _, pieces in seen]
    assert [len(pieces) for _, pieces in seen] == answers.samples.lengths.tolist()
    cut = [len(made.tokens.decode(ids)) - len(text) for text, ids in zip(answers.texts, answers.ids, strict=True)]
    assert min(cut) == 0 < max(cut), "some had one"


def test_a_critic_is_compared_with_the_remaining_return(files: dict[str, str], folders: dict[str, Path]) -> None:
    made, _ = collected(files, folders["llama"], "places", reference={"beta": 0.0})
    answers = made.collector.respond(made.collector.prompts, range(40))
    curve = calibration(made, answers)
    lengths = answers.samples.lengths.tolist()
    to_come = {"first": [sum(range(1, n + 1)) for n in lengths], "middle": [sum(range(n // 2 + 1, n + 1)) for n in lengths]}
    for name, sums in to_come.items():
        assert curve[name]["observed"] == pytest.approx(sum(sums) / len(sums))
