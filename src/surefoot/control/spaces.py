"""Which Gymnasium spaces are understood, what a network needs to know of them, and how they are written to a file."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from surefoot.errors import SurefootError


def check_observation_space(space: gymnasium.Space[Any], task: str) -> spaces.Box:
    """The space, if it is a Box of vectors; otherwise a SurefootError that names it."""
    if not isinstance(space, spaces.Box):
        raise SurefootError(
            f"task={task!r}: observation space {_named(space)} is not supported; a Box of shape (n,) is. "
            "Wrap the environment with gymnasium.wrappers.FlattenObservation"
        )
    if len(space.shape) != 1 or space.shape[0] < 1:
        raise SurefootError(
            f"task={task!r}: observation space Box{space.shape} is not supported; a Box of shape (n,) is. "
            "Wrap the environment with gymnasium.wrappers.FlattenObservation"
        )
    return space


def check_action_space(space: gymnasium.Space[Any], task: str) -> spaces.Box | spaces.Discrete:
    """The space, if it is Discrete or a Box of vectors; otherwise a SurefootError that names it."""
    if isinstance(space, spaces.Discrete):
        return space
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating):
        return space
    raise SurefootError(
        f"task={task!r}: action space {_named(space)} is not supported; Discrete and a float Box of shape (n,) are"
    )


def _named(space: gymnasium.Space[Any]) -> str:
    return f"{type(space).__name__}{getattr(space, 'shape', None) or ''}"


def space_to_json(space: gymnasium.Space[Any]) -> dict[str, Any]:
    """A description that ``space_from_json`` reads back."""
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    assert isinstance(space, spaces.Box)
    return {"type": "Box", "low": space.low.tolist(), "high": space.high.tolist(), "dtype": str(space.dtype)}


def space_from_json(described: dict[str, Any]) -> Any:
    """The space that was described."""
    if described["type"] == "Discrete":
        return spaces.Discrete(described["n"], start=described["start"])
    dtype = np.dtype(described["dtype"])
    return spaces.Box(np.array(described["low"], dtype), np.array(described["high"], dtype), dtype=dtype.type)
