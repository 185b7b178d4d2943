"""Reward servers score finished responses during sampling; the scores equal those of one call afterwards."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from surefoot.calls import DeadlineExceeded
from surefoot.language import http_client
from surefoot.language.online.engine import InProcess
from surefoot.language.rewards.endpoint import Endpoint
from surefoot.language.sampling.engines import Request
from surefoot.language.sampling.sampler import sample

from .test_endpoint import Server
from .test_judge import QUESTION, question_in, written
from .test_online import collected, world
from .test_online import files as files
from .tiny import model, tokenizer


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry almost at once."""
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.001)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def term(server: Server, kind: str) -> dict[str, Any]:
    """A judge that scores the length of the question, or a reward server that gets one response per request."""
    if kind == "judge":
        server.answer = lambda body: written(f"Score: {len(question_in(body))}")
        return {"url": server.url, "judge": {"model": "m", "prompt": QUESTION}}
    return {"url": server.url, "batch": 1}


@pytest.mark.parametrize("kind", ["judge", "server"])
def test_early_scores_equal_later_scores_and_requests_start_before_sampling_ends(
    kind: str, server: Server, files: dict[str, str], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = {"terms": [term(server, kind)], "missing_eos": "none"}
    settings = {"reward": reward, "sampling": {"prompts": 16, "max_tokens": 24}}
    with monkeypatch.context() as patch:
        patch.setattr("surefoot.language.rewards.terms.FunctionReward.begins_early", False)
        later = collected(world(files, folders["llama"], **settings))
    later_bodies = sorted(map(str, server.bodies))
    server.bodies.clear()

    early_requests = []
    draw = InProcess.sample

    def sample_and_wait(engine: InProcess, request: Any) -> Any:
        drawn = draw(engine, request)
        early, deadline = int((drawn.lengths < 24).sum()), time.monotonic() + 30
        assert early >= 4, "the tiny model must end some responses early"
        while len(server.bodies) < early and time.monotonic() < deadline:
            time.sleep(0.01)
        early_requests.append(len(server.bodies))
        return drawn

    monkeypatch.setattr(InProcess, "sample", sample_and_wait)
    made = world(files, folders["llama"], **settings)
    rollout = collected(made)
    assert early_requests == [int((rollout.mask.sum(-1) < 24).sum())]
    assert sorted(map(str, server.bodies)) == later_bodies, "each response is sent once"
    assert rollout.rewards.equal(later.rewards)


def test_requests_that_failed_early_are_sent_again(
    server: Server, files: dict[str, str], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled, failed = threading.Event(), []
    draw = InProcess.sample

    def answer(body: dict[str, Any]) -> Any:
        if sampled.is_set():
            return written(f"Score: {len(question_in(body))}")
        failed.append(question_in(body))
        return 400, {"error": "no"}

    def sample_and_wait(engine: InProcess, request: Any) -> Any:
        drawn, ends = draw(engine, request), time.monotonic() + 30
        while not failed and time.monotonic() < ends:
            time.sleep(0.01)
        sampled.set()
        return drawn

    monkeypatch.setattr(InProcess, "sample", sample_and_wait)
    settings = {
        "reward": {"terms": [term(server, "judge")], "missing_eos": "none"},
        "sampling": {"prompts": 16, "max_tokens": 24},
    }
    server.answer = answer  # term() sets its own
    rollout = collected(world(files, folders["llama"], **settings))
    assert failed
    assert rollout.mask.any(-1).all(), "every response has a score"
    asked = [question_in(body) for body in server.bodies]
    assert all(asked.count(question) == 2 for question in {*failed})


def test_on_finished_gets_the_index_and_tokens_of_responses_that_end_early() -> None:
    finished: dict[int, list[int]] = {}
    prompts = [tokenizer()(text).input_ids for text in ("ab", "c", "dd")]
    report = {"on_finished": lambda number, ids: finished.update({number: list(ids)})}
    drawn = sample(model("llama"), Request(prompts, range(12), 40, [1], 0, samples=4, temperature=1.5, **report), rows=5)
    early = [number for number, length in enumerate(drawn.lengths.tolist()) if length < 40]
    assert 0 < len(early) < 12
    assert finished == {n: drawn.responses()[n] for n in early}


def test_a_request_is_sent_once_until_it_is_taken_and_again_if_it_failed(server: Server) -> None:
    release = threading.Event()

    def answer(body: dict[str, Any]) -> Any:
        if body["responses"] == ["slow"]:
            release.wait(30)
        return (400, {}) if body["responses"] == ["bad"] and len(server.bodies) < 4 else (200, [1.0])

    server.answer = answer
    endpoint = Endpoint(server.url, batch=1, at_once=1)
    for response in ("good", "good", "bad", "slow"):
        endpoint.begin(["p"], [response])
    while len(server.bodies) < 3:
        time.sleep(0.01)
    endpoint.deadline = 0.05
    with pytest.raises(DeadlineExceeded):
        endpoint(["p"], ["slow"])
    release.set()
    endpoint.deadline = 30.0
    assert endpoint(["p"] * 2, ["good", "bad"]) == [1.0, 1.0]
    assert [body["responses"][0] for body in server.bodies] == ["good", "bad", "slow", "bad"]
    assert not endpoint.early
