"""A language model as judge behind a local server: questions, scores, concurrency, and answers without a score."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from surefoot.errors import SurefootError
from surefoot.language.rewards.terms import FunctionReward, load_reward
from surefoot.recipes.rewards import RewardTerm

from .test_endpoint import Server
from .test_endpoint import short_waits as short_waits

PROMPTS, RESPONSES = ["one: ", "two: ", "three: "], ["a", "bb {prompt}", "ccc"]
QUESTION = "Rate this.\nQuestion: {prompt}\nAnswer: {response}\nEnd with the score."


def written(text: Any) -> tuple[int, Any]:
    """A chat completion with this text."""
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def question_in(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.answer = lambda body: written(f"It has 2 faults. Score: {len(question_in(body))}")
    yield made
    made.close()


def judge(server: Server, *, tolerated: float = 0.1, deadline: float = 20.0, **fields: Any) -> FunctionReward:
    settings = {"model": "m", "prompt": QUESTION, **fields.pop("judge", {})}
    term = RewardTerm(url=server.url, judge=settings, **fields)
    return load_reward([term], tolerated=tolerated, deadline=deadline)


def test_questions_contain_prompt_and_response_and_the_last_number_is_the_score(server: Server) -> None:
    scores = judge(server, weight=2.0, arguments={"temperature": 0})(PROMPTS, RESPONSES, {})
    questions = {question_in(body) for body in server.bodies}
    assert "Rate this.\nQuestion: two: \nAnswer: bb {prompt}\nEnd with the score." in questions, "braces in a response are kept"
    assert scores.parts["judge"].tolist() == [len(QUESTION) - 18 + n for n in (6, 16, 10)]
    assert scores.total.tolist() == [2 * x for x in scores.parts["judge"].tolist()]
    assert all(body["model"] == "m" and body["temperature"] == 0 for body in server.bodies)
    judge(server)([[{"role": "assistant", "content": None, "tool_calls": [{"id": "sum"}]}]], ["3"], {})
    assert "assistant: [{'id': 'sum'}]" in question_in(server.bodies[-1])


def test_scores_are_parsed_by_pattern_key_or_default(server: Server) -> None:
    for settings, answer, score in (
        ({"pattern": r"score: (\d)/10"}, "2 faults. Score: 7/10, so 3 off", 7),
        ({"key": "quality"}, 'Here: {"quality": 0.25, "why": "4 words"} as asked', 0.25),
        ({}, "-1.5", -1.5),
        ({}, "Fluent, 1 fault. Score: 8/10", 8),
        ({}, "Score: **7.5** / 10.", 7.5),
        ({}, "4 (out of 10)", 4),
        ({}, "Score: 8 (on a scale of 0 to 10)", 8),
        ({}, "between 7/10 and 8/10", 8),
        ({}, "Score: .5", 0.5),
        ({}, "Score: 5e-1", 0.5),
        ({}, "Score: 1,250", 1250),
        ({}, "Score: −2", -2),
    ):
        server.answer = lambda body, answer=answer: written(answer)
        assert judge(server, judge=settings)(PROMPTS, RESPONSES, {}).total.tolist() == [score] * 3


def test_comparisons_use_both_orders_so_position_bias_scores_one_half(server: Server) -> None:
    settings = {"prompt": "{prompt}A: {first}\nB: {second}\nWhich?", "against": "answer"}
    columns = {"answer": ["better", "worse", "worse"]}
    server.answer = lambda body: written("1")
    assert judge(server, judge=settings)(PROMPTS, RESPONSES, columns).total.tolist() == [0.5, 0.5, 0.5]

    def longer(body: dict[str, Any]) -> tuple[int, Any]:
        first, second, _ = question_in(body).partition("A: ")[2].splitlines()
        return written("the verdict is 1" if len(first) > len(second.removeprefix("B: ")) else "2, clearly")

    server.answer = longer
    assert judge(server, judge=settings)(PROMPTS, ["x" * 9] * 3, columns).total.tolist() == [1, 1, 1]
    server.answer = lambda body: written("tie")
    assert judge(server, judge=settings)(PROMPTS, RESPONSES, columns).total.tolist() == [0.5] * 3


def test_in_flight_limits_concurrent_requests(server: Server) -> None:
    in_flight = 8
    together, running, peak, lock = threading.Barrier(in_flight), [0], [0], threading.Lock()

    def wait_for_the_others(body: dict[str, Any]) -> tuple[int, Any]:
        with lock:
            running[0] += 1
            peak[0] = max(peak[0], running[0])
        together.wait(60)
        with lock:
            running[0] -= 1
        return written("1")

    server.answer = wait_for_the_others
    server.http.socket.listen(256)
    responses = [f"response {number}" for number in range(2 * in_flight)]
    assert judge(server, judge={"in_flight": in_flight}, deadline=90)(["p"] * len(responses), responses, {}).valid.all()
    assert peak[0] == in_flight


def test_equal_questions_are_sent_once(server: Server) -> None:
    made = judge(server)
    first = made(["p"] * 6, ["a", "a", "b", "a", "b", "c"], {})
    assert len(server.bodies) == 3
    again = made(["p"] * 3, ["c", "a", "d"], {})
    assert len(server.bodies) == 4
    assert again.total[0] == first.total[5]


def test_answers_without_a_score_are_missing_and_too_many_are_rejected(server: Server) -> None:
    server.answer = lambda body: written("What a lovely answer!\n\nI enjoyed it." if "bb" in question_in(body) else "5")
    scores = judge(server, tolerated=0.5)(PROMPTS, RESPONSES, {})
    assert scores.valid.tolist() == [True, False, True]
    with pytest.raises(SurefootError) as raised:
        judge(server)(PROMPTS, RESPONSES, {})
    assert str(raised.value).startswith(f"reward.terms[0].url={server.url!r}: the judge's answers have no score (a number) ")
    assert "for 1 of 3 responses, the first: 'What a lovely answer! I enjoyed it.'; make judge.prompt ask" in str(raised.value)


def test_a_body_that_is_not_a_chat_completion_is_rejected(server: Server) -> None:
    server.answer = lambda body: (200, {"scores": [1]})
    with pytest.raises(
        SurefootError, match=r"returned no chat completion .*; use the address of /v1/chat/completions, then resume"
    ):
        judge(server)(PROMPTS, RESPONSES, {})


def test_columns_named_in_the_judge_prompt_must_exist(server: Server) -> None:
    made = judge(server, judge={"prompt": "{prompt} {response} {rubric}"})
    with pytest.raises(SurefootError, match="requires 'rubric'; available: answer, prompts, responses"):
        made.check_columns(["answer"])
    assert made(PROMPTS, RESPONSES, {"rubric": ["x", "y", "z"]}).valid.all()
