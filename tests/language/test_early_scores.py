"""Reward servers score finished responses during sampling; the scores equal those of one call afterwards."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from surefoot.calls import DeadlineExceeded
from surefoot.language.online.engine import InProcess
from surefoot.language.rewards.endpoint import Endpoint

from .test_endpoint import Server
from .test_endpoint import server as server
from .test_endpoint import short_waits as short_waits
from .test_judge import QUESTION, question_in, written
from .test_online import collected, world
from .test_online import files as files


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
