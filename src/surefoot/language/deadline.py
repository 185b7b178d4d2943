"""Calls user code with a time limit."""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")
REPEAT = 0.1
"""seconds after which the deadline is raised again, for code that catches everything"""


class DeadlineExceeded(BaseException):
    """The deadline passed. Not an Exception, so that the interrupted code does not catch it as an error of its own."""


def with_deadline(seconds: float, call: Callable[[], Result]) -> Result:
    """Return ``call()``; raise DeadlineExceeded when it takes longer than ``seconds``.

    In the main thread an alarm interrupts Python loops, sleeps, locks, regular expressions and big integers. All of them check
    for signals; a watching thread could not stop them while they hold the interpreter's lock. The call does not run in a
    process, because a reward function may hold models, connections and closures, and its state must stay here. In another
    thread, or on Windows, the call runs in a thread that is asked to end and left behind.
    A C extension that does not check for signals runs to its end; DeadlineExceeded is raised then.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        return _by_alarm(seconds, call)
    return _by_thread(seconds, call)


def _by_alarm(seconds: float, call: Callable[[], Result]) -> Result:
    running = True

    def expire(number: int, frame: FrameType | None) -> None:
        if running:
            raise DeadlineExceeded

    started = time.monotonic()
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    if 0 < left < seconds:
        return call()  # an alarm that is already set interrupts the call sooner
    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT)
        return call()
    finally:
        running = False
        if signal.getsignal(signal.SIGALRM) is expire:  # else a stop signal has set another alarm
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3), interval)


def interrupt(thread: threading.Thread) -> None:
    """Raise DeadlineExceeded in a thread when it next runs a line of Python: the only way to end one."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(DeadlineExceeded))


def _by_thread(seconds: float, call: Callable[[], Result]) -> Result:
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        interrupt(thread)
        raise DeadlineExceeded
    if errors:
        raise errors[0]
    return results[0]
