"""Running normalisers. They belong to the agent: saved with it, frozen within a rollout and in evaluation."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.core.distributed import all_sum, merge_across_ranks
from surefoot.functional import Moments, masked_moments, merge_moments

Normalise = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class RunningMoments(nn.Module):
    """Mean and variance of all that was seen, in float64. Buffers, so that they are saved and moved with the agent."""

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
        new = merge_across_ranks(masked_moments(x.double(), mask))
        seen = Moments(self.count, self.mean, self.var)
        merged = merge_moments(seen, Moments(new.n.max(), new.mean, new.var))
        for buffer, value in zip(seen, merged, strict=True):
            buffer.copy_(value)

    def at_limit(self, x: Tensor, mask: Tensor) -> float:
        """The share of the kept normalised entries of all ranks that are at ±clip: what the network can't tell apart.

        x  [B, T, *], mask [B, T]
        """
        return share_of(x[mask].abs() >= self.clip)

    @property
    def scale(self) -> Tensor:
        """1/√(var + 1e-8), float32."""
        return (self.var + 1e-8).rsqrt().float()


class ObservationNormaliser(RunningMoments):
    """(o − μ)/σ of every number, clipped to ±clip.   [..., *shape] each

    ``shapes`` names the leaves that are vectors of numbers. Other leaves (images, choices, masks) pass through untouched.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], clip: float) -> None:
        self.shapes = dict(shapes)
        super().__init__((sum(map(math.prod, self.shapes.values())),), clip)

    def add(self, observations: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add the kept observations of a batch, of all ranks.   [B, T, *shape] each, [B, T]"""
        parts = [
            observations[path].flatten(mask.dim()) if shape else observations[path].unsqueeze(-1)
            for path, shape in self.shapes.items()
        ]
        self.update(parts[0] if len(parts) == 1 else torch.cat(parts, -1), mask)

    def forward(self, observations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Normalise with the statistics as they stand."""
        return self.frozen()(observations)

    def frozen(self) -> Normalise:
        """The same as a function that later updates don't change, prepared once for a loop over single observations."""
        clip, sizes = self.clip, [math.prod(shape) for shape in self.shapes.values()]
        pieces = zip(self.shapes.items(), torch.split(self.mean.float(), sizes), torch.split(self.scale, sizes), strict=True)
        # Copies, because torch can't be sure how to save tensors that are parts of one (in an exported agent).
        prepared = [(path, mean.reshape(shape).clone(), scale.reshape(shape).clone()) for (path, shape), mean, scale in pieces]

        def normalise(observations: Mapping[str, Tensor]) -> dict[str, Tensor]:
            result = dict(observations)
            for path, mean, scale in prepared:
                x = observations[path]
                result[path] = ((x - mean.to(x.device)) * scale.to(x.device)).clamp(-clip, clip)
            return result

        return normalise


class RewardNormaliser(RunningMoments):
    """r divided by the running standard deviation of the discounted return, clipped to ±clip.

    The discounted return runs forward in time within an episode and is 0 again after any end, truncations included.
    """

    def __init__(self, gamma: float, clip: float) -> None:
        super().__init__((), clip)
        self.gamma = gamma

    def forward(self, rewards: Tensor) -> Tensor:
        """Scale with the statistics as they stand."""
        return (rewards * self.scale).clamp(-self.clip, self.clip)

    def observe(self, rewards: Tensor, ended: Tensor, mask: Tensor, carried: Tensor) -> Tensor:
        """Add a rollout's rewards; give the discounted return to carry into the next.   [B, T] … [B] float64 -> [B]"""
        running, carried = running_returns(rewards, ended, mask, carried, self.gamma)
        self.update(running, mask)
        return carried


def share_of(held: Tensor) -> float:
    """The share of the entries, of all ranks, that are true; NaN where there are none."""
    true, count = all_sum(torch.stack([held.sum(), torch.tensor(held.numel(), device=held.device)])).tolist()
    return true / count if count else math.nan


def running_returns(rewards: Tensor, ended: Tensor, mask: Tensor, carried: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """g_t = r_t + γ g_{t−1} over kept steps, begun anew after every end, and g to carry on.   [B, T], [B] -> [B, T], [B]

    ``carried`` is g before the first step. float64; what is not kept changes nothing.
    """
    r, end, keep, g = rewards.double().numpy(), ended.numpy(), mask.numpy(), carried.double().numpy()
    running = np.zeros_like(r)
    for t in range(r.shape[1]):
        g = np.where(keep[:, t], r[:, t] + gamma * g, g)
        running[:, t] = g
        g = np.where(end[:, t] & keep[:, t], 0.0, g)
    return torch.from_numpy(running), torch.from_numpy(g)
