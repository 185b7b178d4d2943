"""Reward servers score finished responses during sampling; the scores equal those of one call afterwards."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from surefoot.errors import SurefootError
from surefoot.language import http_client
from surefoot.language.calls import DeadlineExceeded, ThreadPool
from surefoot.language.online.engine import InProcess
from surefoot.language.sampling.sampler import sample

from .test_endpoint import Server
from .test_judge import QUESTION, question_in, written
from .test_online import collected, fields, files, world  # noqa: F401
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
    kind: str,
    server: Server,
    files: dict[str, str],  # noqa: F811
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
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


def test_a_failed_early_request_raises_the_usual_error(
    server: Server,
    files: dict[str, str],  # noqa: F811
    folders: dict[str, Path],
) -> None:
    settings = {
        "reward": {"terms": [term(server, "judge")], "missing_eos": "none"},
        "sampling": {"prompts": 16, "max_tokens": 24},
    }
    server.answer = lambda body: (400, {"error": "no"})
    with pytest.raises(SurefootError, match=r"^reward\.terms\[0\]\.url=.*returned 400 Bad Request"):
        collected(world(files, folders["llama"], **settings))


def test_requests_that_failed_early_are_sent_again(
    server: Server,
    files: dict[str, str],  # noqa: F811
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
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
    drawn = sample(
        model("llama"),
        [tokenizer()(text).input_ids for text in ("ab", "c", "dd")],
        samples=4,
        max_tokens=40,
        temperature=1.5,
        eos_ids=[1],
        pad_id=0,
        seeds=range(12),
        rows=5,
        on_finished=lambda number, ids: finished.update({number: list(ids)}),
    )
    early = [number for number, length in enumerate(drawn.lengths.tolist()) if length < 40]
    assert 0 < len(early) < 12
    assert finished == {n: drawn.responses()[n] for n in early}


def test_thread_pool_calls_items_once_within_its_limit_and_ends_its_threads() -> None:
    calls, running, peak, lock, before = [], [0], [0], threading.Lock(), threading.active_count()

    def call(_: None, item: int) -> int:
        with lock:
            calls.append(item)
            running[0] += 1
            peak[0] = max(peak[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1
        return item * item

    pool: ThreadPool[int, int] = ThreadPool(nullcontext, call, 3)
    for item in (*range(12), *range(12)):
        pool.begin(item)
    assert [pool.take(item, time.monotonic() + 30) for item in range(12)] == [item * item for item in range(12)]
    assert (sorted(calls), peak[0]) == (list(range(12)), 3)
    assert pool.take(5, time.monotonic() + 30) is None, "a result can be taken only once"
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_thread_pool_returns_none_for_failures_and_raises_at_the_deadline() -> None:
    opened = []

    @contextmanager
    def connection() -> Iterator[None]:
        opened.append(1)
        if len(opened) > 1:
            raise OSError("nothing can be opened")
        yield

    release = threading.Event()

    def call(_: None, item: str) -> None:
        if item == "fails":
            raise ValueError("no")
        release.wait(30)

    pool: ThreadPool[str, None] = ThreadPool(connection, call, 1)
    pool.begin("fails")
    assert pool.take("fails", time.monotonic() + 30) is None
    while pool._threads:
        time.sleep(0.01)
    pool.begin("never opened")
    assert pool.take("never opened", time.monotonic() + 30) is None
    slow: ThreadPool[str, None] = ThreadPool(nullcontext, call, 1)
    slow.begin("slow")
    with pytest.raises(DeadlineExceeded):
        slow.take("slow", time.monotonic() + 0.05)
    release.set()
