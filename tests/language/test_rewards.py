"""Reward functions: arguments, return values, masking of invalid scores, one-line errors, and weighted sums."""

import math
import re
import threading
import time

import numpy as np
import pytest
import torch

from surefoot.errors import SurefootError
from surefoot.language.rewards.terms import FunctionReward, WeightedSum, load_reward
from surefoot.recipes.rewards import RewardTerm

from .test_endpoint import Server

PROMPTS = ["one: ", "two: ", "three: "]
RESPONSES = ["a", "bb", "ccc"]
COLUMNS = {"answer": ["a", "b", "ccc"], "weight": [1, 2, 3]}


Term = RewardTerm.model_construct
"""builds the term of a recipe without validation"""


def lengths(responses):
    return [len(response) for response in responses]


def score(function, responses=RESPONSES, **options):
    return FunctionReward(function, **options)(PROMPTS[: len(responses)], responses, COLUMNS)


def giving(values):
    return lambda responses: values


def rejection(function, **options):
    with pytest.raises(SurefootError) as raised:
        score(function, **options)
    return str(raised.value)


# ---- function arguments ----------------------------------------------------------------------------------------------


def test_a_function_takes_any_of_prompts_responses_and_columns():
    def exact(responses, answer):
        return [response == truth for response, truth in zip(responses, answer, strict=True)]

    assert score(exact).total.tolist() == [1, 0, 1]
    assert score(lambda prompts: [len(prompt) for prompt in prompts]).total.tolist() == [5, 5, 7]
    assert score(lambda *, weight: weight).total.tolist() == [1, 2, 3]


def test_arguments_of_a_term_reach_its_function():
    def longer(responses, than, by=0):
        return [len(response) > than + by for response in responses]

    assert score(longer, arguments={"than": 1}).total.tolist() == [0, 1, 1]
    assert score(longer, arguments={"than": 1, "by": 1}).total.tolist() == [0, 0, 1]
    assert score(lambda **arguments: [arguments["than"]] * 3, arguments={"than": 2}).total.tolist() == [2, 2, 2]
    term = Term(function="surefoot.verifiers:numeric", arguments={"tolerance": 1})
    assert load_reward([term])([""], ["4"], {"answer": [5]}).total.tolist() == [1]


def test_arguments_that_a_function_does_not_take_are_rejected():
    for arguments, what in (
        ({"tolerence": 1}, "takes no argument 'tolerence'; did you mean 'tolerance'"),
        ({"answer": ["a"] * 3}, "argument 'answer' is also a column of the rows"),
        ({"responses": ["a"] * 3}, "argument 'responses' is also a column"),
    ):
        assert what in rejection("surefoot.verifiers:numeric", arguments=arguments)


def test_function_with_kwargs_gets_prompts_and_all_columns():
    seen = {}

    def greedy(responses, **others):
        seen.update(others)
        return lengths(responses)

    score(greedy)
    assert seen == {"prompts": PROMPTS, **COLUMNS}


def test_missing_column_uses_the_default_or_is_rejected():
    assert score(lambda responses, style=None: [style is None] * len(responses)).total.tolist() == [1, 1, 1]
    text = rejection(lambda responses, style: [0] * len(responses))
    assert "requires 'style'; available: answer, prompts, responses, weight" in text


def test_positional_only_function_is_rejected_before_it_is_called():
    with pytest.raises(SurefootError, match="takes arguments by position only"):
        FunctionReward(lambda responses, /: lengths(responses))


def test_functions_are_imported_by_name(tmp_path):
    (tmp_path / "mine.py").write_text("def short(responses):\n    return [-len(r) for r in responses]\n\nthing = 3\n")
    scores = score(f"{tmp_path / 'mine.py'}:short", weight=2.0)
    assert scores.total.tolist() == [-2, -4, -6]
    assert scores.parts["short"].tolist() == [-1, -2, -3]
    assert score("surefoot.language.tasks.reviews:gold", [], weight=1.0).total.shape == (0,)
    with pytest.raises(SurefootError, match="is a int, not a function"):
        FunctionReward(f"{tmp_path / 'mine.py'}:thing")


# ---- return values ----------------------------------------------------------------------------------------------------


def test_all_numeric_types_are_accepted():
    for values in (
        [0.5, 1, True],
        (0.5, 1.0, 1.0),
        np.array([0.5, 1, 1]),
        torch.tensor([0.5, 1, 1], requires_grad=True),
        [np.float32(0.5), np.int64(1), np.bool_(True)],
        [torch.tensor(0.5), torch.tensor([1.0]), torch.tensor(True)],
    ):
        scores = score(giving(values))
        assert scores.total.tolist() == [0.5, 1, 1]
        assert scores.total.dtype == torch.float32
        assert scores.valid.all()
        assert not scores.total.requires_grad


def test_invalid_scores_are_masked_up_to_the_tolerated_share():
    for bad, kind in (
        (math.nan, "NaN 1"),
        (-math.inf, "infinite 1"),
        (1e300, "infinite 1"),
        (10**400, "infinite 1"),
        (None, "None 1"),
        ("0.5", "str 1"),
        ([0.5], "list 1"),
        (1j, "complex 1"),
        (np.array([1.0, 2.0]), "array 1"),
        (torch.tensor(math.nan), "NaN 1"),
    ):
        scores = score(giving([1.0, bad, 3.0]), tolerated=0.34, weight=2.0, name="mine")
        assert scores.valid.tolist() == [True, False, True]
        assert scores.total.tolist() == [2, 0, 6]
        assert scores.parts["mine"].tolist() == [1, 0, 3]
        text = rejection(giving([1.0, bad, 3.0]), tolerated=0.33)
        assert (
            f"returned no number for 1 of 3 responses ({kind}), more than reward.tolerated=0.33 allows; the first: 'bb'" in text
        )


