"""Tasks: verifiers accept only right answers, training and test problems are disjoint, and seeds determine the rows."""

import json
import random
import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import SurefootError
from surefoot.language import tasks
from surefoot.language.analysis.accuracy import measure_accuracy
from surefoot.language.data.rows import write_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.rewards.terms import FunctionReward
from surefoot.language.tasks import TASKS, countdown, demonstrations, rows, successors, verify
from surefoot.language.tasks.task import Row

from .tiny import tokenizer

VERIFY = "surefoot.language.tasks:verify"
names = pytest.mark.parametrize("name", TASKS)
LEVELS = [(name, level) for name in TASKS for level in TASKS[name].difficulties]


def scores(problems: list[Row], responses: list[str]) -> list[float]:
    """The scores of the reward function, called as in a run."""
    columns = {key: [row.get(key) for row in problems] for row in problems for key in row if key != "prompt"}
    return FunctionReward(VERIFY)([row["prompt"] for row in problems], responses, columns).total.tolist()


def drawn(name: str, level: int, count: int = 50) -> list[Row]:
    """Problems of one difficulty from both sides of the train-test split."""
    draw = random.Random(1)
    return [TASKS[name].draw(draw, level) | {"task": name} for _ in range(count)]


def test_verifier_accepts_the_answer_and_rejects_changed_ones() -> None:
    for name, level in LEVELS:
        problems = drawn(name, level)
        assert all((row["prompt"] + row["answer"]).isascii() and len(row["prompt"] + row["answer"]) <= 128 for row in problems)
        answers = [row["answer"] for row in problems]
        assert scores(problems, answers) == [1.0] * len(problems)
        assert scores(problems, [f" {answer}\n" for answer in answers]) == [1.0] * len(problems)
        for wrong in (lambda a: a[:-1], lambda a: f"{a}{a}", lambda a: f"{a}.", lambda a: "", lambda a: f"{a}\n{a}"):
            assert scores(problems, [wrong(answer) for answer in answers]) == [0.0] * len(problems)


@names
@given(response=st.text())
def test_any_text_gets_a_score(name: str, response: str) -> None:
    (row,) = rows(name, 1)
    assert scores([row], [response])[0] in (0.0, 1.0)


def test_a_seed_determines_the_rows() -> None:
    for name in TASKS:
        assert rows(name, 30, 1) == rows(name, 30, 1) != rows(name, 30, 2)
        assert rows(name, 10, 1) == rows(name, 30, 1)[:10]
        assert demonstrations(name, 30, 1) == demonstrations(name, 30, 1)


@names
def test_training_and_test_problems_are_disjoint_for_all_seeds(name: str) -> None:
    key = TASKS[name].key
    trained = {key(row) for seed in range(5) for row in rows(name, 200, seed)}
    tested = {key(row) for seed in range(5) for row in rows(name, 30, seed, test=True)}
    assert trained.isdisjoint(tested)
    test = rows(name, 60, 9, test=True)
    assert len({row["prompt"] for row in test}) == 60


def test_reordered_problems_are_on_the_same_side_of_the_split() -> None:
    trained = {tuple(sorted(row["prompt"])) for row in rows("sorting", 2_000, 1)}
    assert trained.isdisjoint({tuple(sorted(row["prompt"])) for row in rows("sorting", 200, 2, test=True)})
    trained = {frozenset(row["prompt"][:-1].split("+")) for row in rows("addition", 2_000, 1)}
    assert trained.isdisjoint({frozenset(row["prompt"][:-1].split("+")) for row in rows("addition", 200, 2, test=True)})


@names
def test_sloppy_demonstrations_are_often_wrong_and_careful_ones_never(name: str) -> None:
    problems = rows(name, 400, 3)

    def share(sloppy: float) -> float:
        made = demonstrations(name, 400, 3, sloppy=sloppy)
        assert [row["prompt"] for row in made] == [row["prompt"] for row in problems]
        return sum(scores(problems, [row["completion"] for row in made])) / 400

    assert share(0.0) == 1.0
    assert share(1.0) < 0.5
    assert share(1.0) < share(0.6) < 0.8


