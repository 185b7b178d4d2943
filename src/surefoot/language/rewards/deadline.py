"""A call of the user's own code that may not take longer than it should."""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")
INSIST = 0.1
"""seconds after which a deadline is raised again, for code that catches everything"""


class Overdue(BaseException):
    """The deadline passed. No Exception, so that the interrupted code does not take it for an error of its own."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What ``call()`` gives; raises Overdue when it takes longer.

    In the main thread an alarm interrupts it: loops of Python, sleeps, locks, regular expressions and big integers, all of
    which look for signals, which a watching thread could not stop while they hold the interpreter's lock. Not a process,
    because a reward function may hold models, connections and closures, and what it remembers belongs here. Elsewhere (another
    thread, Windows) the call runs in a thread of its own, which is told to end and left behind.
    Code of a C extension that looks for no signals ends when it ends; Overdue comes then.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        return _by_alarm(seconds, call)
    return _by_thread(seconds, call)


def _by_alarm(seconds: float, call: Callable[[], Result]) -> Result:
    running = True

    def overdue(number: int, frame: FrameType | None) -> None:
        if running:
            raise Overdue

    started = time.monotonic()
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    if 0 < left < seconds:
        return call()  # whoever set that alarm interrupts the call sooner
    before = signal.signal(signal.SIGALRM, overdue)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, INSIST)
        return call()
    finally:
        running = False
        if signal.getsignal(signal.SIGALRM) is overdue:  # else a stop signal has put an alarm of its own in place
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3), interval)


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
        # The only way to end a thread: it raises Overdue when it next runs a line of Python.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Overdue))
        raise Overdue
    if errors:
        raise errors[0]
    return results[0]
