"""Which Gymnasium spaces are understood, the leaves an observation is made of, and how spaces are written to a file.

An observation, nested or not, is everywhere a flat dict of its leaves: path -> array. A space that is one leaf has the path
"observation"; the keys of a Dict and the indices of a Tuple are joined by dots. A mask of actions is one more entry.
"""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from surefoot.errors import SurefootError

Array = NDArray[Any]
Observations = dict[str, Array]
"""leaves of a batch of observations [B, *leaf], and the mask of actions [B, choices] where the task gives one"""

BARE = "observation"
MASK = "action_mask"
NOT_FINITE = "not finite as float32, which ends at ±3.4e38"
SMALLEST_IMAGE = 36
"""pixels on a side that the image network needs"""


def as_float32(numbers: Any) -> Array:
    """As float32, in which what is too large for it is infinite, without a warning: whoever looks for that will say so."""
    with np.errstate(over="ignore"):
        return np.asarray(numbers, np.float32)


class Misfit(ValueError):
    """Something does not fit its space. The text says what it is: "an observation of shape (3,) where …"."""


class Leaf:
    """One part of an observation that is not made of parts itself: a Box, Discrete, MultiDiscrete or MultiBinary.

    path     what it is called
    keys     how to get to it from the observation
    dtype    how a rollout keeps it: images as uint8, other Boxes as float32, the rest as integers
    bounds   smallest and largest entries of what counts in whole numbers
    """

    def __init__(self, path: str, keys: tuple[Any, ...], space: Any) -> None:
        self.path, self.keys, self.space = path, keys, space
        self.shape: tuple[int, ...] = space.shape
        self.bounds = _bounds(space)
        kind: Any = np.int64
        if isinstance(space, spaces.Box):
            kind = np.uint8 if is_image(space) else np.float32
        elif isinstance(space, spaces.MultiBinary):
            kind = np.int8
        self.dtype: np.dtype[Any] = np.dtype(kind)

    @property
    def vector(self) -> bool:
        """Whether it is a Box that is no image: what normalisers act on."""
        return self.dtype == np.float32

    def part_of(self, observation: Any) -> Any:
        """This part of an observation as the environment gives it; Misfit where it is missing."""
        for key in self.keys:
            try:
                observation = observation[key]
            except (KeyError, IndexError, TypeError):
                raise Misfit(f'an observation without "{self.path}"') from None
        return observation

    def read(self, observation: Any, batch: tuple[int, ...] = ()) -> Any:
        """This part of one observation, or of a batch [*batch, *leaf]; Misfit where shape or kind are not the space's."""
        value = self.part_of(observation)
        if isinstance(value, (list, tuple)):
            value = self.array_of(value)
        expected = batch + self.shape if batch else self.shape
        shape = getattr(value, "shape", None)
        if shape is None and not expected and isinstance(value, (int, float)):
            shape = ()
        if shape != expected:
            got = f"type {type(value).__name__}" if shape is None else f"shape {shape}"
            raise Misfit(f"{self.named()} of {got} where its space says shape {expected}")
        if self.vector:
            return as_float32(value)
        self.check_kind(value)
        return value

    def array_of(self, numbers: Any) -> Array:
        """A list of numbers as the array that it stands for; Misfit where it stands for none."""
        try:
            found = np.asarray(numbers)
        except ValueError:
            raise Misfit(f"{self.named()} of lists that differ in length") from None
        if found.dtype.kind not in "biuf":
            raise Misfit(f"{self.named()} of a list that holds other than numbers")
        return found

    def check_kind(self, value: Any) -> None:
        """Misfit unless an image is of bytes, and whole numbers are whole and in their range."""
        found = np.asarray(value)
        if self.bounds is None:
            if found.dtype != np.uint8:
                raise Misfit(f"{self.named()} of {found.dtype} where its space says uint8")
            return
        low, high = self.bounds
        if found.dtype.kind not in "iub":
            raise Misfit(f"{self.named()} of {found.dtype} where its space counts in whole numbers")
        if not ((found >= low) & (found <= high)).all():
            raise Misfit(f"{self.named()} {_short(found)} outside {self.space}")

    def named(self) -> str:
        """How it is called in messages."""
        return f'an observation "{self.path}"' if self.keys else "an observation"


def _short(values: Array) -> str:
    text = " ".join(str(values).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _bounds(space: Any) -> tuple[Array, Array] | None:
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        start = np.asarray(space.start, np.int64)
        return start, start + np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec, np.int64) - 1
    return (np.asarray(0), np.asarray(1)) if isinstance(space, spaces.MultiBinary) else None


def is_image(space: spaces.Box) -> bool:
    """Whether a Box is read by the image network: bytes, [H, W] or with channels (or frames) first or last, big enough."""
    return space.dtype == np.uint8 and len(space.shape) in (2, 3, 4) and min(image_shape(space.shape)[1:]) >= SMALLEST_IMAGE


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether the last axis of an image counts channels: where it is smaller than the one two before it.

    [84, 84, 3] and [4, 84, 84, 3] have them last; [3, 84, 84], [4, 84, 84] and [84, 84] have not.
    """
    return len(shape) > 2 and shape[-1] < shape[-3]


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width) of an image; frames count as channels, and a flat image has one."""
    if channels_last(shape):
        shape = (*shape[:-3], shape[-1], *shape[-3:-1])
    return int(np.prod(shape[:-2])), shape[-2], shape[-1]


# ---- what is supported ------------------------------------------------------------------------------------------------


