"""Saying before training begins whether a reward function can work here, and how long it may take."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from surefoot.verifiers.killable import cores

Columns = Mapping[str, Sequence[Any]]
Times = Callable[[Mapping[str, Any], Columns], int]
Function = TypeVar("Function", bound=Callable[..., object])


def ready(check: Callable[[], None]) -> Callable[[Function], Function]:
    """Give a function the attribute ``ready``, which is called before training begins, and raises where it can't work here."""

    def marked(function: Function) -> Function:
        function.ready = check  # type: ignore[attr-defined]
        return function

    return marked


def _once(arguments: Mapping[str, Any], columns: Columns) -> int:
    return 1


def bounded(times: Times = _once) -> Callable[[Function], Function]:
    """Give a function with ``seconds`` and so many ``workers`` the attribute ``longest``: how many seconds so many responses
    take if each of them takes all of its time.

    times   how often a response may take ``seconds``, by the arguments and by the columns of the rows; once, as a rule
    """

    def marked(function: Function) -> Function:
        usual = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}

        def longest(count: int, arguments: Mapping[str, Any], columns: Columns) -> float:
            given = {**usual, **arguments}
            return -(-count // (given["workers"] or cores())) * float(given["seconds"]) * times(given, columns)

        function.longest = longest  # type: ignore[attr-defined]
        return function

    return marked
