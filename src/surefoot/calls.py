"""Calls of other people's code, such as a reward function, a judge, an environment or a chat template: with a deadline, and
several at once.

Python can't stop a function. So it is called in a thread, and nobody waits for it longer than until its deadline; a call that
goes on is counted, and ends with the process. Coroutines are cancelled, and code of this package asks ``overdue``. Signals,
timers and handlers stay the program's own. A call that holds the interpreter's lock, as a regular expression or an extension in
C may, delays everything until it returns. This module imports no torch.
"""

import asyncio
import contextvars
import inspect
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, TypeVar

from surefoot.errors import SurefootError, cause_of

T = TypeVar("T")
Result = TypeVar("Result")
MOST_LEFT = 100
"""calls that may have been left behind when others begin"""
GRACE = 0.2
"""seconds after a deadline in which requests and coroutines, which end by themselves then, may do so"""

_idle: list[SimpleQueue[Callable[[], None]]] = []
"""the inboxes of threads without work. The last one gets the next call: calls one after another have the same thread"""
_left: list[tuple[str, Future[Any]]] = []
"""names and results of calls that were left behind"""


class DeadlineExceeded(Exception):
    """The deadline passed. The text counts the calls that can't be stopped; "" if there are none."""


class _Deadline:
    """The time by ``time.monotonic`` until which calls may take; −∞ once nobody waits for them."""

    def __init__(self, ends: float) -> None:
        self.ends = ends


_deadlines: contextvars.ContextVar[tuple[_Deadline, ...]] = contextvars.ContextVar("deadlines", default=())
"""those of this call and of the calls around it"""


def overdue() -> bool:
    """Whether nobody waits any more for the call that this thread makes."""
    return _time_left(_deadlines.get()) <= 0


def _time_left(deadlines: Sequence[_Deadline]) -> float:
    return min((deadline.ends for deadline in deadlines), default=math.inf) - time.monotonic()


class Threads:
    """Calls in threads that don't keep the process alive: at most ``at_once`` at the same time, begun in their order.

    A call has the context variables of its caller. None begins after the deadlines.
    """

    def __init__(self, at_once: int = 1, deadlines: tuple[_Deadline, ...] = ()) -> None:
        self.at_once, self.deadlines = at_once, deadlines
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._busy, self._lock = 0, threading.Lock()

    def begin(self, call: Callable[[], Result]) -> Future[Result]:
        """Begin a call, or let it wait for the others."""
        future: Future[Result] = Future()
        context = contextvars.copy_context()
        context.run(_deadlines.set, self.deadlines)
        with self._lock:
            self._waiting.append((partial(context.run, call), future))
            if self._busy == self.at_once:
                return future
            self._busy += 1
        try:
            inbox = _idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            threading.Thread(target=_serve, args=(inbox,), daemon=True).start()
        inbox.put(partial(self._work, inbox))
        return future

    def stop(self) -> None:
        """Begin nothing of what still waits."""
        with self._lock:
            self._waiting.clear()

    def _work(self, inbox: "SimpleQueue[Callable[[], None]]") -> None:
        following = self._next()
        if following is None:  # another thread was faster
            _idle.append(inbox)
        while following is not None:
            call, future = following
            try:
                settle: Callable[[], None] = partial(future.set_result, call())
            except BaseException as error:
                expected = isinstance(error, (Exception, SystemExit, KeyboardInterrupt))  # not a CancelledError
                settle = partial(future.set_exception, error if expected else RuntimeError(cause_of(error)))
            following = self._next()
            if following is None:
                _idle.append(inbox)  # before the result is there, so that the caller's next call finds it
            settle()

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        """What waits longest; None ends the work of a thread."""
        with self._lock:
            if not self._waiting or _time_left(self.deadlines) <= 0:
                self._busy -= 1
                return None
            self._waiting[0][1].set_running_or_notify_cancel()
            return self._waiting.popleft()


