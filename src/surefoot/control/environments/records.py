"""What a checkpoint keeps of an environment: the actions of an episode to replay, hashes of what it returned, and its state.

A simulator's inner state can't be saved. An episode is a function of its seed and actions, unless something outlives episodes:
that is what ``state_dict`` and ``load_state_dict`` of an environment or its wrappers are for.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from surefoot.control.environments.observations import copied
from surefoot.control.spaces import MASK, Observations, SpaceError, action_dtype
from surefoot.errors import SurefootError, cause_of
from surefoot.store.source import Kept

OBSERVATIONS, MASKS, REWARDS, ENDS = KINDS = ("observations", "action masks", "rewards", "ends of episodes")
"""what is compared"""
TOGETHER = 64
"""pieces that are hashed at once"""
LARGE = 4096
"""bytes of a piece that does not wait for others"""
SAVED, LOADED = HOOK = ("state_dict", "load_state_dict")
KIND, OF = "$kind", "of"
"""keys of a saved value that JSON does not have"""


class Record:
    """An episode so far: its number, its actions, and hashes of all that it returned.

    start   the state before its reset, of environments that have ``state_dict``
    """

    def __init__(self, number: int, start: Any = None) -> None:
        self.number, self.start = number, start
        self.actions: list[Any] = []
        self._hashes = {kind: hashlib.sha256() for kind in KINDS}
        self._pieces: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
        """what is not in the hashes yet"""

    def add(self, kind: str, content: bytes) -> None:
        """Add to a hash, which takes many small pieces at once in a fraction of the time."""
        pieces = self._pieces[kind]
        pieces.append(content)
        if len(pieces) == TOGETHER or len(content) >= LARGE:
            self._hash(kind)

    def _hash(self, kind: str) -> None:
        self._hashes[kind].update(b"".join(self._pieces[kind]))
        self._pieces[kind].clear()

    def hashes(self) -> dict[str, str]:
        """The hash of each kind, in hexadecimal digits."""
        for kind in KINDS:
            self._hash(kind)
        return {kind: each.hexdigest() for kind, each in self._hashes.items()}

    def add_observations(self, observations: Observations, row: Any = ..., acting: bool = True) -> None:
        """Add observations, of one row or of all; and the action masks, if actions follow."""
        for path, values in observations.items():
            if path != MASK or acting:
                self.add(MASKS if path == MASK else OBSERVATIONS, values[row].tobytes())

    def saved(self, dtype: Any) -> dict[str, Any]:
        """What a checkpoint has of it."""
        return {
            "number": self.number,
            "start": self.start,
            "actions": np.array(self.actions, dtype),
            "hashes": self.hashes(),
        }

    def difference(self, hashes: Mapping[str, str]) -> str:
        """What a replay returned differently, in words: "rewards and ends of episodes"; empty if nothing."""
        return " and ".join(kind for kind, digits in self.hashes().items() if digits != hashes.get(kind))


class Replayed:
    """Environments that a checkpoint restores by replaying the last whole episode of each and the present one.

    It compares hashes of what both returned. State that outlives an episode is loaded with ``load_state_dict`` of an
    environment or its wrappers, if they have that. A subclass has ``begin``, which resets one environment to an episode, and
    ``repeat``, which takes one action in it and returns whether its episode ended.
    """

    count: int
    """rows"""
    size = 1
    """rows of each environment: its agents"""
    returns: tuple[str, ...] = ()
    """names of the numbers in its infos that are the returns of single agents"""
    observations: Observations
    begin: Callable[[int, int], None]
    repeat: Callable[[int, Any], bool]

    def __init__(self, environments: list[Any], action_space: Any, name: str) -> None:
        claim(environments, self, name)
        self.environments, self._dtype = environments, action_dtype(action_space)
        self.hooks = [Hook(environment) for environment in environments]
        self.records = [Record(-1) for _ in environments]
        """the present episodes"""
        self.whole: list[Record | None] = [None for _ in environments]
        """the last whole episodes"""
        self._kept = [Kept(partial(wrapped, environment)) for environment in environments]
        self._forgotten: dict[int, str] = {}

    def reset(self) -> Observations:
        for index in range(len(self.environments)):
            self.begin_next(index)
        return copied(self.observations)

    def rows_of(self, index: int) -> range:
        """The rows of an environment."""
        return range(index * self.size, (index + 1) * self.size)

    def begin_record(self, index: int, episode: int) -> None:
        """Begin the record of an episode, before the reset; it has the state of an environment that saves one."""
        try:
            start = self.hooks[index].save()
        except Exception as error:
            if self.records[index].number >= 0 or isinstance(error, SpaceError):
                raise
            start = None  # before the first reset it may have none
        self.records[index] = Record(episode, start)

    def begin_next(self, index: int, whole: bool = False) -> None:
        """Reset one environment to its next episode; ``whole``: the present one has ended."""
        if whole:
            self.whole[index] = self.records[index]
        self.begin(index, self.records[index].number + 1)

    def state_dict(self) -> dict[str, Any]:
        """``rows``: the present and the last whole episode of each environment, at its first row."""
        rows: list[Any] = [None] * self.count
        for index, (now, past, kept) in enumerate(zip(self.records, self.whole, self._kept, strict=True)):
            whole = None if past is None else past.saved(self._dtype)
            rows[index * self.size] = {**now.saved(self._dtype), "whole": whole, "attributes": kept.changed()}
        return {"rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Observations, dict[int, str]]:
        """Restore each environment; what was different in those that did not replay, which begin a new episode."""
        if "rows" not in state:  # saved by a vector environment
            return self.reset(), dict.fromkeys(range(self.count), "")
        check_saved_count(len(state["rows"]), self.count)
        lost, self._forgotten = dict[int, str](), {}
        for index, row in enumerate(as_arrays(state["rows"][:: self.size])):
            past = row["whole"]
            different = "" if past is None else self._replay(index, past, True)
            self.whole[index] = None if different or past is None else self.records[index]
            if different := different or self._replay(index, row, False):
                lost |= dict.fromkeys(self.rows_of(index), different)
                self.begin(index, row["number"] + 1)
            elif other := self._kept[index].unlike(row["attributes"]):
                self._forgotten[index * self.size] = other
        return copied(self.observations), lost

    def forgotten(self) -> dict[int, str]:
        """Environments that replayed but have other attributes than when they were saved -> these attributes."""
        return self._forgotten

    def close(self) -> None:
        """Close the environments."""
        close_all(self.environments)

    def _replay(self, index: int, saved: dict[str, Any], whole: bool) -> str:
        """Replay an episode, to its end if it was whole; return what was different, in words."""
        where, last = f"episode {saved['number']}", len(saved["actions"])
        try:
            if saved["start"] is not None:
                self.hooks[index].load(saved["start"])
            self.begin(index, saved["number"])
            for step, action in enumerate(saved["actions"], 1):
                if (ended := self.repeat(index, action)) != (whole and step == last):
                    return f"{where} {'ended' if ended else 'did not end'} after {step} steps"
        except Exception as error:
            return f"{where}: {error if isinstance(error, SurefootError) else cause_of(error)}"
        different = self.records[index].difference(saved["hashes"])
        return different and f"{where} had other {different}"


def check_saved_count(saved: int, count: int) -> None:
    """Raise SurefootError if a checkpoint has another number of environments than the recipe."""
    if saved != count:
        raise SurefootError(f"rollout.environments={count}: the checkpoint has {saved} environments; set that many")


# ---- state of its own -------------------------------------------------------------------------------------------------


def has_hook(environment: Any) -> bool:
    """Whether an object saves and loads its state."""
    return all(callable(getattr(environment, name, None)) for name in HOOK)


def wrapped(environment: Any) -> Iterator[Any]:
    """An environment, and those in it from the outside to the inside: what its attributes have that resets and steps."""
    found, seen = [environment], {id(environment)}
    for each in found:
        yield each
        slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
        for value in [*getattr(each, "__dict__", {}).values(), *(getattr(each, name, None) for name in slots)]:
            value = [*value.values()] if isinstance(value, dict) else value
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = inner.__self__ if isinstance(inner, MethodType) else inner
                if id(inner) not in seen and all(callable(getattr(type(inner), name, None)) for name in ("reset", "step")):
                    seen.add(id(inner))
                    found.append(inner)


_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""id of an environment in use, or of one in it -> the object that steps it"""


