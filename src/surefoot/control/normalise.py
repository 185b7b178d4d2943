"""What lies between a policy and its environment: running normalisers, and the conversion of sampled actions.

Normalisers belong to the agent: saved with it, frozen within a rollout and in evaluation.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot.control.spaces import Array, ObservationPart, action_columns, action_dtype, choices, is_nested, numbers
from surefoot.errors import SurefootError, did_you_mean
from surefoot.functional import Moments, masked_moments, merge_moments
from surefoot.functional.returns import true_columns
from surefoot.ranks.collectives import all_sum, exact_device, in_float64, merge_across_ranks

Normalise = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def normalised_parts(parts: Mapping[str, ObservationPart], chosen: bool | Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the parts of an observation to normalise, by path: all vectors, or those that are chosen.

    chosen   a name stands for a part, or for all vectors below it, as "arm" for "arm.angle" and "arm.speed"

    Raises SurefootError for a name that stands for no vector.
    """
    vectors = {path: part.shape for path, part in parts.items() if part.vector}
    if isinstance(chosen, bool):
        return vectors if chosen else {}
    wanted: set[str] = set()
    for name in chosen:
        below = [path for path in parts if path == name or path.startswith(f"{name}.")]
        if not below:
            raise SurefootError(
                f"normalise.observations={list(chosen)}: the observation has no part {name!r}{did_you_mean(name, parts)} "
                f"(parts: {', '.join(map(repr, parts))})"
            )
        if not vectors.keys() & set(below):
            raise SurefootError(
                f"normalise.observations={list(chosen)}: {name!r} is an image, bits or a choice, which are never normalised; "
                "leave it out"
            )
        wanted |= set(below)
    return {path: shape for path, shape in vectors.items() if path in wanted}


class RunningMoments(nn.Module):
    """Running mean and variance in float64, as buffers, so that they are saved and moved with the agent."""

    def __init__(self, shape: tuple[int, ...], clip: float) -> None:
        super().__init__()
        self.clip = clip
        self.count: Tensor
        self.mean: Tensor
        self.var: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    def update(self, x: Tensor, mask: Tensor) -> None:
        """Add the kept entries of a batch, of all ranks.   [B, T, *shape], [B, T]"""
        x = in_float64(x)
        new = merge_across_ranks(masked_moments(x, mask.to(x.device)))
        new = Moments(*(part.to(self.mean.device) for part in new))
        old = Moments(self.count, self.mean, self.var)
        merged = merge_moments(old, Moments(new.n.max(), new.mean, new.var))
        for buffer, value in zip(old, merged, strict=True):
            buffer.copy_(value)

    def clipped_fraction(self, x: Tensor, mask: Tensor) -> float:
        """The share of the kept normalised entries, of all ranks, that are at ±clip.   [B, T, *], [B, T]"""
        return true_fraction(x[mask].abs() >= self.clip)

    @property
    def scale(self) -> Tensor:
        """1/√(var + 1e-8)"""
        return (self.var + 1e-8).rsqrt()


