"""Calls that may hang or wait, such as a reward function or a server: with a deadline, in a thread, or several at once."""

import ctypes
import itertools
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

from surefoot.signals import is_foreign, take

T = TypeVar("T")
Result = TypeVar("Result")
REPEAT = 0.1
"""seconds after which the deadline is raised again, for code that catches everything"""

WHOLE = frozenset(
    function.__code__
    for function in (
        threading.Thread.start,
        threading.Condition.__enter__,
        threading.Condition.__exit__,
        ThreadPoolExecutor.submit,
        BaseProcess.start,
        subprocess.Popen.__init__,
    )
)
"""functions that are not interrupted, because they would leave a lock, a thread or a process behind: the next alarm raises"""


class DeadlineExceeded(BaseException):
    """The deadline passed. Not an Exception, so that the interrupted code does not catch it as an error of its own."""


def with_deadline(seconds: float, call: Callable[[], Result]) -> Result:
    """Return ``call()``; raise DeadlineExceeded when it takes longer than ``seconds``.

    In the main thread an alarm interrupts Python loops, sleeps, locks, regular expressions and big integers. All of them check
    for signals; a watching thread could not stop them while they hold the interpreter's lock. The call does not run in a
    process, because a reward function may hold models, connections and closures, and its state must stay here. In another
    thread, or if C code handles the alarm, the call runs in a thread that is asked to end and left behind.
    A C extension that does not check for signals runs to its end; DeadlineExceeded is raised then.
    """
    if threading.current_thread() is threading.main_thread() and not is_foreign(signal.SIGALRM):
        return _by_alarm(seconds, call)
    background = Background(call)
    background.wait(seconds)
    if not background.over:
        background.stop()
        raise DeadlineExceeded
    return background.result()


def _by_alarm(seconds: float, call: Callable[[], Result]) -> Result:
    running, expired = True, False

    def expire(number: int, frame: FrameType | None) -> None:
        nonlocal expired
        if running and not _within(frame, WHOLE):
            expired = True
            raise DeadlineExceeded

    started = time.monotonic()
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    if 0 < left < seconds:
        return call()  # an alarm that is already set interrupts the call sooner
    give_back = take(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT)
        return call()
    except Exception as error:
        if expired:  # code that was interrupted may raise something else, such as a lock that it no longer holds
            raise DeadlineExceeded from error
        raise
    finally:
        running = False
        if signal.getsignal(signal.SIGALRM) is expire:  # else the call has set an alarm of its own
            signal.setitimer(signal.ITIMER_REAL, 0)
            give_back()
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3), interval)


def _within(frame: FrameType | None, functions: Container[CodeType]) -> bool:
    """Whether one of the functions is being called, by the call with the deadline."""
    while frame is not None and frame.f_code is not _by_alarm.__code__:
        if frame.f_code in functions:
            return True
        frame = frame.f_back
    return False


class Background(Generic[Result]):
    """A call that runs in a thread from now on, which does not keep the process alive."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self.seconds = 0.0
        """that the call took"""
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(call,), daemon=True)
        self._thread.start()

    def _work(self, call: Callable[[], Result]) -> None:
        began = time.perf_counter()
        try:
            self._results.append(call())
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - began

    @property
    def over(self) -> bool:
        """Whether the call has returned or failed."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Return when the call is over, or after some seconds."""
        self._thread.join(seconds)

    def result(self) -> Result:
        """What the call returned, when it is over. Raises its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def stop(self) -> None:
        """Raise DeadlineExceeded in the call when it next runs a line of Python, the only way to end it; don't wait for it."""
        if self._thread.ident is not None and self._thread.is_alive():
            number, error = ctypes.c_ulong(self._thread.ident), ctypes.py_object(DeadlineExceeded)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)


def in_threads(call: Callable[[T], Result], items: Sequence[T], at_once: int) -> list[Result]:
    """``call(item)`` for every item, in their order, at most ``at_once`` at the same time; one at a time in this thread.

    Raises the error of the first item that has one, once the calls in progress are over; no further call is begun. An exception
    in this thread, such as a deadline's, interrupts the calls.
    """
    count = min(at_once, len(items))
    if count <= 1:
        return [call(item) for item in items]
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    numbers, lock, over = itertools.count(), threading.Lock(), threading.Event()
    ended: SimpleQueue[bool] = SimpleQueue()  # False from each worker that ends; True interrupts all, in one step of C

    def work() -> None:
        try:
            while not over.is_set():
                with lock:
                    number = next(numbers)
                if number >= len(items):
                    return
                try:
                    results[number] = call(items[number])
                except BaseException as error:
                    errors[number] = error
                    over.set()
        finally:
            ended.put(False)

    def supervise() -> None:
        """Start and stop the workers: no alarm interrupts this thread between a worker's start and its place in the list."""
        workers = [Background(work) for _ in range(count)]
        for _ in workers:
            if ended.get():
                over.set()
                for worker in workers:
                    worker.stop()
                return

    try:
        Background(supervise).result()
    except BaseException:
        ended.put(True)
        raise
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(items))]


class ThreadPool(Generic[T, Result]):
    """Calls that wait for something else, begun before their results are needed: at most ``at_once`` at the same time.

    opened   what each thread holds while it works, such as a connection, as a context manager
    call     called in a thread with that and an item

    An item is called once while its result is kept. The threads end when nothing waits, and don't keep the process alive.
    """

    def __init__(
        self, opened: Callable[[], AbstractContextManager[Any]], call: Callable[[Any, T], Result], at_once: int
    ) -> None:
        self.opened, self.call, self.at_once = opened, call, at_once
        self.results: dict[T, Future[Result]] = {}
        self._waiting: deque[tuple[T, Future[Result]]] = deque()
        self._threads, self._lock = 0, threading.Lock()

    def begin(self, item: T) -> None:
        """Call the item, unless that is done or waits already."""
        with self._lock:
            if item in self.results:
                return
            future: Future[Result] = Future()
            self.results[item] = future
            self._waiting.append((item, future))
            if self._threads == self.at_once:
                return
            self._threads += 1
        Background(self._work)

    def take(self, item: T, ends: float) -> Result | None:
        """The result of an item, which is forgotten with it; None if it was not begun or failed, so that it is called again.

        ends   the time by ``time.monotonic`` until which the result must be there

        Raises DeadlineExceeded when it is too slow.
        """
        with self._lock:
            future = self.results.pop(item, None)
        if future is None:
            return None
        try:
            failed = future.exception(timeout=max(0.0, ends - time.monotonic()))
        except TimeoutError:
            raise DeadlineExceeded from None
        return None if failed else future.result()

    def _work(self) -> None:
        try:
            with self.opened() as opened:
                while (following := self._next()) is not None:
                    item, future = following
                    try:
                        future.set_result(self.call(opened, item))
                    except BaseException as error:
                        future.set_exception(error)
        except BaseException as error:  # nothing can be opened
            while (following := self._next()) is not None:
                following[1].set_exception(error)

    def _next(self) -> tuple[T, Future[Result]] | None:
        """What waits longest; None ends the thread."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._threads -= 1
            return None
