"""Distributions over actions, as frozen dataclasses of their parameters, so that a rollout can hold and slice them.

Leading shape is any [...]. Randomness comes from the generator that is passed in, on the CPU.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.functional import categorical_kl, gaussian_kl, token_entropy, token_log_probs


@dataclass(frozen=True)
class Categorical:
    """One of n actions.   logits [..., n]; a logit of −inf is an action that can't be taken."""

    logits: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        """log π(a).   [...] integer -> [...]"""
        return token_log_probs(self.logits, actions)

    def entropy(self) -> Tensor:
        """In nats.   [...]"""
        return token_entropy(self.logits)

    def kl(self, other: "Categorical") -> Tensor:
        """Exact KL(self‖other).   [...]"""
        return categorical_kl(self.logits, other.logits)

    def sample(self, generator: torch.Generator) -> Tensor:
        """One action per state, by the Gumbel-max trick.   [...] integer"""
        exponential = torch.empty(self.logits.shape, dtype=self.logits.dtype).exponential_(generator=generator)
        return (self.logits - exponential.to(self.logits.device).log()).argmax(-1)

    def mode(self) -> Tensor:
        """The likeliest action.   [...] integer"""
        return self.logits.argmax(-1)


@dataclass(frozen=True)
class DiagonalGaussian:
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

    def sample(self, generator: torch.Generator) -> Tensor:
        """One action per state.   [..., d]"""
        noise = torch.randn(self.mean.shape, dtype=self.mean.dtype, generator=generator).to(self.mean.device)
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        """The mean.   [..., d]"""
        return self.mean
