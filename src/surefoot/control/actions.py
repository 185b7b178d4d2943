"""From actions as a policy draws them to actions as an environment takes them, in training and in all that acts later."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from surefoot.control.spaces import Array


class Bounds:
    """The bounds of a Box, and an action's way into them.

    stretched   whether −1 … 1 of the policy becomes low … high, where both are finite; otherwise actions are only clipped

    A number bounded by −1 and 1 already, or on one side only, goes through as it is, to the last bit.
    """

    def __init__(self, space: spaces.Box, stretched: bool) -> None:
        ends = low, high = space.low.reshape(-1), space.high.reshape(-1)
        self.low, self.high = torch.from_numpy(low), torch.from_numpy(high)
        bounded = [_is_bound(end) for end in ends]
        self.bounded, self.finite = torch.from_numpy(bounded[0] | bounded[1]), torch.from_numpy(bounded[0] & bounded[1])
        """[d] each: whether there is a bound on either side, and on both"""
        moved = self.finite.numpy() & ((low != -1) | (high != 1)) & stretched
        self.stretches, self.moved = bool(moved.any()), torch.from_numpy(moved)
        below, above = (np.where(moved, end, 0).astype(np.float64) / 2 for end in ends)
        kind = np.result_type(np.float32, space.dtype)
        self.centre, self.reach = (torch.from_numpy(x.astype(kind)) for x in (above + below, above - below))

    def stretch(self, actions: Tensor) -> Tensor:
        """[..., d] as drawn -> in the environment's units, not yet clipped"""
        if not self.stretches:
            return actions
        return torch.where(self.moved, self.centre + self.reach * actions, actions)

    def within(self, actions: Tensor) -> Tensor:
        """[..., d] as drawn -> as the environment takes them"""
        return torch.minimum(torch.maximum(self.stretch(actions), self.low), self.high)

    def beyond(self, actions: Tensor) -> Tensor:
        """Which numbers are clipped, of those that have a bound.   [..., d] as drawn -> [..., bounded]"""
        found = self.stretch(actions)
        return ((found < self.low) | (found > self.high))[..., self.bounded]


def _is_bound(ends: Array) -> Array:
    """Where a Box's lows, or highs, are a bound: some write "none" as the largest number there is."""
    largest = min(np.finfo(ends.dtype).max.astype(np.float64), np.finfo(np.float32).max.astype(np.float64))
    found: Array = np.abs(ends.astype(np.float64)) < largest
    return found


def sender_for(space: gymnasium.Space[Any], stretched: bool) -> Callable[[Tensor], Array]:
    """From actions as stored to what an environment gets: within a Box's bounds, counted from a start, of the space's shape.

    It is a copy: an environment may change what it is given.
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return lambda actions: (actions.numpy() + start).astype(space.dtype, copy=False)
    if isinstance(space, spaces.Box):
        bounds = Bounds(space, stretched)
        if len(space.shape) == 1 and space.dtype == np.float32:
            return lambda actions: bounds.within(actions).numpy()
        return lambda actions: _shaped(bounds.within(actions).numpy(), space)
    first = space.start.reshape(-1) if isinstance(space, spaces.MultiDiscrete) else 0
    return lambda actions: _shaped(actions.numpy() + first, space)


def _shaped(actions: Array, space: Any) -> Array:
    return actions.reshape(actions.shape[:-1] + space.shape).astype(space.dtype, copy=False)
