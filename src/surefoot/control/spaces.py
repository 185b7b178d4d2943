"""The supported Gymnasium spaces, the parts of an observation, and spaces as JSON.

An observation, nested or not, is a flat dict of its parts: path -> array. The keys of a Dict and the indices of a Tuple are
joined by dots; a space without parts has the path "observation". An action mask is one more entry.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from surefoot.errors import SurefootError

Array = NDArray[Any]
Observations = dict[str, Array]
"""parts of a batch of observations [B, *part], and the action mask [B, choices] if the task has one"""

BARE = "observation"
MASK = "action_mask"
NOT_FINITE = "not finite as float32, whose largest number is 3.4e38"
SMALLEST_IMAGE = 36
"""least height and width, in pixels, that the image network needs"""


def as_float32(numbers: Any) -> Array:
    """Convert to float32. Numbers too large for it become infinite, without a warning; ``non_finite`` reports them."""
    with np.errstate(over="ignore"):
        return np.asarray(numbers, np.float32)


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of dicts and tuples with each leaf changed."""
    if isinstance(tree, Mapping):
        return {key: mapped(change, part) for key, part in tree.items()}
    return tuple(mapped(change, part) for part in tree) if isinstance(tree, tuple) else change(tree)


class SpaceError(ValueError):
    """A value does not fit its space. The text is a noun: "an observation of shape (3,) where …"."""


class ObservationPart:
    """A leaf of an observation space: a Box, Discrete, MultiDiscrete or MultiBinary.

    path     its name
    keys     keys and indices that lead to it from the observation
    dtype    in a rollout: images uint8, other Boxes float32, or float64 if float32 does not have all their numbers, the rest
             integers
    bounds   smallest and largest entries of an integer space; None for a Box
    limits   bounds of a Box, which rollouts count; None if it has none, or its type can't exceed them
    """

    def __init__(self, path: str, keys: tuple[Any, ...], space: Any) -> None:
        self.path, self.keys, self.space = path, keys, space
        self.shape: tuple[int, ...] = space.shape
        self.bounds = _bounds(space)
        kind: Any = np.int64
        if isinstance(space, spaces.Box):
            kind = np.float32 if np.can_cast(space.dtype, np.float32) else np.float64
            kind = np.uint8 if is_image(space) else kind
        elif isinstance(space, spaces.MultiBinary):
            kind = np.int8
        self.dtype: np.dtype[Any] = np.dtype(kind)
        self.limits: tuple[Array, Array] | None = None
        if isinstance(space, spaces.Box):
            whole = np.iinfo(np.uint8) if self.dtype == np.uint8 else None
            least, most = (-np.inf, np.inf) if whole is None else (whole.min, whole.max)
            if not ((space.low == least) & (space.high == most)).all():
                self.limits = space.low.astype(self.dtype), space.high.astype(self.dtype)

    @property
    def vector(self) -> bool:
        """Whether it is a Box but not an image: the parts that normalisers act on."""
        return self.dtype.kind == "f"

    def select(self, observation: Any) -> Any:
        """This part of an environment's observation; SpaceError if it is missing."""
        for key in self.keys:
            try:
                observation = observation[key]
            except (KeyError, IndexError, TypeError):
                raise SpaceError(f'an observation without "{self.path}"') from None
        return observation

    def read(self, observation: Any, batch: tuple[int, ...] = ()) -> Any:
        """This part of one observation, or of a batch [*batch, *part]; SpaceError if shape or type differ from the space."""
        value = self.select(observation)
        value = self.array_of(value) if isinstance(value, (list, tuple)) else value
        expected = batch + self.shape if batch else self.shape
        shape = getattr(value, "shape", None)
        if shape is None and not expected and isinstance(value, (int, float)):
            shape = ()
        if shape != expected:
            got = f"type {type(value).__name__}" if shape is None else f"shape {shape}"
            raise SpaceError(f"{self.named()} of {got} where its space has shape {expected}")
        value = self.plain(value)
        if self.vector:
            return as_float32(value) if self.dtype == np.float32 else value.astype(self.dtype, copy=False)
        self.check_kind(value)
        return value

    def plain(self, value: Any) -> Array:
        """A value as an array of numbers; SpaceError for a list or an array of anything else, or if entries are masked."""
        if isinstance(value, (list, tuple)):
            return self.array_of(value)
        if type(value) is not np.ndarray:
            if np.any(getattr(value, "mask", False)):  # of a numpy.ma.MaskedArray, which is slow to import
                raise SpaceError(f"{self.named()} with masked entries")
            value = np.asarray(value)
        if value.dtype.kind not in "biuf":
            kind = {"U": "text", "S": "text", "O": "Python objects"}.get(value.dtype.kind, value.dtype)
            raise SpaceError(f"{self.named()} of {kind} where its space has numbers")
        array: Array = value
        return array

    def array_of(self, numbers: Any) -> Array:
        """A list of numbers as an array; SpaceError if it is not one."""
        try:
            array = np.asarray(numbers)
        except ValueError:
            raise SpaceError(f"{self.named()} of lists that differ in length") from None
        if array.dtype.kind not in "biuf":
            raise SpaceError(f"{self.named()} of a list that contains more than numbers")
        return array

    def check_kind(self, value: Any) -> None:
        """SpaceError unless images are uint8, and integers are integers within their range."""
        array = np.asarray(value)
        if self.bounds is None:
            if array.dtype != np.uint8:
                raise SpaceError(f"{self.named()} of {array.dtype} where its space has uint8")
            return
        low, high = self.bounds
        if array.dtype.kind not in "iub":
            raise SpaceError(f"{self.named()} of {array.dtype} where its space has integers")
        if not ((array >= low) & (array <= high)).all():
            raise SpaceError(f"{self.named()} {_short(array)} outside {self.space}")

    def named(self) -> str:
        """Its name in messages."""
        return f'an observation "{self.path}"' if self.keys else "an observation"


