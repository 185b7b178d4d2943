"""Calls that wait are made at the same time: environments, and requests to reward servers. Results do not show it."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from surefoot.errors import SurefootError
from surefoot.language.data.tokens import Tokens
from surefoot.language.deadline import DeadlineExceeded, with_deadline
from surefoot.language.online.turns import Environments
from surefoot.language.rewards.terms import load_reward
from surefoot.language.sampling import Samples, sample
from surefoot.language.threads import in_threads
from surefoot.recipes.language import RewardTerm, TurnSettings

from . import tiny
from .test_endpoint import Server

PATIENCE = 20.0
"""seconds after which a barrier that not all have reached breaks, and the test fails"""


def test_results_come_in_order_whatever_finishes_first() -> None:
    def slow_at_first(number: int) -> int:
        time.sleep(0.02 if number == 0 else 0)
        return number * number

    assert in_threads(slow_at_first, range(40), at_once=7) == [n * n for n in range(40)]
    assert in_threads(slow_at_first, [], at_once=7) == []


@pytest.mark.parametrize("at_once", [2, 5, 64])
def test_as_many_run_at_the_same_time_as_are_allowed_and_no_more(at_once: int) -> None:
    together = threading.Barrier(min(at_once, 10))
    running, most, lock = 0, 0, threading.Lock()

    def call(number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if number < together.parties:
            together.wait(PATIENCE)
        with lock:
            running -= 1

    in_threads(call, range(10), at_once)
    assert most == min(at_once, 10)


def test_one_at_a_time_stays_in_this_thread() -> None:
    assert in_threads(lambda _: threading.current_thread(), range(3), at_once=1) == [threading.current_thread()] * 3


def test_the_first_error_ends_the_rest_and_is_raised() -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        begun.append(number)
        if number in (3, 4):
            raise ValueError(str(number))
        time.sleep(0.005)

    with pytest.raises(ValueError, match=r"^3$|^4$"):
        in_threads(call, range(1000), at_once=4)
    assert len(begun) < 100


def test_a_deadline_interrupts_calls_that_hang() -> None:
    ended = threading.Event()

    def hang(_: int) -> None:
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    with pytest.raises(DeadlineExceeded):
        with_deadline(0.2, lambda: in_threads(hang, range(4), at_once=4))
    assert ended.wait(PATIENCE)


# ---- environments -------------------------------------------------------------------------------------------------------


class Waits:
    """Each call waits until all 64 environments are in it."""

    def reset(self, row: dict[str, Any]) -> str:
        barrier("reset", row["kind"]).wait(PATIENCE)
        self.kind, self.seed = row["kind"], row["seed"]
        return "hi "

    def step(self, response: str) -> tuple[str, float, bool]:
        barrier("step", self.kind).wait(PATIENCE)
        return "", float(self.seed % 97 + len(response)), True


_BARRIERS: dict[tuple[str, int], threading.Barrier] = {}


def barrier(name: str, parties: int) -> threading.Barrier:
    return _BARRIERS.setdefault((name, parties), threading.Barrier(parties))


@pytest.fixture
def answer() -> Iterator[Any]:
    """Samples four tokens of a small model."""
    model = tiny.model("llama")

    def draw(prompts: Any, seeds: Any) -> Samples:
        return sample(model, prompts, max_tokens=4, eos_ids=(1,), pad_id=0, seeds=seeds)

    return draw


def converse(answer: Any, count: int, kind: int, at_once: int) -> list[Any]:
    settings = TurnSettings(environment="surefoot.language.tasks.guess:Guess", at_once=at_once)
    made = Environments(settings, (64, 100), deadline=60, tolerated=0.0)
    made.make = Waits  # this module's own class, with its barriers
    rows = [{"kind": kind} for _ in range(count)]
    return made.converse(rows, range(count), answer, Tokens(tiny.tokenizer()))


def test_64_environments_are_called_at_the_same_time(answer: Any) -> None:
    conversations = converse(answer, 64, 64, at_once=64)
    assert [one.failure for one in conversations] == [None] * 64


def test_one_after_another_gives_the_same_conversations(answer: Any) -> None:
    for name in ("reset", "step"):
        _BARRIERS[name, 1] = threading.Barrier(1)
    apart, together = (converse(answer, 12, 1, at_once) for at_once in (1, 5))
    for one, other in zip(apart, together, strict=True):
        assert (one.rewards, one.ids, one.turns) == (other.rewards, other.ids, other.turns)


# ---- requests -----------------------------------------------------------------------------------------------------------


def test_requests_to_a_reward_server_are_in_flight_together_and_scores_stay_in_order() -> None:
    server = Server()
    together = threading.Barrier(6)

    def answer(body: dict[str, Any]) -> Any:
        together.wait(PATIENCE)
        return 200, [float(text) for text in body["responses"]]

    server.answer = answer
    try:
        reward = load_reward([RewardTerm(url=server.url, batch=2, at_once=6)], deadline=30)
        numbers = [str(n) for n in range(12)]
        assert reward([""] * 12, numbers, {}).total.tolist() == [float(n) for n in range(12)]
    finally:
        server.close()


def test_one_request_that_fails_ends_the_call_with_its_message() -> None:
    server = Server()
    server.answer = lambda body: (200, [1.0]) if body["responses"] != ["c"] else (400, "no")
    try:
        reward = load_reward([RewardTerm(url=server.url, batch=1, at_once=3, retries=0)], deadline=30)
        with pytest.raises(SurefootError, match="returned 400 Bad Request"):
            reward([""] * 5, list("abcde"), {})
    finally:
        server.close()
