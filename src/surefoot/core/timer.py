"""Where the seconds of a run go."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


class Span:
    """One visit of a section of time."""

    seconds = 0.0
    """set when it ends"""


class SectionObserver(Protocol):
    """Is called at the begin and end of every section of time, outside of what is measured."""

    def enter(self, path: tuple[str, ...]) -> None: ...
    def leave(self, path: tuple[str, ...]) -> None: ...


class Timer:
    """The seconds of a run by section: collecting, learning; and by the sections in them, such as acting.

    A section belongs to the one that is open when it begins. The details cost about a microsecond each, so only a profile has
    them. Only the thread that trains may open sections.
    """

    def __init__(self) -> None:
        self.detailed = False
        """whether ``detail`` and ``timed`` measure"""
        self.seconds: dict[tuple[str, ...], float] = {}
        """by path, such as (collecting, acting)"""
        self.calls: dict[tuple[str, ...], int] = {}
        self.synchronise: Callable[[], None] | None = None
        """waits until the device has done what was launched, so that its time counts where it was launched"""
        self.observer: SectionObserver | None = None
        self._path: tuple[str, ...] = ()

    @contextmanager
    def section(self, name: str) -> Iterator[Span]:
        """Measure a block, whether the timer is detailed or not."""
        span, outer = Span(), self._path
        path = self._path = (*outer, name)
        if self.observer is not None:
            self.observer.enter(path)
        start = time.perf_counter()
        try:
            yield span
        finally:
            if self.synchronise is not None:
                self.synchronise()
            span.seconds = time.perf_counter() - start
            self.seconds[path] = self.seconds.get(path, 0.0) + span.seconds
            self.calls[path] = self.calls.get(path, 0) + 1
            if self.observer is not None:
                self.observer.leave(path)
            self._path = outer

    def detail(self, name: str) -> AbstractContextManager[Any]:
        """Measure a block if the timer is detailed."""
        return self.section(name) if self.detailed else UNTIMED

    def timed(self, name: str, function: Callable[P, Result]) -> Callable[P, Result]:
        """The function, whose calls are measured if the timer is detailed; otherwise the function itself."""
        if not self.detailed:
            return function

        def measured(*args: P.args, **kwargs: P.kwargs) -> Result:
            with self.section(name):
                return function(*args, **kwargs)

        return measured


UNTIMED: AbstractContextManager[None] = nullcontext()