def part_named(path: str) -> str:
    """The name of a part of observations in messages."""
    return "observation" if path == BARE else f'observation "{path}"'


def _short(values: Array) -> str:
    text = " ".join(str(values).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _bounds(space: Any) -> tuple[Array, Array] | None:
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        start = np.asarray(space.start, np.int64)
        return start, start + np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec, np.int64) - 1
    return (np.asarray(0), np.asarray(1)) if isinstance(space, spaces.MultiBinary) else None


def is_image(space: spaces.Box) -> bool:
    """Whether the image network reads a Box: uint8, [H, W] or with channels (or frames) first or last, large enough."""
    return space.dtype == np.uint8 and len(space.shape) in (2, 3, 4) and min(image_shape(space.shape)[1:]) >= SMALLEST_IMAGE


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether the last axis of an image is the channels: when it is smaller than the third axis from the end.

    True for [84, 84, 3] and [4, 84, 84, 3]; False for [3, 84, 84], [4, 84, 84] and [84, 84].
    """
    return len(shape) > 2 and shape[-1] < shape[-3]


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width) of an image; frames count as channels, and [H, W] has one."""
    if channels_last(shape):
        shape = (*shape[:-3], shape[-1], *shape[-3:-1])
    return int(np.prod(shape[:-2])), shape[-2], shape[-1]


# ---- supported spaces --------------------------------------------------------------------------------------------------


def observation_parts(space: gymnasium.Space[Any], task: str = "") -> dict[str, ObservationPart]:
    """The parts of an observation space by path, in the space's order.

    Raises SurefootError, naming the part, when one is not supported.
    """
    where = f"task={task!r}: " if task else ""
    parts: dict[str, ObservationPart] = {}
    for keys, leaf in _leaf_spaces(space, ()):
        path = ".".join(str(key) for key in keys) or BARE
        name = f'part "{path}": {_named(leaf)}' if keys else _named(leaf)
        if not _supported(leaf):
            raise SurefootError(
                f"{where}observation space {name} is not supported{_why(leaf)}; Box, Discrete, MultiDiscrete, MultiBinary, "
                "and Dict and Tuple of these are; wrap the environment"
            )
        if path in parts:
            raise SurefootError(f'{where}observation space part "{path}": two parts have this name; rename one')
        if re.fullmatch(r"(\w+_)?action_?masks?", str(keys[-1]).lower() if keys else ""):
            raise SurefootError(
                f'{where}observation space part "{path}": is not an observation; put masks in info["action_mask"] instead'
            )
        parts[path] = ObservationPart(path, keys, leaf)
    if not parts:
        raise SurefootError(f"{where}observation space {_named(space)} is empty; add a space to it")
    return parts


def _leaf_spaces(space: gymnasium.Space[Any], keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], gymnasium.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _leaf_spaces(part, (*keys, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _leaf_spaces(part, (*keys, index))
    else:
        yield keys, space


def _supported(space: gymnasium.Space[Any]) -> bool:
    supported = isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))
    return supported and 0 not in (space.shape or ())


def _why(space: gymnasium.Space[Any]) -> str:
    """Why a space of a supported type is not supported."""
    return " (it has no entries)" if 0 in (space.shape or ()) else ""


def check_action_space(space: gymnasium.Space[Any], task: str) -> Any:
    """Return the space if it is Discrete, MultiDiscrete, MultiBinary or a float Box, or a Dict or Tuple of these; otherwise
    raise SurefootError.
    """
    leaves = list(_leaf_spaces(space, ()))
    for keys, leaf in leaves or [((), space)]:
        if not _supported(leaf) or (isinstance(leaf, spaces.Box) and not np.issubdtype(leaf.dtype, np.floating)):
            part = f'part "{".".join(map(str, keys))}": ' if keys else ""
            raise SurefootError(
                f"task={task!r}: action space {part}{_named(leaf)} is not supported{_why(leaf)}; Discrete, MultiDiscrete, "
                "MultiBinary, float Box, and Dict and Tuple of these are"
            )
    return space


