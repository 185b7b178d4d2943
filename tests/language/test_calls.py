"""Calls of user code: deadlines for threads and coroutines, what can't be stopped is counted, and results keep their order."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from runs.test_process import process

from surefoot import calls
from surefoot.calls import DeadlineExceeded, Threads, in_threads, wait_for, with_deadline
from surefoot.errors import SurefootError
from surefoot.language.rewards.terms import FunctionReward

PATIENCE = 60.0
"""seconds after which a test fails that waits for threads"""


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Calls that tests before these have left behind are over."""
    wait_for_all()


def wait_for_all() -> None:
    until = time.monotonic() + PATIENCE
    while calls.calls_left() and time.monotonic() < until:
        time.sleep(0.01)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Ends the calls that a test left behind."""
    event = threading.Event()
    yield event
    event.set()
    wait_for_all()
    assert not calls.calls_left()


def spin(release: threading.Event) -> None:
    while not release.is_set():
        pass


@pytest.mark.parametrize("hang", [spin, lambda release: release.wait(PATIENCE)], ids=["loop", "lock"])
@pytest.mark.parametrize("in_main", [True, False])
def test_a_call_that_hangs_is_left_behind_by_name_and_nothing_of_the_process_changes(
    hang: Callable[[threading.Event], Any], in_main: bool, release: threading.Event
) -> None:
    def overdue() -> str:
        with pytest.raises(DeadlineExceeded) as raised:
            with_deadline(0.2, partial(hang, release), "mine")
        return str(raised.value)

    with_deadline(60, lambda: None)
    before, began = process(), time.monotonic()
    text = overdue() if in_main else Threads().begin(overdue).result(PATIENCE)
    assert 0.2 <= time.monotonic() - began < 50
    assert (text, calls.calls_left()) == ("1 call can't be stopped and will run until this process ends", ["mine"])
    assert {**process(), "threads": 0} == {**before, "threads": 0}


def test_calls_that_go_on_after_their_deadline_are_limited(release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_LEFT", 3)
    with pytest.raises(DeadlineExceeded, match=r"^3 calls"):
        in_threads(lambda _: release.wait(PATIENCE), range(3), 3, 0.1, "slow")
    with pytest.raises(SurefootError, match=r"^3 calls are still running after their deadlines \(3 of slow\); start"):
        with_deadline(60, lambda: None)
    release.set()
    wait_for_all()
    assert with_deadline(60, lambda: "done") == "done"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_function_has_the_gradient_mode_of_its_caller_and_the_thread_of_the_calls_before(enabled: bool) -> None:
    threads = []

    def reward(responses: list[str]) -> list[float]:
        threads.append(threading.current_thread())
        return [float(torch.is_grad_enabled())]

    with torch.set_grad_enabled(enabled):
        for _ in range(2):
            assert FunctionReward(reward)(["p"], ["r"], {}).total.tolist() == [float(enabled)]
    assert threads[0] is threads[1] is not threading.current_thread()
    assert threads[0].daemon


@pytest.mark.parametrize("at_once", [1, 2])
def test_calls_within_a_call_obey_its_deadline(at_once: int) -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        begun.append(number)
        ends = time.monotonic() + PATIENCE
        while number == 1 and not calls.overdue() and time.monotonic() < ends:
            time.sleep(0.01)

    with pytest.raises(DeadlineExceeded):
        with_deadline(0.2, lambda: in_threads(call, (0, *[1] * at_once, 2), at_once))
    time.sleep(0.1)
    assert begun == [0, *[1] * at_once]
    assert not calls.overdue()


@pytest.mark.parametrize("error", [KeyError, TimeoutError, SystemExit])
def test_errors_pass_through_also_those_that_look_like_a_deadline(error: type[BaseException]) -> None:
    def fails() -> None:
        raise error("mine")

    async def fails_later() -> None:
        raise TimeoutError("mine")

    with pytest.raises(error, match="mine"):
        with_deadline(60, fails)
    with pytest.raises(TimeoutError, match="mine"):
        with_deadline(60, lambda: wait_for([fails_later()]))


def test_coroutines_run_together_and_are_cancelled_at_the_deadline() -> None:
    cancelled: list[int] = []
    at_once = asyncio.Barrier(3)

    async def meets(number: int) -> int:
        await at_once.wait()
        return number

    async def hangs(number: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(number)

    assert wait_for([meets(number) for number in range(3)]) == [0, 1, 2]
    with pytest.raises(DeadlineExceeded, match=r"^$"):
        with_deadline(0.2, lambda: wait_for([hangs(0), hangs(1)]))
    assert (sorted(cancelled), calls.calls_left()) == ([0, 1], [])


def test_a_child_process_has_threads_and_an_event_loop_of_its_own() -> None:
    async def nothing() -> None:
        pass

    def both() -> None:
        with_deadline(PATIENCE, lambda: None)
        wait_for([nothing()])

    both()
    if (child := os.fork()) == 0:
        try:
            both()
            os._exit(0)
        finally:
            os._exit(1)
    ends = time.monotonic() + PATIENCE
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < ends:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_results_are_in_order_whichever_finishes_first() -> None:
    def slow_at_first(number: int) -> int:
        time.sleep(0.02 if number == 0 else 0)
        return number * number

    assert in_threads(slow_at_first, range(40), at_once=7) == [n * n for n in range(40)]
    assert in_threads(slow_at_first, [], at_once=7) == in_threads(slow_at_first, [], 1, 1.0) == []


@pytest.mark.parametrize("at_once", [1, 5])
def test_as_many_run_at_the_same_time_as_are_allowed_and_no_more(at_once: int) -> None:
    together = threading.Barrier(min(at_once, 10))
    running, most, lock = 0, 0, threading.Lock()

    def call(number: int) -> threading.Thread:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if number < together.parties:
            together.wait(PATIENCE)
        with lock:
            running -= 1
        return threading.current_thread()

    threads = in_threads(call, range(10), at_once)
    assert most == min(at_once, 10)
    if at_once == 1:
        assert set(threads) == {threading.current_thread()}, "without a deadline, one at a time stays in this thread"


def test_threads_that_find_no_work_left_serve_later_calls() -> None:
    before = threading.active_count()
    for _ in range(300):
        in_threads(lambda x: x, range(8), 8)
    assert threading.active_count() < before + 100  # a few more than 8, which are on their way back


@pytest.mark.parametrize("seconds", [float("inf"), PATIENCE])
def test_the_first_error_ends_the_rest_and_is_raised(seconds: float) -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        begun.append(number)
        if number in (3, 4):
            raise ValueError(str(number))
        time.sleep(0.05)

    with pytest.raises(ValueError, match=r"^3$|^4$"):
        in_threads(call, range(1000), 4, seconds)
    assert len(begun) < 500


def test_no_call_begins_after_the_deadline() -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        begun.append(number)
        time.sleep(0.3)

    with pytest.raises(DeadlineExceeded):
        in_threads(call, range(8), 2, 0.2)
    time.sleep(0.4)
    assert begun == [0, 1]


def test_what_waits_does_not_begin_after_a_deadline_that_has_passed() -> None:
    begun: list[int] = []
    Threads(1, (calls._Deadline(time.monotonic()),)).begin(lambda: begun.append(1))
    time.sleep(0.1)
    assert begun == []
