"""Saying before training begins whether a reward function can work here."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def ready(check: Callable[[], None]) -> Callable[[Function], Function]:
    """Give a function the attribute ``ready``, which is called before training begins, and raises where it can't work here."""

    def marked(function: Function) -> Function:
        function.ready = check  # type: ignore[attr-defined]
        return function

    return marked
