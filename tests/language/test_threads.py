"""Calls to environments and reward servers run concurrently without changing the results."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from surefoot.errors import SurefootError
from surefoot.language.data.tokens import Tokens
from surefoot.language.online.turns import Environments
from surefoot.language.rewards.terms import load_reward
from surefoot.language.sampling.ends import Ends
from surefoot.language.sampling.engines import Request, Samples
from surefoot.language.sampling.sampler import sample
from surefoot.recipes.language import TurnSettings
from surefoot.recipes.rewards import RewardTerm

from . import tiny
from .test_endpoint import Server

PATIENCE = 60.0
"""timeout of the barriers in seconds, after which the test fails"""


# ---- environments -------------------------------------------------------------------------------------------------------


class Waits:
    """Each call waits until all environments have entered it."""

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
    """Samples up to four tokens from a small model."""
    model = tiny.model("llama")

    def draw(prompts: Any, seeds: Any) -> Samples:
        return sample(model, Request(prompts, seeds, 4, (1,), 0))

    return draw


def converse(answer: Any, count: int, kind: int, at_once: int) -> list[Any]:
    settings = TurnSettings(environment="surefoot.language.tasks.guess:Guess", at_once=at_once)
    made = Environments(settings, (64, 100), deadline=60, tolerated=0.0)
    made.make = Waits  # the class above, with its barriers
    rows = [{"kind": kind} for _ in range(count)]
    return made.converse(rows, range(count), answer, Ends(Tokens(tiny.tokenizer())))


def test_64_environments_are_called_concurrently(answer: Any) -> None:
    conversations = converse(answer, 64, 64, at_once=64)
    assert [one.failure for one in conversations] == [None] * 64


def test_sequential_and_concurrent_calls_give_the_same_conversations(answer: Any) -> None:
    for name in ("reset", "step"):
        _BARRIERS[name, 1] = threading.Barrier(1)
    apart, together = (converse(answer, 12, 1, at_once) for at_once in (1, 5))
    for one, other in zip(apart, together, strict=True):
        assert (one.rewards, one.ids, one.turns) == (other.rewards, other.ids, other.turns)


# ---- requests -----------------------------------------------------------------------------------------------------------


def test_reward_requests_run_concurrently_and_scores_stay_in_order() -> None:
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


def test_one_failed_request_fails_the_call_with_its_message() -> None:
    server = Server()
    server.answer = lambda body: (200, [1.0]) if body["responses"] != ["c"] else (400, "no")
    try:
        reward = load_reward([RewardTerm(url=server.url, batch=1, at_once=3, retries=0)], deadline=30)
        with pytest.raises(SurefootError, match="returned 400 Bad Request"):
            reward([""] * 5, list("abcde"), {})
    finally:
        server.close()