def claim(environments: Iterable[Any], owner: Any, name: str) -> None:
    """Mark environments as stepped by ``owner``. Raises SurefootError if two are the same inside, or another steps one."""
    mine: dict[int, int] = {}
    for index, environment in enumerate(environments):
        for each in wrapped(environment):
            before = mine.setdefault(id(each), index)
            if before != index or _owners.get(id(each), owner) is not owner:
                what = f"environments {before} and {index} are" if before != index else "another part of the run steps"
                raise SurefootError(
                    f"task={name!r}: {what} the same {type(each).__name__} inside; make a new one on every call"
                )
    _owners.update(dict.fromkeys(mine, owner))


def close_all(environments: Iterable[Any]) -> None:
    """Close environments and end the claims on them. Errors are ignored, because their steps are done and must not be lost."""
    for environment in environments:
        for each in wrapped(environment):
            _owners.pop(id(each), None)
        with suppress(Exception):
            environment.close()


@contextmanager
def closing(environment: Any) -> Iterator[Any]:
    """Close an environment at the end, as ``close_all`` does."""
    try:
        yield environment
    finally:
        close_all([environment])


class Hook:
    """``state_dict`` and ``load_state_dict`` of an environment and of each wrapper that has them."""

    def __init__(self, environment: Any) -> None:
        layers = [each for each in wrapped(environment) if has_hook(each)]
        # A wrapper may pass on the methods of what it wraps.
        self.layers = [each for each in layers if getattr(each.state_dict, "__self__", each) is each]

    def save(self) -> list[Any] | None:
        """The states as a checkpoint can hold them, from the outside to the inside; None without any."""
        return [saved(each.state_dict()) for each in self.layers] or None

    def load(self, states: Any) -> None:
        """Load saved states. Raises SpaceError if there are others than layers that load one."""
        if len(states) != len(self.layers):
            raise SpaceError(f"state_dict in {len(self.layers)} layers, where {len(states)} were saved")
        for layer, state in zip(self.layers, states, strict=True):
            layer.load_state_dict(restored(state))


