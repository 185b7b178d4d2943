"""The actor-critic: observations to a distribution over actions and to a value."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot.control.policies.distributions import Categorical, DiagonalGaussian, MultiCategorical, pad_choices
from surefoot.control.policies.networks import (
    EPISODE_STARTS,
    LSTM_STATE,
    CustomTrunk,
    EpisodicLSTM,
    Trunk,
    linear,
    make_trunk,
)
from surefoot.control.spaces import MASK, choices
from surefoot.core.rollout import Evaluation, Policy
from surefoot.errors import SurefootError
from surefoot.recipes.control import Network


class ActorCritic(Policy):
    """Heads for π and V on separate trunks or a shared one, with a state-independent log-std for Box actions.

    Inputs are *normalised* observations [..., *part], and under "action_mask" the mask [..., choices] if the task has one:
    masked actions have probability zero and get no gradient. Heads are orthogonal too (gain 0.01 for the policy, 1 for the
    value), drawn from ``generator``.
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
        self.log_std = None if self.choices else nn.Parameter(torch.full((outputs,), network.log_std))
        width = self.actor_trunk.width
        self.actor_memory = None if network.lstm is None else EpisodicLSTM(width, network.lstm, generator)
        self.actor_head = linear(network.lstm or width, outputs, 0.01, generator)
        separate = critic and not network.shared_trunk
        self.critic_trunk = make_trunk(observation_space, network, generator) if separate else None
        if self.critic_trunk is not None and not _disjoint(self.actor_trunk, self.critic_trunk):
            raise SurefootError(
                f"network.custom={network.custom!r}: returned the same parameters for actor and critic; make new ones on every "
                "call, or set network.shared_trunk = true"
            )
        if self.critic_trunk is not None:
            width = self.critic_trunk.width
        self.critic_memory = EpisodicLSTM(width, network.lstm, generator) if separate and network.lstm else None
        self.critic_head = linear(network.lstm or width, 1, 1.0, generator) if critic else None

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """[..., *part] each, [...] or [..., d] -> log-probabilities, entropy, values and distribution, all [...].

        With an LSTM the leading shape is [N, T], and the inputs contain the episode starts and the state before them.
        """
        features, _ = _features(self.actor_trunk, self.actor_memory, inputs, 0)
        distribution = self._head(features, inputs)
        return Evaluation(
            log_probs=distribution.log_prob(actions),
            entropy=distribution.entropy(),
            values=self._values(inputs, features),
            distribution=distribution,
        )

    def step(self, inputs: Mapping[str, Tensor]) -> tuple[Any, Tensor | None]:
        """One step: the distribution over actions, and the next LSTM state.

        [N, *part] each, starts [N], state [N, LSTMs, 2, width] -> Categorical, MultiCategorical or DiagonalGaussian over
        [N], and the state; without an LSTM, any leading shape and None.
        """
        if self.actor_memory is None:
            return self._head(self.actor_trunk.forward(inputs), inputs), None
        sequences = as_sequences(inputs)
        features, after = _features(self.actor_trunk, self.actor_memory, sequences, 0)
        states = [after]
        if self.critic_trunk is not None:
            states.append(_features(self.critic_trunk, self.critic_memory, sequences, 1)[1])
        return self._head(features.squeeze(1), inputs), torch.stack([state for state in states if state is not None], 1)

    def values(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """V(s) at single steps; zeros without a critic.   as in ``step`` -> [N], or any leading shape without an LSTM"""
        if self.actor_memory is not None:
            inputs = as_sequences(inputs)
        features = None
        if self.critic_trunk is None:
            features, _ = _features(self.actor_trunk, self.actor_memory, inputs, 0)
        values = self._values(inputs, features)
        if values is None:
            assert features is not None, "without a critic the only trunk is the actor's"
            values = features.new_zeros(features.shape[:-1])
        return values if self.actor_memory is None else values.squeeze(1)

    def initial_lstm_state(self, count: int) -> Tensor | None:
        """The LSTM state of N environments before the first step; None without LSTM.   [N, LSTMs, 2, width]"""
        if self.actor_memory is None:
            return None
        lstms, width = 1 if self.critic_trunk is None else 2, self.actor_memory.lstm.hidden_size
        return torch.zeros(count, lstms, 2, width, device=self.actor_head.weight.device)

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """Trunk and head of a separate critic; empty if the trunk is shared."""
        if self.critic_trunk is None or self.critic_head is None:
            return ()
        modules = (self.critic_trunk, self.critic_memory, self.critic_head)
        return [p for module in modules if module is not None for p in module.parameters() if p.requires_grad]

    def _head(self, features: Tensor, inputs: Mapping[str, Tensor]) -> Categorical | MultiCategorical | DiagonalGaussian:
        outputs = self.actor_head.forward(features)
        if self.log_std is not None:
            return DiagonalGaussian(outputs, self.log_std.expand_as(outputs))
        allowed = inputs.get(MASK)
        if allowed is not None:
            outputs = outputs.masked_fill(~allowed, -math.inf)
        assert self.choices is not None, "an action that is not a Box has choices"
        return Categorical(outputs) if self.single else MultiCategorical(pad_choices(outputs, self.choices))

    def _values(self, inputs: Mapping[str, Tensor], features: Tensor | None) -> Tensor | None:
        if self.critic_head is None:
            return None
        if self.critic_trunk is not None:
            features, _ = _features(self.critic_trunk, self.critic_memory, inputs, 1)
        assert features is not None, "a critic on the shared trunk reads the actor's features"
        values: Tensor = self.critic_head.forward(features).squeeze(-1)
        return values


def _features(
    trunk: Trunk | CustomTrunk, lstm: EpisodicLSTM | None, inputs: Mapping[str, Tensor], index: int
) -> tuple[Tensor, Tensor | None]:
    """The output of a trunk, and of its LSTM if it has one, whose state is the ``index``-th."""
    features = trunk.forward(inputs)
    if lstm is None:
        return features, None
    return lstm.forward(features, inputs[EPISODE_STARTS], inputs[LSTM_STATE][:, index])


def as_sequences(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Single steps [N, ...] as sequences of one step [N, 1, ...]."""
    return {path: x if path == LSTM_STATE else x.unsqueeze(1) for path, x in inputs.items()}


def _disjoint(one: nn.Module, other: nn.Module) -> bool:
    return {id(p) for p in one.parameters()}.isdisjoint(id(p) for p in other.parameters())