def _named(space: gymnasium.Space[Any]) -> str:
    return f"{type(space).__name__}{f'{space.shape} of {space.dtype}' if isinstance(space, spaces.Box) else ''}"


def choices(action_space: gymnasium.Space[Any]) -> tuple[int, ...] | None:
    """The number of options of each choice in an action; None if it has none. A bit of MultiBinary is a choice of two."""
    if isinstance(action_space, (spaces.Dict, spaces.Tuple)):
        return sum((choices(leaf) or () for _, leaf in _leaf_spaces(action_space, ())), ()) or None
    if isinstance(action_space, spaces.Discrete):
        return (int(action_space.n),)
    if isinstance(action_space, spaces.MultiDiscrete):
        return tuple(int(n) for n in action_space.nvec.reshape(-1))
    if isinstance(action_space, spaces.MultiBinary):
        return (2,) * int(np.prod(action_space.shape))
    return None


def numbers(action_space: gymnasium.Space[Any]) -> spaces.Box | None:
    """The numbers in an action as one flat Box: those of its Boxes, in their order; None if it has none."""
    boxes = [leaf for _, leaf in _leaf_spaces(action_space, ()) if isinstance(leaf, spaces.Box)]
    if not boxes:
        return None
    low, high = (np.concatenate([getattr(box, end).reshape(-1) for box in boxes]) for end in ("low", "high"))
    return spaces.Box(low, high, dtype=low.dtype.type)


# ---- actions of several parts ------------------------------------------------------------------------------------------

# The policy's action is one array: a column for each choice, then one for each number. So it is stored, sent to workers and
# replayed as any other action, and takes the form of the space when an environment gets it.


def is_nested(action_space: gymnasium.Space[Any]) -> bool:
    """Whether actions are dicts or tuples."""
    return isinstance(action_space, (spaces.Dict, spaces.Tuple))


def action_dtype(action_space: gymnasium.Space[Any]) -> Any:
    """The type of an array of actions: of several parts float64, which has all their numbers."""
    return np.dtype(np.float64) if is_nested(action_space) else action_space.dtype


def action_columns(action_space: gymnasium.Space[Any]) -> list[tuple[tuple[Any, ...], Any, slice]]:
    """Keys, space and columns of each part of an action, in the space's order."""
    leaves = list(_leaf_spaces(action_space, ()))
    columns, begin = {}, 0
    for index in sorted(range(len(leaves)), key=lambda index: isinstance(leaves[index][1], spaces.Box)):
        end = begin + int(np.prod(leaves[index][1].shape or ()))
        columns[index], begin = slice(begin, end), end
    return [(keys, leaf, columns[index]) for index, (keys, leaf) in enumerate(leaves)]


def as_array(array: Array, leaf: Any) -> Any:
    """The action of a part from its columns, in its own type."""
    return array.astype(leaf.dtype)[()]


def nester(action_space: gymnasium.Space[Any], cast: Callable[[Any, Any], Any] = as_array) -> Callable[[Any], Any]:
    """The function from an array of actions [..., columns] to actions of the space, whose parts are [..., *part].

    cast   gives a part its type
    """
    if not is_nested(action_space):
        return lambda actions: actions
    columns = action_columns(action_space)

    def nested(actions: Any) -> Any:
        lead = tuple(actions.shape[:-1])
        parts = iter([cast(actions[..., where].reshape(lead + leaf.shape), leaf) for _, leaf, where in columns])

        def build(space: Any) -> Any:
            if isinstance(space, spaces.Dict):
                return {key: build(part) for key, part in space.spaces.items()}
            return tuple(map(build, space.spaces)) if isinstance(space, spaces.Tuple) else next(parts)

        return build(action_space)

    return nested


def flat_action(action_space: gymnasium.Space[Any], action: Any, batch: tuple[int, ...] = ()) -> Array:
    """The array [*batch, columns] of actions of a space, the inverse of ``nester``; of any other space, the actions."""
    if not is_nested(action_space):
        return np.asarray(action)
    parts = []
    for keys, leaf, where in action_columns(action_space):
        value = action
        for key in keys:
            value = value[key]
        parts.append((where.start, np.asarray(value, np.float64).reshape(*batch, int(np.prod(leaf.shape)))))
    return np.concatenate([part for _, part in sorted(parts, key=lambda part: part[0])], -1)