def test_answers_are_correct_by_an_independent_check() -> None:
    for row in rows("sorting", 50, 1):
        answer = row["answer"]
        assert all(a <= b for a, b in pairwise(answer))
        assert Counter(answer) == Counter(row["prompt"][:-1])
    for row in rows("addition", 50, 1):
        assert int(row["answer"]) == sum(map(int, row["prompt"][:-1].split("+")))
    for row in rows("counting", 50, 1):
        letter, word = row["prompt"][:-1].split(" in ")
        assert int(row["answer"]) == len(word) - len(word.replace(letter, ""))
    for row in rows("reversing", 50, 1):
        assert all(row["answer"][-1 - place] == letter for place, letter in enumerate(row["prompt"][:-1]))
    for row in rows("successors", 50, 1):
        assert all(
            "01234567890"["0123456789".index(a) + 1] == b for a, b in zip(row["prompt"][:-1], row["answer"], strict=True)
        )
    for row in rows("brackets", 50, 1):
        text = row["prompt"][:-1] + row["answer"]
        while text:
            shorter = re.sub(r"\(\)|\[\]|\{\}|<>", "", text)
            assert shorter != text, row
            text = shorter
        assert set(row["answer"]) <= set(")]}>")


def test_successor_steps_are_scored_by_position() -> None:
    actual = successors.steps(["3917="] * 4, ["4028", "4x2", "402811", ""])
    assert actual[0] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert actual[1] == [(1, 1), (2, 0), (3, 1)]
    assert actual[2] == [*actual[0], (5, -1), (6, -1)], "steps after the end score -1"
    assert actual[3] == []


# ---- countdown -------------------------------------------------------------------------------------------------------

expressions = st.recursive(
    st.integers(0, 30).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"),
    max_leaves=8,
)


@given(expressions)
def test_expressions_are_evaluated_exactly(text: str) -> None:
    """The reference is Python's eval with fractions, on expressions generated by this test."""
    try:
        wanted = eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        assert countdown.evaluate(text) is None
        return
    actual = countdown.evaluate(text)
    assert actual[0] == wanted
    assert actual[1] == [int(number) for number in re.findall(r"\d+", text)]


NONE = ["+", "1+", "(1", "1)", "()", "-1", "2**3", "1//2", "1/0", "1e3", "1.5", "x", "__import__('os')", "1=1", "²", "١"]
LONG = ("(" * 300 + "1" + ")" * 90, "9" * 30, "1+" * 300 + "1", "(" * 399)


def test_invalid_expressions_evaluate_to_none() -> None:
    assert [text for text in ("", "1 2", *NONE, *LONG) if countdown.evaluate(text) is not None] == []


def test_each_number_must_be_used_exactly_once() -> None:
    row = {"prompt": "", "task": "countdown", "answer": "3*5+7", "numbers": [7, 3, 5], "target": 22}
    right = ["3*5+7", "7 + 5*3", "(3*5)+(7)"]
    wrong = ["22", "3*5+7+0", "3*5+7*1", "5+5+5+7", "3*5", "3*5+8", "3*5+7=22", "21+1"]
    assert (
        verify([""] * 11, right + wrong, ["countdown"] * 11, numbers=[row["numbers"]] * 11, target=[22] * 11)
        == [1] * 3 + [0] * 8
    )


# ---- rejections and the command ----------------------------------------------------------------------------------------


def test_invalid_task_requests_raise_a_one_line_error() -> None:
    for make, what in [
        (lambda: rows("sortin", 1), "task='sortin': is unknown; did you mean 'sorting'"),
        (lambda: rows("sorting", 1, difficulty=99), "difficulty=99: out of range for sorting; choose 2 to 40"),
        (lambda: rows("brackets", 99, difficulty=1, test=True), r"rows=99: brackets of difficulty 1 has \d test problems"),
        (lambda: demonstrations("sorting", 1, sloppy=2), "sloppy=2: is a share"),
        (
            lambda: verify(["3 4=7:"], ["3+4"], ["countdown"]),
            "task='countdown': its rows need a column 'target', which is missing",
        ),
    ]:
        with pytest.raises(SurefootError, match=what):
            make()


def test_rows_of_several_tasks_may_be_mixed() -> None:
    mixed = rows("sorting", 3) + rows("countdown", 3)
    assert scores(mixed, [row["answer"] for row in mixed]) == [1.0] * 6


