"""Distributions over actions, as frozen dataclasses of their parameters, so that a rollout can store and slice them.

The leading shape is any [...]. Randomness comes from a given generator, on the CPU.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from surefoot.functional import categorical_kl, gaussian_kl, token_entropy, token_log_probs


class ReparameterisedSampling(ABC):
    """Sampling in two steps: draw noise, then transform it by a deterministic function."""

    @abstractmethod
    def noise(self, generator: torch.Generator) -> Tensor:
        """The noise of a sample, on the CPU; its shape depends only on the distribution's."""

    @abstractmethod
    def transform(self, noise: Tensor) -> Tensor:
        """The sample for given noise."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """One action per state."""
        return self.transform(self.noise(generator))


@dataclass(frozen=True)
class Logits(ReparameterisedSampling):
    """Independent choices among n options.   logits [..., n]; −inf excludes an option."""

    logits: Tensor

    def noise(self, generator: torch.Generator) -> Tensor:
        """Exponential variates.   [..., n]"""
        noise = torch.empty(self.logits.shape, dtype=self.logits.dtype).exponential_(generator=generator)
        # With an exact 0, −inf − log 0 is NaN, which argmax takes for the largest: an excluded option.
        return noise.clamp_(min=torch.finfo(self.logits.dtype).tiny)

    def transform(self, noise: Tensor) -> Tensor:
        """A sample of every choice, by the Gumbel-max trick.   [...] integer"""
        return (self.logits - noise.to(self.logits.device).log()).argmax(-1)

    def mode(self) -> Tensor:
        """The likeliest choices.   [...] integer"""
        return self.logits.argmax(-1)


@dataclass(frozen=True)
class Categorical(Logits):
    """One of n actions.   logits [..., n]"""

    def log_prob(self, actions: Tensor) -> Tensor:
        """log π(a).   [...] integer -> [...]"""
        return token_log_probs(self.logits, actions)

    def entropy(self) -> Tensor:
        """In nats.   [...]"""
        return token_entropy(self.logits)

    def kl(self, other: "Categorical") -> Tensor:
        """Exact KL(self‖other).   [...]"""
        return categorical_kl(self.logits, other.logits)


@dataclass(frozen=True)
class MultiCategorical(Logits):
    """Several independent choices at once.   logits [..., d, n]; −inf pads choices with fewer options."""

    def log_prob(self, actions: Tensor) -> Tensor:
        """log π(a), summed over the choices.   [..., d] integer -> [...]"""
        return token_log_probs(self.logits, actions).sum(-1)

    def entropy(self) -> Tensor:
        """In nats, summed over the choices.   [...]"""
        return token_entropy(self.logits).sum(-1)

    def kl(self, other: "MultiCategorical") -> Tensor:
        """Exact KL(self‖other).   [...]"""
        return categorical_kl(self.logits, other.logits).sum(-1)


def pad_choices(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """Logits of choices among n₁, n₂ … options, padded with −inf to equal length.   [..., Σ n] -> [..., d, longest]"""
    longest = max(sizes)
    if min(sizes) == longest:
        return logits.reshape(*logits.shape[:-1], len(sizes), longest)
    parts = torch.split(logits, list(sizes), -1)
    return torch.stack([functional.pad(part, (0, longest - part.shape[-1]), value=-math.inf) for part in parts], -2)


@dataclass(frozen=True)
class DiagonalGaussian(ReparameterisedSampling):
    """Independent normals.   mean [..., d], log_std [..., d]"""

    mean: Tensor
    log_std: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-density of the action as sampled, before clipping.   [..., d] -> [...]"""
        scaled = (actions - self.mean) * torch.exp(-self.log_std)
        return -(0.5 * scaled.square() + self.log_std).sum(-1) - 0.5 * math.log(2 * math.pi) * self.mean.shape[-1]

    def entropy(self) -> Tensor:
        """Differential entropy in nats.   [...]"""
        return self.log_std.sum(-1) + 0.5 * math.log(2 * math.pi * math.e) * self.mean.shape[-1]

    def kl(self, other: "DiagonalGaussian") -> Tensor:
        """Exact KL(self‖other).   [...]"""
        return gaussian_kl(self.mean, self.log_std, other.mean, other.log_std)

    def noise(self, generator: torch.Generator) -> Tensor:
        """Standard normal variates.   [..., d]"""
        return torch.randn(self.mean.shape, dtype=self.mean.dtype, generator=generator)

    def transform(self, noise: Tensor) -> Tensor:
        """One action per state.   [..., d]"""
        return self.mean + self.log_std.exp() * noise.to(self.mean.device)

    def mode(self) -> Tensor:
        """The mean.   [..., d]"""
        return self.mean
