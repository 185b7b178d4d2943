"""Hashes of what the user's code keeps from one call to the next, which no checkpoint holds.

That is attributes of objects and classes, globals, and the defaults and closures of functions, where they are numbers, texts,
arrays, or collections of these.
"""

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from surefoot.core.seeding import RunningHash
from surefoot.store.source import installed

LARGEST = 10_000
"""entries of a collection that is still hashed, with those of the collections in it"""
LOST = (
    "did not come back: no checkpoint holds attributes and globals of your code; if rewards or episodes depend on them, this "
    "resume is not exact"
)
PLAIN = (bool, int, float, str, bytes, type(None), np.ndarray, np.generic)
COLLECTIONS = (list, tuple, dict, deque)


class Kept:
    """What code of the user keeps, compared with what it kept when this was made."""

    def __init__(self, things: Callable[[], Iterable[Any]]) -> None:
        self.things, self.before = things, attributes(things())

    def changed(self) -> dict[str, str]:
        """The hashes that are new or other ones, for a checkpoint."""
        return {name: digest for name, digest in attributes(self.things()).items() if self.before.get(name) != digest}

    def unlike(self, saved: Mapping[str, str]) -> str:
        """The names of those that have another hash now than in a checkpoint, in words; empty if none."""
        now = attributes(self.things())
        return ", ".join(sorted(name for name, digest in saved.items() if now.get(name) != digest))

    def lost(self, saved: Mapping[str, str]) -> list[str]:
        """The line of a resume about them, if there is one."""
        return [f"{names} {LOST}" for names in filter(None, [self.unlike(saved)])]


def kept_by(world: Any, objects: Mapping[str, Any] | None) -> Kept:
    """What the code of a run keeps.

    objects  functions and classes that were passed as objects, by field
    """
    things = [*(objects or {}).values(), *getattr(world, "user_code", ())]
    return Kept(lambda: things)


def attributes(things: Iterable[Any]) -> dict[str, str]:
    """Hashes by owner and name, as in ``Curriculum.level``, of objects, classes and functions, and of those of the user's that
    they use. Objects of Gymnasium are left out: what they keep, clocks and counts of episodes, changes no episode.
    """
    found: defaultdict[str, RunningHash] = defaultdict(RunningHash)
    waiting, seen = list(things), set[int]()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or (isinstance(thing, FunctionType) and not _is_own(thing)):
            continue
        seen.add(id(thing))
        if isinstance(thing, FunctionType):
            used = {name: thing.__globals__[name] for name in _names(thing.__code__) if name in thing.__globals__}
            held = {**vars(thing), "defaults": thing.__defaults__}
            with suppress(ValueError):  # an empty cell
                cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
                held |= {name: cell.cell_contents for name, cell in cells}
            _add(found, thing.__qualname__, held)
            _add(found, thing.__module__.removeprefix("_surefoot_"), used)
            waiting += _own_in([*used.values(), *held.values()])
        elif isinstance(thing, (MethodType, partial)):
            waiting += [thing.func, *thing.args] if isinstance(thing, partial) else [thing.__self__, thing.__func__]
        elif isinstance(thing, type):
            for kind in filter(_is_own, thing.__mro__):
                _add(found, kind.__name__, vars(kind))
                waiting += _own_in(vars(kind).values())
        elif type(thing).__module__.partition(".")[0] not in ("gymnasium", "surefoot"):
            held = getattr(thing, "__dict__", {})
            _add(found, type(thing).__name__, held)
            waiting += [type(thing), *_own_in(held.values())]
    return {name: each.digits() for name, each in found.items()}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _add(found: defaultdict[str, RunningHash], owner: str, values: Mapping[str, Any]) -> None:
    for name, value in list(values.items()):
        if isinstance(value, COLLECTIONS):
            inner = value.values() if isinstance(value, dict) else value
            hashed = len(value) + sum(len(each) for each in inner if isinstance(each, COLLECTIONS)) <= LARGEST
        else:
            hashed = isinstance(value, PLAIN) or type(value).__name__ == "Tensor"
        if hashed and not name.startswith("__"):
            with suppress(Exception):  # from the first entry on that is something else
                found[f"{owner}.{name}"].add(list(value) if isinstance(value, deque) else value)


def _own_in(values: Iterable[Any]) -> list[Any]:
    """Objects, classes and functions of the user among values, or in collections among them."""
    found = []
    for value in values:
        each = (
            list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else [value]
        )
        found += [one for one in each if _is_own(one)] if len(each) <= LARGEST else []
    return found


def _is_own(thing: Any) -> bool:
    """Whether an object, class or function is of a module of the user: neither Surefoot's nor installed."""
    kind = thing if isinstance(thing, (type, FunctionType)) else type(thing)
    name = kind.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or (isinstance(file, str) and name.partition(".")[0] != "surefoot" and not _is_installed(file))


@cache
def _is_installed(file: str) -> bool:
    return installed(Path(file))
