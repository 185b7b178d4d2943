"""What B environments show: leaves of observations, masks of actions, and whether they are finite.

Whether a task masks actions is told by its first reset: ``info["action_mask"]`` is there, or is not, and so it stays.
"""

from typing import Any

import gymnasium
import numpy as np

from surefoot.control.spaces import (
    BARE,
    MASK,
    NOT_FINITE,
    Array,
    Misfit,
    Observations,
    check_action_space,
    choices,
    leaves,
    read_mask,
)


class Reader:
    """Reads what environments of given spaces give, one or many at a time.

    Raises SurefootError when a space is not supported; the methods raise Misfit for what does not fit its space.
    """

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], count: int, task: str
    ) -> None:
        self.count = count
        self.leaves = leaves(observation_space, task)
        self.choices = choices(check_action_space(action_space, task))
        self.masked: bool | None = None
        """whether the task masks actions; None before its first reset"""

    def empty(self) -> Observations:
        """Arrays for all environments, to read single ones into."""
        return {path: np.zeros((self.count, *leaf.shape), leaf.dtype) for path, leaf in self.leaves.items()}

    def one_into(self, observations: Observations, index: int, observation: Any, info: Any, acting: bool) -> None:
        """Keep one environment's observation, and its mask where an action follows."""
        for path, leaf in self.leaves.items():
            observations[path][index] = leaf.read(observation)
        if acting and self._masks(info or {}):
            if MASK not in observations:
                observations[MASK] = self._all_allowed()
            observations[MASK][index] = read_mask(info[MASK], self.choices)

    def one_of(self, observations: Observations, index: int) -> Observations:
        """A copy of one environment's leaves."""
        return {path: observations[path][index].copy() for path in self.leaves}

    def one(self, observation: Any) -> Observations:
        """A copy of the leaves of a single observation."""
        return {path: np.array(leaf.read(observation), leaf.dtype) for path, leaf in self.leaves.items()}

    def all(self, observations: Any) -> Observations:
        """Copies of the leaves of what a vector environment gives, in memory as they are read, whatever its own layout."""
        return {
            path: np.array(leaf.read(observations, (self.count,)), leaf.dtype, order="C") for path, leaf in self.leaves.items()
        }

    def masks(self, infos: dict[str, Any], needed: Array) -> Observations:
        """The masks in a vector environment's infos, all true where none is needed; nothing where the task does not mask."""
        given = needed & np.broadcast_to(infos.get(f"_{MASK}", MASK in infos), needed.shape)
        found: Observations = {}
        for index in np.flatnonzero(needed):
            info = {MASK: infos[MASK][index]} if given[index] else {}
            try:
                if self._masks(info):
                    found.setdefault(MASK, self._all_allowed())[index] = read_mask(info[MASK], self.choices)
            except Misfit as misfit:
                raise Misfit(f"{misfit} in environment {index}") from None
        return {MASK: self._all_allowed()} | found if self.masked else {}

    def _masks(self, info: dict[str, Any]) -> bool:
        given = MASK in info
        if self.masked is None:
            self.masked = given
        if given != self.masked:
            raise Misfit("an action mask, unlike at its first reset" if given else "no action mask, unlike at its first reset")
        return given

    def _all_allowed(self) -> Array:
        return np.ones((self.count, sum(self.choices or ())), bool)


def copied(observations: Observations) -> Observations:
    """The same with arrays of its own."""
    return {path: values.copy() for path, values in observations.items()}


def broken_parts(observations: Observations, rewards: Array | None, finals: dict[int, Observations]) -> dict[int, str]:
    """environment -> what of its observations (final ones too) or its reward is not finite."""
    found: dict[int, str] = {}
    floats = [path for path, values in observations.items() if values.dtype.kind == "f"]
    if finals or not all(np.isfinite(observations[path]).all() for path in floats):
        for path in floats:
            named = "observation" if path == BARE else f'observation "{path}"'
            for index, values in enumerate(observations[path]):
                seen = (values, *([finals[index][path]] if index in finals else []))
                if not all(np.isfinite(part).all() for part in seen):
                    found.setdefault(index, named)
    if rewards is not None and not np.isfinite(rewards).all():
        for index in np.flatnonzero(~np.isfinite(rewards)).tolist():
            found.setdefault(index, "reward")
    return dict(sorted(found.items()))


def not_finite(task: str, what: str, environment: int, step: int) -> str:
    """How a message about it begins."""
    return f"{task}: the {what} of environment {environment} at step {step} of its episode is {NOT_FINITE}"