def leaves(space: gymnasium.Space[Any], task: str = "") -> dict[str, Leaf]:
    """The leaves of an observation space by their paths, in the space's order.

    Raises SurefootError, naming the leaf, where one is not supported.
    """
    where = f"task={task!r}: " if task else ""
    found: dict[str, Leaf] = {}
    for keys, part in _parts(space, ()):
        path = ".".join(str(key) for key in keys) or BARE
        named = f'leaf "{path}": {_named(part)}' if keys else _named(part)
        if not _supported(part):
            raise SurefootError(
                f"{where}observation space {named} is not supported{_why(part)}; Box, Discrete, MultiDiscrete, MultiBinary, "
                "and Dict and Tuple of these are; wrap the environment"
            )
        if path in found:
            raise SurefootError(f'{where}observation space leaf "{path}": there are two of that name; rename one')
        if path == MASK:
            raise SurefootError(
                f'{where}observation space leaf "{path}": is no observation; give masks in info["action_mask"] instead'
            )
        found[path] = Leaf(path, keys, part)
    if not found:
        raise SurefootError(f"{where}observation space {_named(space)} is empty; there is nothing to see")
    return found


def _parts(space: gymnasium.Space[Any], keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], gymnasium.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _parts(part, (*keys, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _parts(part, (*keys, index))
    else:
        yield keys, space


def _supported(space: gymnasium.Space[Any]) -> bool:
    known = isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))
    return known and 0 not in (space.shape or ())


def _why(space: gymnasium.Space[Any]) -> str:
    """What is odd about a space of a kind that is known."""
    return " (it has no entries)" if 0 in (space.shape or ()) else ""


def check_action_space(space: gymnasium.Space[Any], task: str) -> Any:
    """The space, if it is Discrete, MultiDiscrete, MultiBinary or a float Box; otherwise a SurefootError that names it."""
    if _supported(space) and not (isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating)):
        return space
    raise SurefootError(
        f"task={task!r}: action space {_named(space)} is not supported{_why(space)}; Discrete, MultiDiscrete, MultiBinary "
        "and float Box are"
    )


def _named(space: gymnasium.Space[Any]) -> str:
    return f"{type(space).__name__}{space.shape if isinstance(space, spaces.Box) else ''}"


def choices(action_space: gymnasium.Space[Any]) -> tuple[int, ...] | None:
    """Among how many each part of an action is chosen; None for a Box. A bit of MultiBinary is a choice of two."""
    if isinstance(action_space, spaces.Discrete):
        return (int(action_space.n),)
    if isinstance(action_space, spaces.MultiDiscrete):
        return tuple(int(n) for n in action_space.nvec.reshape(-1))
    if isinstance(action_space, spaces.MultiBinary):
        return (2,) * int(np.prod(action_space.shape))
    return None


def read_mask(mask: Any, sizes: tuple[int, ...] | None, batch: tuple[int, ...] = ()) -> Array:
    """A mask of actions as booleans [*batch, Σ sizes], True where allowed; Misfit unless every choice has one that is."""
    if sizes is None:
        raise Misfit("an action mask, but Box actions can't be masked")
    try:
        found = np.asarray(mask)
        allowed: Array = found != 0
    except ValueError:
        raise Misfit("an action mask that is no array of numbers") from None
    expected = (*batch, sum(sizes))
    if found.shape != expected:
        shape = f"length {found.shape[-1]}" if found.ndim == len(expected) else f"shape {found.shape}"
        wanted = f"length {expected[-1]}" if found.ndim == len(expected) else f"shape {expected}"
        raise Misfit(f"an action mask of {shape} where its action space needs {wanted}")
    if found.dtype.kind not in "biuf" or not (allowed == found).all():
        raise Misfit("an action mask of other values than 0 and 1")
    if not np.logical_or.reduceat(allowed, np.cumsum((0, *sizes[:-1])), axis=-1).all():
        raise Misfit("an action mask that allows nothing (all false)")
    return allowed


# ---- to a file and back -----------------------------------------------------------------------------------------------


def space_to_json(space: gymnasium.Space[Any]) -> dict[str, Any]:
    """A description that ``space_from_json`` reads back."""
    if isinstance(space, spaces.Dict):  # pairs: the order of the keys counts
        return {"type": "Dict", "spaces": [[key, space_to_json(part)] for key, part in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [space_to_json(part) for part in space.spaces]}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete):
        start, nvec = space.start.tolist(), space.nvec.tolist()
        return {"type": "MultiDiscrete", "nvec": nvec, "start": start, "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n}
    assert isinstance(space, spaces.Box)
    low, high = (
        bound.flat[0].item() if (bound == bound.flat[0]).all() else bound.tolist() for bound in (space.low, space.high)
    )
    return {"type": "Box", "low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}


def space_from_json(described: dict[str, Any]) -> Any:
    """The space that was described."""
    kind = described["type"]
    if kind == "Dict":
        return spaces.Dict([(key, space_from_json(part)) for key, part in described["spaces"]])
    if kind == "Tuple":
        return spaces.Tuple([space_from_json(part) for part in described["spaces"]])
    if kind == "MultiBinary":
        return spaces.MultiBinary(described["n"])
    dtype = np.dtype(described.get("dtype", "int64"))
    if kind == "Discrete":
        return spaces.Discrete(described["n"], start=described["start"], dtype=dtype.type)
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(described["nvec"], dtype=dtype.type, start=described["start"])
    low, high = np.array(described["low"], dtype), np.array(described["high"], dtype)
    shape = tuple(described.get("shape", low.shape))
    return spaces.Box(np.broadcast_to(low, shape), np.broadcast_to(high, shape), dtype=dtype.type)
