"""The policy network of control: observations to a distribution over actions, and to a value."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot.config import Network
from surefoot.control.distributions import Categorical, DiagonalGaussian, MultiCategorical, side_by_side
from surefoot.control.networks import linear, make_trunk
from surefoot.control.spaces import MASK, choices
from surefoot.errors import SurefootError
from surefoot.rollout import Evaluation, Policy


class ActorCritic(Policy):
    """Heads for π and V on trunks, apart or shared, with a state-independent log-std for Box actions.

    Inputs are the leaves of *normalised* observations [..., *leaf], and under "action_mask" the mask [..., choices] where the
    task masks: what it forbids has probability zero and gets no gradient. Heads are orthogonal too (gain 0.01 for the
    policy's, 1 for the value's), drawn from ``generator``.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        network: Network,
        critic: bool,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.choices, self.single = choices(action_space), isinstance(action_space, spaces.Discrete)
        outputs = sum(self.choices) if self.choices else math.prod(action_space.shape or ())
        self.actor_trunk = make_trunk(observation_space, network, generator)
        self.actor_head = linear(self.actor_trunk.width, outputs, 0.01, generator)
        self.log_std = None if self.choices else nn.Parameter(torch.full((outputs,), network.log_std))
        apart = critic and not network.shared_trunk
        self.critic_trunk = make_trunk(observation_space, network, generator) if apart else None
        if self.critic_trunk is not None and not _apart(self.actor_trunk, self.critic_trunk):
            raise SurefootError(
                f"network.custom={network.custom!r}: made the same parameters for actor and critic; make new ones on every "
                "call, or set network.shared_trunk = true"
            )
        width = self.actor_trunk.width if self.critic_trunk is None else self.critic_trunk.width
        self.critic_head = linear(width, 1, 1.0, generator) if critic else None

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """[..., *leaf] each, [...] or [..., d] -> log-probabilities, entropy, values and distribution, all [...]."""
        features = self.actor_trunk.forward(inputs)
        distribution = self._head(features, inputs)
        return Evaluation(
            log_probs=distribution.log_prob(actions),
            entropy=distribution.entropy(),
            values=self._values(inputs, features),
            distribution=distribution,
        )

    def distribution(self, inputs: Mapping[str, Tensor]) -> Any:
        """The distribution over actions.   [..., *leaf] each -> Categorical, MultiCategorical or DiagonalGaussian over [...]"""
        return self._head(self.actor_trunk.forward(inputs), inputs)

    def values(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """V(s); zeros without a critic.   [..., *leaf] each -> [...]"""
        features = self.actor_trunk.forward(inputs) if self.critic_trunk is None else None
        values = self._values(inputs, features)
        if values is None:
            assert features is not None, "without a critic there is no trunk but the actor's"
            return features.new_zeros(features.shape[:-1])
        return values

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """Trunk and head of a separate critic; nothing where the trunk is shared."""
        if self.critic_trunk is None or self.critic_head is None:
            return ()
        everything = [*self.critic_trunk.parameters(), *self.critic_head.parameters()]
        return [parameter for parameter in everything if parameter.requires_grad]

    def _head(self, features: Tensor, inputs: Mapping[str, Tensor]) -> Categorical | MultiCategorical | DiagonalGaussian:
        outputs = self.actor_head.forward(features)
        if self.log_std is not None:
            return DiagonalGaussian(outputs, self.log_std.expand_as(outputs))
        allowed = inputs.get(MASK)
        if allowed is not None:
            outputs = outputs.masked_fill(~allowed, -math.inf)
        assert self.choices is not None, "what is not a Box is made of choices"
        return Categorical(outputs) if self.single else MultiCategorical(side_by_side(outputs, self.choices))

    def _values(self, inputs: Mapping[str, Tensor], features: Tensor | None) -> Tensor | None:
        if self.critic_head is None:
            return None
        if self.critic_trunk is not None:
            features = self.critic_trunk.forward(inputs)
        assert features is not None, "a critic on the shared trunk reads the actor's features"
        values: Tensor = self.critic_head.forward(features).squeeze(-1)
        return values


def _apart(one: nn.Module, other: nn.Module) -> bool:
    return {id(p) for p in one.parameters()}.isdisjoint(id(p) for p in other.parameters())