def test_exactly_the_tolerated_share_is_accepted():
    responses = [str(index) for index in range(10)]

    def some_bad(count):
        return FunctionReward(giving([None] * count + [0.0] * (10 - count)))([""] * 10, responses, {})

    assert some_bad(1).valid.sum() == 9
    with pytest.raises(SurefootError, match="no number for 2 of 10 responses"):
        some_bad(2)


def test_results_of_another_form_are_always_rejected():
    for values in ([], [1.0], [1.0] * 4, np.zeros(2), torch.zeros(4)):
        assert f"returned {len(values)} numbers for 3 responses" in rejection(giving(values), tolerated=1.0)
    for value in (None, 1.0, "1.0", {"a": 1.0, "b": 2.0, "c": 3.0}, torch.tensor(1.0), {1.0, 2.0, 3.0}):
        assert "instead of a list of 3 numbers, one per response" in rejection(giving(value), tolerated=1.0)
    for tensor in (torch.ones(3).to_sparse(), torch.ones(3, device="meta")):
        assert re.search("raised (RuntimeError|NotImplementedError): ", rejection(giving(tensor)))


def test_error_names_the_function_that_raises_or_exits():
    def fails(responses):
        raise RuntimeError("no\nnetwork")

    def exits(responses):
        raise SystemExit(3)

    mend = r" \(test_rewards\.py:\d+\); fix the function, then resume with --allow-changes"
    assert re.search(rf"fails': raised RuntimeError: no network{mend}$", rejection(fails))
    assert re.search(rf"exits': raised SystemExit: 3{mend}$", rejection(exits))


def test_error_names_the_function_that_exceeds_the_deadline():
    def hangs(responses):
        time.sleep(2)

    text = rejection(hangs, deadline=0.2)
    assert text.startswith("reward.function=")
    assert "hangs': took longer than reward.deadline=0.2 s for 3 responses (1 call can't be stopped and" in text
    assert "; make it faster, or raise reward.deadline, then resume from the last checkpoint" in text


def test_keyboard_interrupt_in_a_function_propagates():
    def stopped(responses):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(stopped)


def test_requests_to_a_server_run_at_once_and_scores_stay_in_order():
    server, together, numbers = Server(), threading.Barrier(6), [str(number) for number in range(12)]

    def answer(body):
        together.wait(60)
        return 200, [float(text) for text in body["responses"]]

    server.answer = answer
    try:
        reward = load_reward([RewardTerm(url=server.url, batch=2, at_once=6)], deadline=90)
        assert reward([""] * 12, numbers, {}).total.tolist() == [float(number) for number in numbers]
    finally:
        server.close()


# ---- sums -------------------------------------------------------------------------------------------------------------


def test_a_sum_adds_weighted_totals_and_keeps_the_parts():
    reward = WeightedSum([FunctionReward(lengths, 0.5), FunctionReward(giving([1, 0, 0]), -1.0, name="penalty")])
    scores = reward(PROMPTS, RESPONSES, COLUMNS)
    assert scores.total.tolist() == [-0.5, 1.0, 1.5]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {"lengths": [1, 2, 3], "penalty": [1, 0, 0]}


def test_sum_is_valid_only_where_every_term_is_valid():
    first = FunctionReward(giving([None, 1.0, 1.0]), tolerated=1.0, name="first")
    second = FunctionReward(giving([1.0, 1.0, math.nan]), tolerated=1.0, name="second")
    scores = WeightedSum([first, second])(PROMPTS, RESPONSES, {})
    assert scores.valid.tolist() == [False, True, False]
    assert scores.total.tolist() == [0, 2, 0]


def test_terms_with_the_same_name_get_a_suffix():
    scores = WeightedSum([FunctionReward(lengths, weight) for weight in (1.0, 2.0, 3.0)])(PROMPTS, RESPONSES, {})
    assert list(scores.parts) == ["lengths", "lengths_2", "lengths_3"]
    assert scores.total.tolist() == [6, 12, 18]


def test_one_term_loads_as_its_function_and_several_as_their_sum(tmp_path):
    (tmp_path / "mine.py").write_text("def short(responses):\n    return [-len(r) for r in responses]\n")
    short = Term(function=f"{tmp_path / 'mine.py'}:short", weight=0.5)
    one = load_reward([short], deadline=3.0, tolerated=0.5)
    assert isinstance(one, FunctionReward)
    assert (one.deadline, one.tolerated, one.weight) == (3.0, 0.5, 0.5)
    assert load_reward([short, short])(PROMPTS, RESPONSES, {}).total.tolist() == [-1, -2, -3]


def test_invalid_terms_are_rejected():
    for terms, what in (
        ([], r"reward\.terms=\[\]"),
        ([Term(function="builtins:dict"), Term()], r"reward\.terms\[1\]: has neither"),
        ([Term(function="math:nothing")], r"reward\.terms\[0\]\.function='math:nothing': can't be imported"),
    ):
        with pytest.raises(SurefootError, match=what):
            load_reward(terms)
