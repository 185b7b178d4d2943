"""Distributions over actions, as frozen dataclasses of their parameters, so that a rollout can hold and slice them.

Leading shape is any [...]. Randomness comes from the generator that is passed in, on the CPU.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from surefoot.functional import categorical_kl, gaussian_kl, token_entropy, token_log_probs


class Sampled(ABC):
    """Sampling in two halves: what is random, and what is made of it, which is a function like any other."""

    @abstractmethod
    def noise(self, generator: torch.Generator) -> Tensor:
        """All randomness that a sample takes, on the CPU; its shape depends on the distribution's alone."""

    @abstractmethod
    def drawn(self, noise: Tensor) -> Tensor:
        """The sample that the noise makes."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """One action per state."""
        return self.drawn(self.noise(generator))


@dataclass(frozen=True)
class Logits(Sampled):
    """Choices among n, each of its own.   logits [..., n]; one of −inf is what can't be chosen."""

    logits: Tensor

    def noise(self, generator: torch.Generator) -> Tensor:
        """Exponential variates.   [..., n]"""
        noise = torch.empty(self.logits.shape, dtype=self.logits.dtype).exponential_(generator=generator)
        # Were one exactly 0, −inf − log 0 would be NaN, which argmax takes for the largest: a forbidden action.
        return noise.clamp_(min=torch.finfo(self.logits.dtype).tiny)

    def drawn(self, noise: Tensor) -> Tensor:
        """Every choice, by the Gumbel-max trick.   [...] integer"""
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
    """Several independent choices at once.   logits [..., d, n]; −inf fills choices of fewer, too."""

    def log_prob(self, actions: Tensor) -> Tensor:
        """log π(a), summed over the choices.   [..., d] integer -> [...]"""
        return token_log_probs(self.logits, actions).sum(-1)

    def entropy(self) -> Tensor:
        """In nats, summed over the choices.   [...]"""
        return token_entropy(self.logits).sum(-1)

    def kl(self, other: "MultiCategorical") -> Tensor:
        """Exact KL(self‖other).   [...]"""
        return categorical_kl(self.logits, other.logits).sum(-1)


def side_by_side(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """The logits of choices among n₁, n₂ …, as rows of equal length filled with −inf.   [..., Σ n] -> [..., d, longest]"""
    longest = max(sizes)
    if min(sizes) == longest:
        return logits.reshape(*logits.shape[:-1], len(sizes), longest)
    parts = torch.split(logits, list(sizes), -1)
    return torch.stack([functional.pad(part, (0, longest - part.shape[-1]), value=-math.inf) for part in parts], -2)


@dataclass(frozen=True)
class DiagonalGaussian(Sampled):
    """Independent normals.   mean [..., d], log_std [..., d]"""

    mean: Tensor
    log_std: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        """log density of the action as sampled, before any clipping.   [..., d] -> [...]"""
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

    def drawn(self, noise: Tensor) -> Tensor:
        """One action per state.   [..., d]"""
        return self.mean + self.log_std.exp() * noise.to(self.mean.device)

    def mode(self) -> Tensor:
        """The mean.   [..., d]"""
        return self.mean
