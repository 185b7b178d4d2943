"""Calls of user code: time limits always end them, other alarms survive, and calls in threads keep their order."""

import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from surefoot.language.calls import DeadlineExceeded, in_threads, with_deadline

SOON = 0.3
PATIENCE = 60.0
"""seconds after which a test fails that waits for threads"""
needs_alarms = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no alarms on this system")


def spin():
    while True:
        pass


def sleep():
    time.sleep(60)


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def backtrack():
    """Minutes inside one call of C that holds the interpreter's lock."""
    re.match(r"(a+)+$", "a" * 40 + "b")


def seconds_until_overdue(call):
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        with_deadline(SOON, call)
    return time.monotonic() - started


def in_another_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join(30)
    return results[0]


@needs_alarms
@pytest.mark.parametrize("call", [spin, sleep, wait_for_a_lock, backtrack])
def test_a_hanging_call_is_interrupted(call):
    assert SOON <= seconds_until_overdue(call) < 50


@pytest.mark.parametrize("call", [spin, sleep])
def test_a_hanging_call_is_interrupted_in_another_thread(call):
    def elsewhere():
        try:
            with_deadline(SOON, call)
        except DeadlineExceeded:
            return "overdue"
        return "went through"

    assert in_another_thread(elsewhere) == "overdue"


@needs_alarms
def test_code_that_catches_the_interruption_is_interrupted_again():
    calls = []

    def stubborn():
        for _ in range(3):
            try:
                time.sleep(60)
            except BaseException:
                calls.append("caught")
        time.sleep(60)

    assert seconds_until_overdue(stubborn) < 50
    assert calls == ["caught"] * 3


def test_a_call_in_time_returns_and_leaves_no_alarm():
    assert with_deadline(60, lambda: "done") == "done"
    assert in_another_thread(lambda: with_deadline(60, lambda: "done")) == "done"


@pytest.mark.parametrize("run", [lambda call: call(), in_another_thread], ids=["main", "thread"])
def test_errors_pass_through(run):
    def fails():
        raise KeyError("mine")

    def attempt():
        try:
            with_deadline(60, fails)
        except KeyError as error:
            return error.args

    assert run(attempt) == ("mine",)


@needs_alarms
def test_an_alarm_that_was_set_before_still_fires():
    """pytest-timeout has one of its own here: it is put back too."""
    messages = []
    before, left = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        signal.signal(signal.SIGALRM, lambda *_: messages.append(time.monotonic()))
        signal.setitimer(signal.ITIMER_REAL, 3.0)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            with_deadline(SOON, spin)
        assert messages == []
        while not messages and time.monotonic() - started < 60:
            time.sleep(0.05)
        assert messages[0] - started >= 2.9
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)


@needs_alarms
def test_an_alarm_that_is_set_meanwhile_is_kept():
    """As by StopOnSignal, when the run is asked to stop while a reward function works."""
    messages = []
    before, left = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)

    def stopped_meanwhile():
        signal.signal(signal.SIGALRM, lambda *_: messages.append("stop"))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return "done"

    try:
        assert with_deadline(60, stopped_meanwhile) == "done"
        deadline = time.monotonic() + 60
        while not messages and time.monotonic() < deadline:
            time.sleep(0.05)
        assert messages == ["stop"]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)


# ---- in threads -------------------------------------------------------------------------------------------------------------


def test_results_are_in_order_whichever_finishes_first() -> None:
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
        time.sleep(0.05)

    with pytest.raises(ValueError, match=r"^3$|^4$"):
        in_threads(call, range(1000), at_once=4)
    assert len(begun) < 500


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


LEFT_BEHIND = """
import math, threading, time
from concurrent.futures import ThreadPoolExecutor
from surefoot.language.calls import DeadlineExceeded, in_threads, with_deadline

def spin(_):
    while True:
        pass

def with_calls():
    in_threads(spin, range(6), at_once=6)

def with_threads():
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(math.sqrt, range(8)))

def left_behind(function, seconds):
    try:
        with_deadline(seconds, function)
    except DeadlineExceeded:
        pass
    end = time.monotonic() + 30
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.01)
    return threading.active_count() - 1
"""


def in_a_process(expression: str) -> str:
    """The value of an expression after ``LEFT_BEHIND``: an alarm in a callback of a weak reference is printed, and pytest would
    take that for an error.
    """
    code = f"{LEFT_BEHIND}\nprint({expression})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_alarms
def test_a_deadline_leaves_no_call_behind_whenever_it_passes() -> None:
    """Also while the threads of the calls are being started or interrupted."""
    assert in_a_process("[left_behind(with_calls, s) for s in 5 * [0.0001, 0.001, 0.005, 0.02]]") == str([0] * 20)


@needs_alarms
def test_a_deadline_leaves_no_lock_held_and_no_thread_waiting_whenever_it_passes() -> None:
    """A function may have threads of its own. In a lock or in the start of a thread, an exception would leave them waiting."""
    assert in_a_process("sum(left_behind(with_threads, 3e-6 * trial + 1e-6) for trial in range(400))") == "0"


@needs_alarms
def test_an_error_that_the_interruption_causes_counts_as_the_deadline() -> None:
    def fails_afterwards() -> None:
        try:
            time.sleep(60)
        finally:
            raise RuntimeError("cannot release un-acquired lock")

    with pytest.raises(DeadlineExceeded):
        with_deadline(SOON, fails_afterwards)
