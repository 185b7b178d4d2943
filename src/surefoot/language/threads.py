"""Calls that wait for something else, such as a server, made at the same time in threads."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

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