def test_data_make_writes_the_same_rows_as_the_functions(command, tmp_path) -> None:
    code, out, _ = command(
        "data", "make", "addition", "--rows", "5", "--seed", "3", "--difficulty", "1", "--out", "new/rows.jsonl"
    )
    assert (code, out) == (0, "5 rows in new/rows.jsonl\n")
    assert [json.loads(line) for line in (tmp_path / "new/rows.jsonl").read_text().splitlines()] == rows("addition", 5, 3, 1)
    command(*["data", "make", "sorting", "--rows", "5", "--demonstrations", "--sloppy", "0", "--test", "--out", "rows.jsonl"])
    made = demonstrations("sorting", 5, 1, sloppy=0, test=True)
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == made
    assert command("data", "make", "sorting", "--sloppy", "0", "--out", "x")[0] == 2
    _, listed, _ = command("data", "tasks")
    assert all(name in listed for name in TASKS)


# ---- accuracy of a model -----------------------------------------------------------------------------------------------


class Writer:
    """Samples "1" and "2" in turn, and "1" greedily. Every ``cut``-th response is truncated."""

    tokens = Tokens(tokenizer())

    def __init__(self, cut=None):
        self.cut = cut

    def generate_ended(self, prompts, *, samples, greedy, **options):
        self.options = options
        numbers = range(len(prompts) * samples)
        return ["1" if greedy else "12"[n % 2] for n in numbers], [self.cut is None or n % self.cut > 0 for n in numbers]


def test_accuracy_is_counted_over_prompts_and_samples(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": "3"}])
    reward = FunctionReward("surefoot.verifiers:exact")
    accuracy = measure_accuracy(Writer(), path, reward, samples=4)
    assert [accuracy.greedy, accuracy.sampled, accuracy.mixed] == pytest.approx([1 / 3, 1 / 3, 2 / 3])
    assert len(accuracy.lines()) == 2
    accuracy = measure_accuracy(Writer(), path, reward, samples=1, prompts=1)
    assert (accuracy.sampled, accuracy.mixed) == (1, 0)
    assert "use harder problems" in accuracy.lines()[-1]


def test_truncated_responses_are_wrong_unless_keep_cut_is_set(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"prompt": "a", "answer": "1"}] * 4)
    reward = FunctionReward("surefoot.verifiers:exact")
    accuracy = measure_accuracy(Writer(cut=4), path, reward, samples=4)
    assert (accuracy.cut, accuracy.sampled, accuracy.greedy) == (0.25, 0.25, 0.75)
    assert "25% of the samples were truncated at 64 tokens: wrong" in accuracy.lines()
    kept = measure_accuracy(Writer(cut=4), path, reward, samples=4, keep_cut=True)
    assert (kept.cut, kept.sampled, kept.greedy) == (0.25, 0.5, 1.0)
    assert kept.mixed == 1
    ends = Writer(cut=2)
    accuracy = measure_accuracy(ends, path, reward, samples=2, stop=["#"])
    assert (accuracy.sampled, accuracy.mixed) == (0, 0), "the right one of every two samples is truncated"
    assert ends.options["stop"] == ["#"]
    never = measure_accuracy(Writer(cut=1), path, reward, samples=4)
    assert "almost every sample is truncated" in never.lines()[-1]


def test_responses_without_a_score_do_not_count_in_accuracy(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])

    def all_right_but_one_unknown(prompts: list[str], responses: list[str]) -> list[float | None]:
        return [None if number == 5 else 1.0 for number in range(len(responses))]

    accuracy = measure_accuracy(Writer(), path, FunctionReward(all_right_but_one_unknown), samples=4)
    assert [accuracy.greedy, accuracy.sampled, accuracy.mixed] == [1, 1, 0]


# ---- reasoning-gym ---------------------------------------------------------------------------------------------------


def test_reasoning_gym_tasks_are_found_by_name() -> None:
    pytest.importorskip("reasoning_gym")
    made = rows("reasoning_gym/letter_counting", 20, 1)
    assert made == rows("reasoning_gym/letter_counting", 20, 1)
    assert scores(made, [row["answer"] for row in made]) == [1.0] * 20
    assert scores(made, [row["answer"] + "0" for row in made]) == [0.0] * 20
    test = rows("reasoning_gym/letter_counting", 20, 2, test=True)
    assert {row["prompt"] for row in made}.isdisjoint(row["prompt"] for row in test)
    with pytest.raises(SurefootError, match="has no one right answer, but a program that may evaluate a response"):
        rows("reasoning_gym/countdown", 1)
    with pytest.raises(SurefootError, match="reasoning-gym has no such task; did you mean 'leg_counting'"):
        rows("reasoning_gym/leg_countin", 1)


def test_reasoning_gym_tasks_are_rejected_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(SurefootError, match=r"needs reasoning-gym, which is not installed; run: pip install"):
        tasks.rows("reasoning_gym/leg_counting", 1)
