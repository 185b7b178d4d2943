"""The policy network of control: observations to a distribution over actions, and to a value."""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot.config import Network
from surefoot.control.distributions import Categorical, DiagonalGaussian
from surefoot.rollout import Evaluation, Policy

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class ActorCritic(Policy):
    """Multilayer perceptrons for π and V, apart or on a shared trunk, with a state-independent log-std for Box actions.

    Inputs are *normalised* observations [..., n]. Weights are orthogonal (gain √2 hidden, 0.01 policy head, 1 value head)
    and drawn from ``generator``; Engstrom et al. 2020 (arXiv 2005.12729) measured what these details are worth.
    """

    def __init__(
        self,
        inputs: int,
        action_space: spaces.Box | spaces.Discrete,
        network: Network,
        critic: bool,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.discrete = isinstance(action_space, spaces.Discrete)
        outputs = int(action_space.n) if isinstance(action_space, spaces.Discrete) else action_space.shape[0]
        widths = [inputs, *network.hidden]
        self.actor_trunk = _trunk(widths, network.activation, generator)
        self.actor_head = _linear(widths[-1], outputs, 0.01, generator)
        self.log_std = None if self.discrete else nn.Parameter(torch.full((outputs,), network.log_std))
        self.critic_trunk = _trunk(widths, network.activation, generator) if critic and not network.shared_trunk else None
        self.critic_head = _linear(widths[-1], 1, 1.0, generator) if critic else None

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """[..., n], [...] or [..., d] -> log-probabilities, entropy, values and distribution, all [...]."""
        features = _through(self.actor_trunk, inputs)
        distribution = self._head(features)
        return Evaluation(
            log_probs=distribution.log_prob(actions),
            entropy=distribution.entropy(),
            values=self._values(inputs, features),
            distribution=distribution,
        )

    def distribution(self, inputs: Tensor) -> Any:
        """The distribution over actions.   [..., n] -> Categorical or DiagonalGaussian over [...]"""
        return self._head(_through(self.actor_trunk, inputs))

    def values(self, inputs: Tensor) -> Tensor:
        """V(s); zeros without a critic.   [..., n] -> [...]"""
        features = _through(self.actor_trunk, inputs) if self.critic_trunk is None else None
        values = self._values(inputs, features)
        return inputs.new_zeros(inputs.shape[:-1]) if values is None else values

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """Trunk and head of a separate critic; nothing where the trunk is shared."""
        if self.critic_trunk is None or self.critic_head is None:
            return ()
        return [*self.critic_trunk.parameters(), *self.critic_head.parameters()]

    def _head(self, features: Tensor) -> Categorical | DiagonalGaussian:
        outputs = self.actor_head.forward(features)
        if self.log_std is None:
            return Categorical(outputs)
        return DiagonalGaussian(outputs, self.log_std.expand_as(outputs))

    def _values(self, inputs: Tensor, features: Tensor | None) -> Tensor | None:
        if self.critic_head is None:
            return None
        if self.critic_trunk is not None:
            features = _through(self.critic_trunk, inputs)
        assert features is not None, "a critic on the shared trunk reads the actor's features"
        values: Tensor = self.critic_head.forward(features).squeeze(-1)
        return values


def _through(layers: nn.Sequential, x: Tensor) -> Tensor:
    # Straight to each layer's forward: module calls cost as much as the arithmetic of networks this small.
    for layer in layers:
        x = layer.forward(x)
    return x


def _linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")  # its own init would draw from the global stream
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def _trunk(widths: list[int], activation: str, generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [_linear(inputs, outputs, math.sqrt(2), generator), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)
