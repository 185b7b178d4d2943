"""Run checks in separate processes with a time limit, so that a response that hangs scores 0 and stops nothing else."""

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from surefoot.calls import in_threads
from surefoot.errors import SurefootError
from surefoot.files import available_cores
from surefoot.processes import Child, ChildEnded, ChildLate, end

STARTUP = 120.0
"""extra seconds for the first check of a new process, which imports packages first"""
_IDLE: "SimpleQueue[Child]" = SimpleQueue()
"""processes kept for the next call, because starting one takes a second"""

Columns = Mapping[str, Sequence[Any]]
Times = Callable[[Mapping[str, Any], Columns], int]
Function = TypeVar("Function", bound=Callable[..., object])


def check_in_processes(kind: str, rows: Sequence[tuple[str, Any]], seconds: float, workers: int) -> list[float]:
    """The score of each (response, answer) by the check named ``kind``; 0 if the check took longer than ``seconds``.

    Raises SurefootError for a row whose answer is invalid, and for invalid limits.
    """
    check_limits(seconds, workers)
    replies = in_threads(lambda row: _check(kind, row, seconds), rows, workers or available_cores())
    for number, reply in enumerate(replies, 1):
        if "error" in reply:
            raise SurefootError(f"response {number}: {reply['error']}")
    return [float(reply["value"]) for reply in replies]


def _check(kind: str, row: tuple[str, Any], seconds: float) -> dict[str, Any]:
    limit = seconds
    try:
        child = _IDLE.get_nowait()
    except Empty:
        child = Child("surefoot.verifiers.worker:serve", silent=True)
        limit += STARTUP
    try:
        with contextlib.suppress(OSError):  # it has ended, and gives no reply
            child.connection.send_bytes(json.dumps([kind, seconds, *row]).encode())
        # JSON, because what a response made of the process must not be unpickled here
        reply = dict(json.loads(child.receive(limit, Connection.recv_bytes)))
    except (ChildLate, ChildEnded):  # out of memory, or by its own alarm
        end([child])
        return {"value": 0.0}
    except BaseException:
        end([child])
        raise
    _IDLE.put(child)
    return reply


def close() -> None:
    """Kill all idle processes."""
    with contextlib.suppress(Empty):
        while True:
            end([_IDLE.get_nowait()])


Finalize(None, close, exitpriority=0)  # when this process exits, not a fork of it


# ---- limits of reward functions ---------------------------------------------------------------------------------------


LONGEST = 86_400
"""seconds that a limit may be, at most"""


def check_number(
    name: str, value: Any, *, above: float | None = None, most: float = sys.float_info.max, whole: bool = False
) -> None:
    """Raise SurefootError unless a setting is a finite number of at least 0, and above ``above``."""
    kind = int if whole else (int, float)
    low = f"above {above:g}" if above is not None else "0 or more"
    if (
        isinstance(value, bool)
        or not isinstance(value, kind)
        or not (0 <= value <= most)
        or (above is not None and value <= above)
    ):
        limit = f" and at most {most:,.0f}" if most < sys.float_info.max else ""
        raise SurefootError(f"{name}={value!r}: must be a {'whole ' if whole else ''}number {low}{limit}")


def check_text(name: str, value: Any) -> None:
    """Raise SurefootError unless a setting is text."""
    if not isinstance(value, str):
        raise SurefootError(f"{name}={value!r}: must be text")


def check_count(column: Sequence[Any], name: str, count: int | None) -> None:
    """Raise SurefootError unless a column has an entry for each of ``count`` responses; None: any number."""
    if count is not None and len(column) != count:
        raise SurefootError(f"{name}: has {len(column)} entries for {count} responses; give one for each")


def check_limits(seconds: Any, workers: Any) -> None:
    """Raise SurefootError for a time limit or a number of processes with which nothing could be checked."""
    check_number("seconds", seconds, above=0, most=LONGEST)
    check_number("workers", workers, most=10_000, whole=True)


def reward_function(
    check: Callable[..., object], *, ready: Callable[[], None] | None = None, times: Times = lambda arguments, columns: 1
) -> Callable[[Function], Function]:
    """Set what ``FunctionReward`` asks of a function before training, as its attributes.

    check   for ``valid``: checks settings and rows, which it takes by name; those that the function lacks are not passed
    ready   raises if the function can't work here
    times   for ``longest``, of a function with ``seconds`` and ``workers``: how often one response may take ``seconds``, from
            the arguments and the columns of the rows; by default once
    """

    def decorate(function: Function) -> Function:
        defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}

        def valid(arguments: Mapping[str, Any], columns: Columns) -> None:
            used = {name: value for name, value in {**columns, **arguments}.items() if name in defaults}
            if "seconds" in defaults:
                check_limits(**{name: used.get(name, defaults[name]) for name in ("seconds", "workers")})
            for name, default in defaults.items():
                if isinstance(default, bool) and not isinstance(used.get(name, False), bool):
                    raise SurefootError(f"{name}={used[name]!r}: must be true or false")
            try:
                check(**used)
            except SurefootError as error:
                raise SurefootError(str(error).replace("(of response ", "(of row ", 1)) from None

        def longest(count: int, arguments: Mapping[str, Any], columns: Columns) -> float:
            used = {**defaults, **arguments}
            return -(-count // (used["workers"] or available_cores())) * float(used["seconds"]) * times(used, columns)

        attributes = {"valid": valid, "ready": ready, "longest": longest if "seconds" in defaults else None}
        for name, attribute in attributes.items():
            setattr(function, name, attribute)
        return function

    return decorate