def saved(value: Any, where: str = "") -> Any:
    """A copy of a state that JSON and tensors can hold, from which ``restored`` makes the same types.

    Raises SpaceError, with its place, for a value that can't be saved.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [saved(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: saved(each, f"{where}[{key!r}]") for key, each in value.items()}
    if isinstance(value, tuple) and type(value) is tuple:
        return {KIND: "tuple", OF: saved(list(value), where)}
    if isinstance(value, Mapping):
        return {KIND: "dict", OF: [saved(pair, where) for pair in value.items()]}
    if isinstance(value, bytes):
        return {KIND: "bytes", OF: np.frombuffer(bytearray(value), np.uint8)}
    if hasattr(value, "detach"):
        try:
            return {KIND: "tensor", OF: saved(np.array(value.detach().cpu().numpy()))}
        except TypeError:  # such as bfloat16
            raise SpaceError(f"a state_dict with a tensor of {value.dtype} at {where}, which can't be saved") from None
    if isinstance(value, (np.ndarray, np.generic)) and not (value.dtype.hasobject or value.dtype.fields):
        kind = "array" if isinstance(value, np.ndarray) else "number"
        content = np.frombuffer(bytearray(value.tobytes()), np.uint8)  # any type and shape, to the bit
        return {KIND: kind, "dtype": value.dtype.str, "shape": list(value.shape), OF: content}
    raise SpaceError(
        f"a state_dict with a {type(value).__name__}{f' at {where}' if where else ''}, which can't be saved; return numbers, "
        "text, arrays, tensors, and dicts, lists and tuples of these"
    )


def restored(value: Any) -> Any:
    """The reverse of ``saved``, also after its arrays have become tensors in a checkpoint."""
    if isinstance(value, list):
        return [restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: restored(each) for key, each in value.items()}
    return _RESTORED[value[KIND]](value)


def _array(value: dict[str, Any]) -> Any:
    return np.frombuffer(np.asarray(value[OF]).tobytes(), value["dtype"]).reshape(value["shape"]).copy()


def _tensor(value: dict[str, Any]) -> Any:
    import torch

    return torch.from_numpy(_array(value[OF]))


_RESTORED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tuple": lambda value: tuple(restored(value[OF])),
    "dict": lambda value: dict(restored(value[OF])),
    "bytes": lambda value: np.asarray(value[OF]).tobytes(),
    "array": _array,
    "number": lambda value: _array(value)[()],
    "tensor": _tensor,
}


def as_arrays(tree: Any) -> Any:
    """The dicts and lists of a saved state, with arrays for tensors."""
    if isinstance(tree, dict):
        return {name: as_arrays(below) for name, below in tree.items()}
    if isinstance(tree, list):
        return [as_arrays(below) for below in tree]
    return np.asarray(tree) if hasattr(tree, "__array__") else tree
