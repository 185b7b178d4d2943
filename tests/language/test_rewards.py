"""Rewards: arguments and results of functions, masking, rejections in one line, and sums."""

import math
import re

import numpy as np
import pytest
import torch

from surefoot.errors import SurefootError
from surefoot.language.rewards.terms import FunctionReward, WeightedSum, load_reward
from surefoot.recipes.rewards import RewardTerm

PROMPTS = ["one: ", "two: ", "three: "]
RESPONSES = ["a", "bb", "ccc"]
COLUMNS = {"answer": ["a", "b", "ccc"], "weight": [1, 2, 3]}


Term = RewardTerm.model_construct
"""as a recipe has it, before anything is looked at"""


def lengths(responses):
    return [len(response) for response in responses]


def score(function, responses=RESPONSES, **options):
    return FunctionReward(function, **options)(PROMPTS[: len(responses)], responses, COLUMNS)


def giving(values):
    return lambda responses: values


def rejection(function, **options):
    with pytest.raises(SurefootError) as raised:
        score(function, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ---- what a function gets ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"tolerence": 1}, "takes no argument 'tolerence'; did you mean 'tolerance'"),
        ({"answer": ["a"] * 3}, "argument 'answer' is also a column of the rows"),
        ({"responses": ["a"] * 3}, "argument 'responses' is also a column"),
    ],
)
def test_arguments_that_a_function_does_not_take_are_rejected(arguments, what):
    assert what in rejection("surefoot.verifiers:numeric", arguments=arguments)


def test_a_model_takes_no_arguments():
    with pytest.raises(SurefootError, match=r"reward\.terms\[0\]\.arguments=.*are for functions, not for models"):
        load_reward([Term(model="folder", arguments={"a": 1})])


def test_a_function_with_two_stars_gets_everything():
    seen = {}

    def greedy(responses, **others):
        seen.update(others)
        return lengths(responses)

    score(greedy)
    assert seen == {"prompts": PROMPTS, **COLUMNS}


def test_a_column_that_is_not_there_takes_its_default_or_is_rejected():
    assert score(lambda responses, style=None: [style is None] * len(responses)).total.tolist() == [1, 1, 1]
    text = rejection(lambda responses, style: [0] * len(responses))
    assert "requires 'style'; available: answer, prompts, responses, weight" in text


def test_what_a_function_does_to_its_lists_stays_there():
    responses, columns = list(RESPONSES), {name: list(column) for name, column in COLUMNS.items()}

    def destroys(responses, answer):
        answer.clear()
        count = len(responses)
        responses.clear()
        return [0.0] * count

    FunctionReward(destroys)(PROMPTS, responses, columns)
    assert (responses, columns) == (RESPONSES, COLUMNS)


def test_a_function_by_position_only_is_rejected_before_it_is_called():
    with pytest.raises(SurefootError, match="takes arguments by position only"):
        FunctionReward(lambda responses, /: lengths(responses))


def test_functions_are_found_by_name(tmp_path):
    (tmp_path / "mine.py").write_text("def short(responses):\n    return [-len(r) for r in responses]\n\nthing = 3\n")
    scores = score(f"{tmp_path / 'mine.py'}:short", weight=2.0)
    assert scores.total.tolist() == [-2, -4, -6]
    assert scores.parts["short"].tolist() == [-1, -2, -3]
    assert score("surefoot.language.tasks.reviews:gold", [], weight=1.0).total.shape == (0,)
    with pytest.raises(SurefootError, match="is a int, not a function"):
        FunctionReward(f"{tmp_path / 'mine.py'}:thing")


# ---- what a function gives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [0.5, 1, True],
        (0.5, 1.0, 1.0),
        np.array([0.5, 1, 1]),
        torch.tensor([0.5, 1, 1], requires_grad=True),
        [np.float32(0.5), np.int64(1), np.bool_(True)],
        [torch.tensor(0.5), torch.tensor([1.0]), torch.tensor(True)],
    ],
    ids=["list", "tuple", "array", "tensor", "numpy scalars", "tensors"],
)
def test_numbers_of_every_kind_are_numbers(values):
    scores = score(giving(values))
    assert scores.total.tolist() == [0.5, 1, 1]
    assert scores.total.dtype == torch.float32
    assert scores.valid.all()
    assert not scores.total.requires_grad


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
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
    ],
)
def test_what_is_no_number_is_masked_up_to_the_tolerated_share(bad, kind):
    scores = score(giving([1.0, bad, 3.0]), tolerated=0.34, weight=2.0, name="mine")
    assert scores.valid.tolist() == [True, False, True]
    assert scores.total.tolist() == [2, 0, 6]
    assert scores.parts["mine"].tolist() == [1, 0, 3]
    text = rejection(giving([1.0, bad, 3.0]), tolerated=0.33)
    assert f"returned no number for 1 of 3 responses ({kind}), more than reward.tolerated=0.33 allows; the first: 'bb'" in text


def test_the_tolerated_share_itself_is_tolerated():
    responses = [str(index) for index in range(10)]

    def some_bad(count):
        return FunctionReward(giving([None] * count + [0.0] * (10 - count)))([""] * 10, responses, {})

    assert some_bad(1).valid.sum() == 9
    with pytest.raises(SurefootError, match="no number for 2 of 10 responses"):
        some_bad(2)


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 4, np.zeros(2), torch.zeros(4)])
def test_another_count_is_always_rejected(values):
    assert f"returned {len(values)} numbers for 3 responses" in rejection(giving(values), tolerated=1.0)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, lambda x: x.to("meta")])