class ObservationNormaliser(RunningMoments):
    """(o − μ)/σ of every number, clipped to ±clip, as float32.   [..., *shape] each

    shapes   of the parts to normalise. Other parts (images, choices, masks) pass as ``as_inputs`` returns them
    exact    those of them that are float64, which becomes float32 afterwards: a small part of a large number would be lost
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], clip: float, exact: Sequence[str] = ()) -> None:
        self.shapes, self.exact = dict(shapes), list(exact)
        super().__init__((sum(map(math.prod, self.shapes.values())),), clip)

    def add(self, observations: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add the kept observations of a batch, of all ranks.   [B, T, *shape] each, [B, T]"""
        parts = [
            observations[path].flatten(mask.dim()) if shape else observations[path].unsqueeze(-1)
            for path, shape in self.shapes.items()
        ]
        self.update(parts[0] if len(parts) == 1 else torch.cat(parts, -1), mask)

    def forward(self, observations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Normalise with the current statistics."""
        return self.frozen()(observations)

    def frozen(self, device: torch.device | None = None) -> Normalise:
        """A function that normalises with the current statistics, whatever updates follow; prepared for many calls.

        device   of the observations, if they are tensors there already, so that no call copies the statistics
        """
        clip, sizes = self.clip, [math.prod(shape) for shape in self.shapes.values()]
        pieces = zip(self.shapes.items(), torch.split(self.mean, sizes), torch.split(self.scale, sizes), strict=True)
        prepared: list[tuple[str, Tensor, Tensor]] = []
        for (path, shape), mean, scale in pieces:
            kind = torch.float64 if path in self.exact and (device is None or exact_device(device) == device) else torch.float32
            # Copies: torch.export can't save tensors that share storage.
            mean, scale = (x.to(device, kind, copy=True).reshape(shape) for x in (mean, scale))
            prepared.append((path, mean, scale))

        def normalise(observations: Mapping[str, Tensor]) -> dict[str, Tensor]:
            result = as_inputs(observations)
            for path, mean, scale in prepared:
                x = observations[path]
                result[path] = ((x - mean.to(x)) * scale.to(x)).clamp(-clip, clip).float()
            return result

        return normalise


def as_inputs(observations: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a policy reads if nothing is normalised: float64 as float32, all else as it is."""
    return {path: x.float() if x.dtype == torch.float64 else x for path, x in observations.items()}


def inputs_of(normaliser: ObservationNormaliser | None, device: torch.device | None = None) -> Normalise:
    """The function from observations to what a policy reads, with the current statistics; ``device`` as in ``frozen``."""
    return as_inputs if normaliser is None else normaliser.frozen(device)


class RewardNormaliser(RunningMoments):
    """r divided by the running standard deviation of the discounted return, clipped to ±clip.

    The discounted return runs forward in time within an episode and restarts at 0 after any end, truncations included.

    The critic's unit is another number than this deviation, which changes after each rollout. A critic's target is a sum of
    rewards, divided by the current deviation, and of values of the last critic, in the last critic's unit. ``unit`` follows it.
    """

    def __init__(self, gamma: float, clip: float) -> None:
        super().__init__((), clip)
        self.gamma = gamma
        self.unit: Tensor
        """[] the task's rewards per unit of the critic's last targets"""
        self.register_buffer("unit", torch.ones((), dtype=torch.float64))

    @property
    def deviation(self) -> Tensor:
        """√(var + 1e-8), what rewards are divided by; float64."""
        return (self.var + 1e-8).sqrt()

    def forward(self, rewards: Tensor) -> Tensor:
        """Scale with the current statistics."""
        return (rewards * self.scale.float()).clamp(-self.clip, self.clip)

    def observe(self, rewards: Tensor, ended: Tensor, mask: Tensor, carried: Tensor) -> Tensor:
        """Add a rollout's rewards; return the discounted return to carry into the next.   [B, T] … [B] float64 -> [B]"""
        running, carried = running_returns(rewards, ended, mask, carried, self.gamma)
        self.update(running, mask)
        return carried

    def follow_critic(self, from_rewards: Tensor, from_values: Tensor, mask: Tensor) -> None:
        """Update ``unit``, before ``observe``, from the two parts that a rollout's critic targets are a sum of.   [B, T] each

        from_rewards   the part from rewards, divided by the current deviation
        from_values    the part from the last critic's values

        The new unit u minimises Σ(u·(p + b) − (σp + u'b))²: a mean of σ and the old unit u', weighted by the parts p and b.
        """
        p, b = (x[mask.to(x.device)] for x in map(in_float64, (from_rewards, from_values)))
        share, whole = all_sum(torch.stack([((p + b) * p).sum(), (p + b).square().sum()]))
        share = (share / whole).to(self.unit.device)
        if share.isfinite():  # not where all targets are 0
            self.unit.lerp_(self.deviation, share.clamp(0, 1))


def true_fraction(x: Tensor) -> float:
    """The share of the entries, of all ranks, that are true; NaN without entries."""
    true, count = all_sum(torch.stack([x.sum(), torch.tensor(x.numel(), device=x.device)])).tolist()
    return true / count if count else math.nan


def running_returns(rewards: Tensor, ended: Tensor, mask: Tensor, carried: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """g_t = r_t + γ g_{t−1} over kept steps, restarted after every end, and g to carry on.   [B, T], [B] -> [B, T], [B]

    ``carried`` is g before the first step. float64; steps that are not kept change nothing.
    """
    rewards = in_float64(rewards)
    skipped, g = ~mask.to(rewards.device), carried.to(rewards)
    restarts, running = ended.to(rewards.device) & ~skipped, []
    columns = zip(rewards.unbind(1), true_columns(skipped), true_columns(restarts), strict=True)
    for t, (r, some_skipped, some_restart) in enumerate(columns):
        following = r + gamma * g
        g = torch.where(skipped[:, t], g, following) if some_skipped else following
        running.append(g)
        if some_restart:
            g = g.masked_fill(restarts[:, t], 0)
    return torch.stack(running, 1), g


# ---- actions ----------------------------------------------------------------------------------------------------------


class ActionBounds:
    """Rescales and clips actions to the bounds of a Box.

    rescaled   map [−1, 1] of the policy to [low, high] where both are finite; otherwise only clip

    An entry with bounds −1 and 1, or with a bound on one side only, is not rescaled, to the last bit.
    """

    def __init__(self, space: spaces.Box, rescaled: bool) -> None:
        ends = low, high = space.low.reshape(-1), space.high.reshape(-1)
        self.low, self.high = torch.from_numpy(low), torch.from_numpy(high)
        bounded = [_is_bound(end) for end in ends]
        self.bounded, self.finite = torch.from_numpy(bounded[0] | bounded[1]), torch.from_numpy(bounded[0] & bounded[1])
        """[d] each: whether there is a bound on any side, and on both sides"""
        moved = self.finite.numpy() & ((low != -1) | (high != 1)) & rescaled
        self.rescales, self.rescaled = bool(moved.any()), torch.from_numpy(moved)
        below, above = (np.where(moved, end, 0).astype(np.float64) / 2 for end in ends)
        kind = np.result_type(np.float32, space.dtype)
        self.centre, self.half_range = (torch.from_numpy(x.astype(kind)) for x in (above + below, above - below))

    def on(self, device: torch.device) -> "ActionBounds":
        """The bounds as tensors on a device."""
        if device == self.low.device:
            return self
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(moved, name, value.to(device))
        return moved

    def rescale(self, actions: Tensor) -> Tensor:
        """[..., d] as sampled -> in the environment's units, not clipped"""
        if not self.rescales:
            return actions
        return torch.where(self.rescaled, self.centre + self.half_range * actions, actions)

    def restore(self, actions: Tensor) -> Tensor:
        """[..., d] in the environment's units -> as sampled"""
        return torch.where(self.rescaled, (actions - self.centre) / self.half_range, actions)

    def apply(self, actions: Tensor) -> Tensor:
        """[..., d] as sampled -> in the environment's units, rescaled and clipped"""
        return torch.minimum(torch.maximum(self.rescale(actions), self.low), self.high)

    def clipped(self, actions: Tensor) -> Tensor:
        """Which entries are clipped, of those that have a bound.   [..., d] as sampled -> [..., bounded]"""
        x = self.rescale(actions)
        return ((x < self.low) | (x > self.high))[..., self.bounded]


def _is_bound(ends: Array) -> Array:
    """Where a Box's lows, or highs, are a bound: some spaces write "no bound" as the largest float."""
    largest = min(np.finfo(ends.dtype).max.astype(np.float64), np.finfo(np.float32).max.astype(np.float64))
    is_bound: Array = np.abs(ends.astype(np.float64)) < largest
    return is_bound


def sent_actions(space: gymnasium.Space[Any], rescaled: bool, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function from actions as stored to actions for an environment: within a Box's bounds, from a space's start, shaped.

    Actions of several parts stay one tensor. The result is a new one, because an environment may change its argument.
    """
    if is_nested(space):
        return _sent_parts(space, rescaled, device)
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return lambda actions: actions + start
    if isinstance(space, spaces.Box):
        bounds = ActionBounds(space, rescaled).on(device)
        return lambda actions: bounds.apply(actions).reshape(actions.shape[:-1] + space.shape)
    parts: Any = space
    first: Any = (
        torch.from_numpy(space.start.reshape(-1).astype(np.int64)).to(device) if isinstance(space, spaces.MultiDiscrete) else 0
    )
    return lambda actions: (actions + first).reshape(actions.shape[:-1] + parts.shape)


def _sent_parts(space: gymnasium.Space[Any], rescaled: bool, device: torch.device) -> Callable[[Tensor], Tensor]:
    """``sent_actions`` of a Dict or Tuple."""
    box, count = numbers(space), len(choices(space) or ())
    bounds = None if box is None else ActionBounds(box, rescaled).on(device)
    first = _starts(space).to(device)
    kind = torch.float64 if exact_device(device) == device else torch.float32

    def send(actions: Tensor) -> Tensor:
        chosen = actions[..., :count].to(kind) + first.to(kind)
        return chosen if bounds is None else torch.cat([chosen, bounds.apply(actions[..., count:]).to(kind)], -1)

    return send


def _starts(space: gymnasium.Space[Any]) -> Tensor:
    """The first option of each choice.   [choices]"""
    choosing = [leaf for _, leaf, _ in action_columns(space) if not isinstance(leaf, spaces.Box)]
    starts = [np.ravel(np.broadcast_to(getattr(leaf, "start", 0), leaf.shape)) for leaf in choosing]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *starts]).astype(np.int64))


def stored_actions(space: gymnasium.Space[Any], rescaled: bool, sent: Array) -> Tensor:
    """Actions as the policy draws them, from arrays [N, ...] as environments get them: the inverse of ``action_converter``."""
    box, first = numbers(space), _starts(space)
    columns = torch.from_numpy(sent.astype(np.float64).reshape(len(sent), -1))
    chosen = columns[:, : len(first)].long() - first
    if isinstance(space, spaces.Discrete):
        return chosen.squeeze(-1)
    if box is None:
        return chosen
    drawn = ActionBounds(box, rescaled).restore(columns[:, len(first) :]).float()
    return torch.cat([chosen.float(), drawn], -1) if len(first) else drawn


def action_converter(space: gymnasium.Space[Any], rescaled: bool) -> Callable[[Tensor], Array]:
    """A function from the policy's actions, tensors on the CPU, to arrays of the space's type."""
    send, kind = sent_actions(space, rescaled, torch.device("cpu")), action_dtype(space)
    return lambda actions: send(actions).numpy().astype(kind, copy=False)