def mask_of(action_space: gymnasium.Space[Any], mask: Any, batch: tuple[int, ...] = ()) -> Array:
    """``read_mask`` of a space. The mask of a Dict or Tuple may be one for each part: a part without one may do everything."""
    parts: list[tuple[Any, gymnasium.Space[Any]]] = []
    if isinstance(action_space, spaces.Dict) and isinstance(mask, Mapping):
        if unknown := [key for key in mask if key not in action_space.spaces]:
            raise SpaceError(f"an action mask for {unknown[0]!r}, which is no part of its action space")
        parts = [(mask.get(key), part) for key, part in action_space.spaces.items()]
    elif isinstance(action_space, spaces.Tuple) and isinstance(mask, tuple) and len(mask) == len(action_space.spaces):
        parts = list(zip(mask, action_space.spaces, strict=True))
    else:
        return read_mask(mask, choices(action_space), batch)
    allowed = [
        np.ones((*batch, sum(choices(part) or ())), bool) if each is None else mask_of(part, each, batch)
        for each, part in parts
    ]
    return np.concatenate(allowed, -1)


def read_mask(mask: Any, sizes: tuple[int, ...] | None, batch: tuple[int, ...] = ()) -> Array:
    """An action mask as booleans [*batch, Σ sizes], True where allowed; SpaceError if a choice has no allowed option."""
    if sizes is None:
        raise SpaceError("an action mask, but Box actions can't be masked")
    try:
        array = np.asarray(mask)
        allowed: Array = array != 0
    except ValueError:
        raise SpaceError("an action mask that is not an array of numbers") from None
    expected = (*batch, sum(sizes))
    if array.shape != expected:
        shape = f"length {array.shape[-1]}" if array.ndim == len(expected) else f"shape {array.shape}"
        expectation = f"length {expected[-1]}" if array.ndim == len(expected) else f"shape {expected}"
        raise SpaceError(f"an action mask of {shape} where its action space needs {expectation}")
    if array.dtype.kind not in "biuf" or not (allowed == array).all():
        raise SpaceError("an action mask with values other than 0 and 1")
    if not np.logical_or.reduceat(allowed, np.cumsum((0, *sizes[:-1])), axis=-1).all():
        raise SpaceError("an action mask that allows no action (all false)")
    return allowed


def check_agreement(trained: Sequence[Any], found: Sequence[Any]) -> str:
    """Compare the spaces of observations and actions that an agent was trained on with others.

    Parts of observations must agree in name, kind, shape and type, and choices and actions in their bounds. Returns a note if
    the bounds of Boxes in observations differ, else an empty text. Raises SpaceError.
    """
    names, differ = [], []
    before, now = (observation_parts(space) for space, _ in (trained, found))
    for part, other in zip(before.values(), now.values(), strict=False):
        boxes = isinstance(part.space, spaces.Box) and isinstance(other.space, spaces.Box)
        same = (part.shape, part.dtype, part.space.dtype) == (other.shape, other.dtype, other.space.dtype)
        if part.keys != other.keys or not (part.space == other.space or (boxes and same)):
            names.append(part.path)
        elif part.space != other.space:
            differ.append(f"{part.named().removeprefix('an ')}: {_range(other.space)} instead of {_range(part.space)}")
    if names or len(before) != len(now):
        raise SpaceError(f"observations {found[0]}, the agent was trained on {trained[0]}")
    if trained[1] != found[1]:
        raise SpaceError(f"actions {found[1]}, the agent was trained on {trained[1]}")
    return f"other bounds than the agent was trained on ({'; '.join(differ)})" if differ else ""


def _range(space: spaces.Box) -> str:
    return f"{space.low.min():g} to {space.high.max():g}"


# ---- JSON -------------------------------------------------------------------------------------------------------------


def space_to_json(space: gymnasium.Space[Any]) -> dict[str, Any]:
    """A description of a space that ``space_from_json`` reads."""
    if isinstance(space, spaces.Dict):  # pairs: the order of the keys matters
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


def space_from_json(description: dict[str, Any]) -> Any:
    """The space of a description by ``space_to_json``."""
    kind = description["type"]
    if kind == "Dict":
        return spaces.Dict([(key, space_from_json(part)) for key, part in description["spaces"]])
    if kind == "Tuple":
        return spaces.Tuple([space_from_json(part) for part in description["spaces"]])
    if kind == "MultiBinary":
        return spaces.MultiBinary(description["n"])
    dtype = np.dtype(description["dtype"])
    if kind == "Discrete":
        other = {} if dtype == np.int64 else {"dtype": dtype.type}  # Gymnasium 1.2.0 and 1.2.1 have int64 alone
        return spaces.Discrete(description["n"], start=description["start"], **other)
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(description["nvec"], dtype=dtype.type, start=description["start"])
    low, high = np.array(description["low"], dtype), np.array(description["high"], dtype)
    shape = tuple(description["shape"])
    return spaces.Box(np.broadcast_to(low, shape), np.broadcast_to(high, shape), dtype=dtype.type)