def in_threads(
    call: Callable[[T], Result], items: Sequence[T], at_once: int, seconds: float = math.inf, name: str = "a call"
) -> list[Result]:
    """``call(item)`` for every item, in their order, at most ``at_once`` at the same time.

    seconds   deadline of all calls together, which that of a call around them may precede. Without any, one call at a time runs
              in this thread
    name      of the calls, for messages about those that were left behind

    Raises the error of the first item that has one, once the calls in progress are over; DeadlineExceeded when they take too
    long. No further call is begun then, nor after an exception in this thread.
    """
    if seconds == math.inf and min(at_once, len(items)) <= 1:
        results = []
        for item in items:
            if overdue():
                raise DeadlineExceeded
            results.append(call(item))
        return results
    if len(left := calls_left()) >= MOST_LEFT:
        names = ", ".join(f"{count} of {of}" for of, count in Counter(left).most_common(3))
        raise SurefootError(f"{len(left)} calls are still running after their deadlines ({names}); start the process again")
    deadline = _Deadline(time.monotonic() + seconds)
    deadlines = (*_deadlines.get(), deadline)
    threads = Threads(at_once, deadlines)
    grace = GRACE / len(deadlines)  # calls within calls are over first
    futures = [threads.begin(partial(call, item)) for item in items]
    try:
        late = wait(futures, _limit(_time_left(deadlines)), FIRST_EXCEPTION).not_done
        threads.stop()
        wait([future for future in futures if future.running()], _limit(_time_left(deadlines) + grace))
    finally:
        threads.stop()
        deadline.ends = -math.inf
        _left.extend((name, future) for future in futures if future.running())
    for future in futures:
        if future.done():
            future.result()
    if late:  # also what was over soon after: a part of it may not have begun
        hanging = sum(future.running() for future in futures)
        calls = f"{hanging} {'call' if hanging == 1 else 'calls'}"
        raise DeadlineExceeded(f"{calls} can't be stopped and will run until this process ends" if hanging else "")
    return [future.result() for future in futures]


def _limit(seconds: float) -> float | None:
    return None if seconds == math.inf else max(0.0, seconds)


def with_deadline(seconds: float, call: Callable[[], Result], name: str = "a call") -> Result:
    """Return ``call()``, made in a thread; raise DeadlineExceeded when it takes longer than ``seconds``."""
    return in_threads(lambda _: call(), (None,), 1, seconds, name)[0]


def left_behind(error: DeadlineExceeded) -> str:
    """The text of the error in parentheses, to follow the limit in a message."""
    return f" ({error})" if str(error) else ""


def calls_left() -> list[str]:
    """The names of calls that are still running after their deadline."""
    _left[:] = [(name, future) for name, future in _left if not future.done()]
    return [name for name, _ in _left]


def wait_for(awaitables: Sequence[Awaitable[Result]]) -> list[Result]:
    """The results of awaitables that run together; cancelled, with DeadlineExceeded, at the deadline of this thread's call."""

    async def one(awaitable: Awaitable[Result]) -> Result:
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop's thread
            raise RuntimeError(cause_of(error)) from error

    seconds = _limit(_time_left(_deadlines.get()))

    async def together() -> list[Result]:
        try:
            async with asyncio.timeout(seconds) as limit:
                return list(await asyncio.gather(*map(one, awaitables)))
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceeded from None
            raise

    return asyncio.run_coroutine_threadsafe(together(), _event_loop()).result()


def settled(value: Any) -> Any:
    """The result of an awaitable; any other value unchanged."""
    return wait_for([value])[0] if inspect.isawaitable(value) else value


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One event loop in a thread of its own for all calls: a client that a function keeps belongs to the loop that it began in,
    and a notebook already runs a loop in the main thread.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
    return loop


def _serve(inbox: "SimpleQueue[Callable[[], None]]") -> None:
    while True:
        inbox.get()()


def _forget_threads() -> None:
    """In a child process, which has none of its parent's threads."""
    _idle.clear()
    _left.clear()
    _event_loop.cache_clear()


os.register_at_fork(after_in_child=_forget_threads)
