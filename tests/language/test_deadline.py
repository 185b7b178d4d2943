"""The user's code is interrupted whatever it hangs in, and nobody else's alarm is lost."""

import re
import signal
import threading
import time

import pytest

from surefoot.language.deadline import DeadlineExceeded, with_deadline

SOON = 0.3
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
def test_a_hang_is_interrupted(call):
    assert SOON <= seconds_until_overdue(call) < 20


@pytest.mark.parametrize("call", [spin, sleep])
def test_a_hang_is_interrupted_in_another_thread(call):
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

    assert seconds_until_overdue(stubborn) < 20
    assert calls == ["caught"] * 3


def test_a_call_in_time_gives_its_result_and_leaves_no_alarm():
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
def test_an_alarm_that_was_set_before_still_rings():
    """pytest-timeout has one of its own here: it is put back too."""
    messages = []
    before, left = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        signal.signal(signal.SIGALRM, lambda *_: messages.append(time.monotonic()))
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            with_deadline(SOON, spin)
        assert messages == []
        while not messages and time.monotonic() - started < 20:
            time.sleep(0.05)
        assert messages[0] - started >= 0.9
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
        deadline = time.monotonic() + 20
        while not messages and time.monotonic() < deadline:
            time.sleep(0.05)
        assert messages == ["stop"]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)
