"""Calls that wait for something else, such as a server, made in threads: several at the same time, or one beside other work."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from surefoot.language.deadline import interrupt

T = TypeVar("T")
Result = TypeVar("Result")


def in_threads(call: Callable[[T], Result], items: Sequence[T], at_once: int) -> list[Result]:
    """``call(item)`` for every item, in their order, at most ``at_once`` at the same time; one at a time in this thread.

    Raises the error of the first item that has one, once the calls in progress are over; no further call is begun. An exception
    in this thread, such as a deadline's, interrupts the calls.
    """
    if min(at_once, len(items)) <= 1:
        return [call(item) for item in items]
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    numbers, lock, over = itertools.count(), threading.Lock(), threading.Event()

    def work() -> None:
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

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(at_once, len(items)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        over.set()
        for thread in threads:
            interrupt(thread)
        raise
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(items))]


class Background(Generic[Result]):
    """A call that runs in a thread from now on."""

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

    def wait(self) -> None:
        """Return when the call is over."""
        self._thread.join()

    def result(self) -> Result:
        """What the call returned, when it is over. Raises its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def stop(self) -> None:
        """Interrupt the call, and don't wait for it."""
        interrupt(self._thread)