def test_a_tensor_that_holds_no_list_is_rejected_like_an_error_of_the_function(make):
    text = rejection(lambda responses: make(torch.ones(len(responses))))
    assert "raised RuntimeError: " in text or "raised NotImplementedError: " in text


def test_a_list_of_a_type_of_its_own_that_raises_is_rejected():
    class Odd(list):
        def __iter__(self):
            raise ValueError("odd")

    assert "raised ValueError: odd" in rejection(giving(Odd([1.0] * 3)))


@pytest.mark.parametrize("value", [None, 1.0, "1.0", {"a": 1.0, "b": 2.0, "c": 3.0}, torch.tensor(1.0), {1.0, 2.0, 3.0}])
def test_what_is_no_list_is_rejected(value):
    assert "instead of a list of 3 numbers, one per response" in rejection(giving(value), tolerated=1.0)


def test_a_function_that_raises_or_exits_is_named_with_its_error():
    def fails(responses):
        raise RuntimeError("no\nnetwork")

    def exits(responses):
        raise SystemExit(3)

    mend = r" \(test_rewards\.py:\d+\); fix the function, then resume from the last checkpoint"
    assert re.search(rf"fails': raised RuntimeError: no network{mend}$", rejection(fails))
    assert re.search(rf"exits': raised SystemExit: 3{mend}$", rejection(exits))


def test_a_function_that_hangs_is_named_with_the_deadline():
    def hangs(responses):
        while True:
            pass

    text = rejection(hangs, deadline=0.2)
    assert text.startswith("reward.function=")
    assert "hangs': took longer than reward.deadline=0.2 s for 3 responses" in text


def test_a_function_may_be_interrupted_by_the_user():
    def stopped(responses):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(stopped)


# ---- sums -------------------------------------------------------------------------------------------------------------


def test_a_sum_adds_weighted_totals_and_keeps_the_parts():
    reward = WeightedSum([FunctionReward(lengths, 0.5), FunctionReward(giving([1, 0, 0]), -1.0, name="penalty")])
    scores = reward(PROMPTS, RESPONSES, COLUMNS)
    assert scores.total.tolist() == [-0.5, 1.0, 1.5]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {"lengths": [1, 2, 3], "penalty": [1, 0, 0]}


def test_a_sum_is_valid_where_every_term_is():
    first = FunctionReward(giving([None, 1.0, 1.0]), tolerated=1.0, name="first")
    second = FunctionReward(giving([1.0, 1.0, math.nan]), tolerated=1.0, name="second")
    scores = WeightedSum([first, second])(PROMPTS, RESPONSES, {})
    assert scores.valid.tolist() == [False, True, False]
    assert scores.total.tolist() == [0, 2, 0]


def test_terms_of_the_same_name_get_different_names():
    scores = WeightedSum([FunctionReward(lengths, weight) for weight in (1.0, 2.0, 3.0)])(PROMPTS, RESPONSES, {})
    assert list(scores.parts) == ["lengths", "lengths_2", "lengths_3"]
    assert scores.total.tolist() == [6, 12, 18]


def test_a_recipe_of_one_function_is_that_function_and_of_more_their_sum(tmp_path):
    (tmp_path / "mine.py").write_text("def short(responses):\n    return [-len(r) for r in responses]\n")
    short = Term(function=f"{tmp_path / 'mine.py'}:short", weight=0.5)
    one = load_reward([short], deadline=3.0, tolerated=0.5)
    assert isinstance(one, FunctionReward)
    assert (one.deadline, one.tolerated, one.weight) == (3.0, 0.5, 0.5)
    assert load_reward([short, short])(PROMPTS, RESPONSES, {}).total.tolist() == [-1, -2, -3]


@pytest.mark.parametrize(
    ("terms", "what"),
    [
        ([], r"reward\.terms=\[\]"),
        ([Term()], r"reward\.terms\[0\]: has neither model, function nor url"),
        ([Term(function="math:tau", model="folder")], r"reward\.terms\[0\]: has model and function; give one"),
        ([Term(function="builtins:dict"), Term()], r"reward\.terms\[1\]: has neither"),
        ([Term(function="builtins:dict", weight=math.nan)], r"reward\.terms\[0\]\.weight=nan"),
        ([Term(function="math:tau", url="http://localhost")], r"reward\.terms\[0\]: has function and url; give one"),
        ([Term(function="math:tau", batch=2)], r"reward\.terms\[0\]\.batch: is for a url"),
        ([Term(function="math:tau", retries=0)], r"reward\.terms\[0\]\.retries: is for a url"),
        ([Term(function="math:tau", per="token", separator=";")], r"separator=';': is for steps; set per = 'step'"),
        ([Term(model="folder", per="token")], r"per='token': the reward model may have other tokens"),
        ([Term(model="folder", per="step")], r"per='step': a model's steps need both"),
        ([Term(model="folder", separator=";")], r"per=None: a model's steps need both"),
        ([Term(url="http://localhost", token_from="hf_aBcD")], r"token_from: must be the name of an environment variable"),
        ([Term(function="math:nothing")], r"reward\.terms\[0\]\.function='math:nothing': can't be imported"),
    ],
)
def test_terms_that_are_none_are_rejected(terms, what):
    with pytest.raises(SurefootError, match=what):
        load_reward(terms)
