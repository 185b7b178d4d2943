"""Reward servers score finished responses during sampling, with the same scores as afterwards."""

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
from surefoot.language.sampling import sample
from surefoot.language.sampling.choose_engine import InProcess

from .test_endpoint import Server
from .test_judge import QUESTION, question_in, written
from .test_online import collected, fields, files, world  # noqa: F401
from .tiny import model, tokenizer


@pytest.fixture(autouse=True)
def patient_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.001)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def term(server: Server, kind: str) -> dict[str, Any]:
    """A judge, or a reward server that gets one response per request; scored by the length of what is asked."""
    if kind == "judge":
        server.answer = lambda body: written(f"Score: {len(question_in(body))}")
        return {"url": server.url, "judge": {"model": "m", "prompt": QUESTION}}
    return {"url": server.url, "batch": 1}


@pytest.mark.parametrize("kind", ["judge", "server"])
def test_the_scores_are_those_of_a_call_after_all_and_what_ended_early_was_asked_before_the_last_token(
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
    asked_later = sorted(map(str, server.bodies))
    server.bodies.clear()

    before_the_end = []
    draw = InProcess.sample

    def sample_and_wait(engine: InProcess, request: Any) -> Any:
        drawn = draw(engine, request)
        early, ends = int((drawn.lengths < 24).sum()), time.monotonic() + 30
        assert early >= 4, "the tiny model ends some responses"
        while len(server.bodies) < early and time.monotonic() < ends:
            time.sleep(0.01)
        before_the_end.append(len(server.bodies))
        return drawn

    monkeypatch.setattr(InProcess, "sample", sample_and_wait)
    made = world(files, folders["llama"], **settings)
    rollout = collected(made)
    assert before_the_end == [int((rollout.mask.sum(-1) < 24).sum())]
    assert sorted(map(str, server.bodies)) == asked_later, "each response once"
    assert rollout.rewards.equal(later.rewards)


def test_a_request_that_failed_early_is_sent_again_and_its_error_is_that_of_the_call(
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


def test_the_callback_at_the_end_of_a_response_gets_its_index_and_tokens() -> None:
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
    assert early
    assert {number: ids for number, ids in finished.items() if len(ids) < 40} == {n: drawn.responses()[n] for n in early}


def test_a_pool_calls_each_item_once_at_most_so_many_at_a_time_and_its_threads_end() -> None:
    calls, running, most, lock, before = [], [0], [0], threading.Lock(), threading.active_count()

    def call(_: None, item: int) -> int:
        with lock:
            calls.append(item)
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1
        return item * item

    pool: ThreadPool[int, int] = ThreadPool(nullcontext, call, 3)
    for item in (*range(12), *range(12)):
        pool.begin(item)
    assert [pool.take(item, time.monotonic() + 30) for item in range(12)] == [item * item for item in range(12)]
    assert (sorted(calls), most[0]) == (list(range(12)), 3)
    assert pool.take(5, time.monotonic() + 30) is None, "a result is taken once"
    ends = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < ends:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_pools_failures_are_none_and_what_is_too_slow_exceeds_its_deadline() -> None:
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
