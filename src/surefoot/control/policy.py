"""The policy of control: the actor-critic, from observations to a distribution over actions and a value; and distributions.

Distributions are frozen dataclasses of their parameters, so that a rollout can store and slice them. Their leading shape is any
[...]. Randomness comes from a given generator, on the CPU.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from surefoot.control.networks import (
    EPISODE_STARTS,
    LSTM_STATE,
    CustomTrunk,
    EpisodicLSTM,
    Trunk,
    linear,
    lstm_outputs,
    make_trunk,
)
from surefoot.control.spaces import MASK, choices, numbers
from surefoot.core.rollout import Evaluation, Policy
from surefoot.errors import SurefootError
from surefoot.functional import categorical_kl, gaussian_kl, token_entropy, token_log_probs
from surefoot.recipes.callables import Functions
from surefoot.recipes.control import Network

EXPONENTIALS = 4.0
"""a softmax as a term of ``magnitude``: compiled exponentials are exact to 20 units in the last place only"""


class ReparameterisedSampling(ABC):
    """Sampling in two steps: draw noise, then transform it by a deterministic function."""

    @abstractmethod
    def noise(self, generator: torch.Generator, times: tuple[int, ...] = ()) -> Tensor:
        """The noise of a sample, or of several [*times, ...], on the CPU; its shape depends only on the distribution's."""

    @abstractmethod
    def transform(self, noise: Tensor) -> Tensor:
        """The sample for given noise."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """One action per state."""
        return self.transform(self.noise(generator))

    @abstractmethod
    def magnitude(self, actions: Tensor) -> Tensor:
        """The absolute values of the terms that make log π(a), summed: times the epsilon of their type, about how far rounding
        moves it.   [...]
        """


@dataclass(frozen=True)
class Logits(ReparameterisedSampling):
    """Independent choices among n options.   logits [..., n]; −inf excludes an option."""

    logits: Tensor

    def noise(self, generator: torch.Generator, times: tuple[int, ...] = ()) -> Tensor:
        """Exponential variates.   [*times, ..., n]"""
        noise = torch.empty((*times, *self.logits.shape), dtype=self.logits.dtype).exponential_(generator=generator)
        # With an exact 0, −inf − log 0 is NaN, which argmax takes for the largest: an excluded option.
        return noise.clamp_(min=torch.finfo(self.logits.dtype).tiny)

    def transform(self, noise: Tensor) -> Tensor:
        """A sample of every choice, by the Gumbel-max trick.   [...] integer"""
        return (self.logits - noise.to(self.logits.device).log()).argmax(-1)

    def mode(self) -> Tensor:
        """The likeliest choices.   [...] integer"""
        return self.logits.argmax(-1)

    @abstractmethod
    def whole(self, x: Tensor) -> Tensor:
        """A sum over the choices of one action."""

    def log_prob(self, actions: Tensor) -> Tensor:
        """log π(a), summed over the choices.   as ``mode`` returns them -> [...]"""
        return self.whole(token_log_probs(self.logits, actions))

    def magnitude(self, actions: Tensor) -> Tensor:
        """|log π(a)|, and of each choice the largest logit, excluded options apart, and the softmax.   [...]"""
        terms = self.logits.masked_fill(self.logits.isinf(), 0.0).abs().amax(-1) + EXPONENTIALS
        return self.log_prob(actions).abs() + self.whole(terms)

    def entropy(self) -> Tensor:
        """In nats, summed over the choices.   [...]"""
        return self.whole(token_entropy(self.logits))

    def kl(self, other: "Logits") -> Tensor:
        """Exact KL(self‖other).   [...]"""
        return self.whole(categorical_kl(self.logits, other.logits))


@dataclass(frozen=True)
class Categorical(Logits):
    """One of n actions.   logits [..., n]"""

    def whole(self, x: Tensor) -> Tensor:
        """[...]"""
        return x


@dataclass(frozen=True)
class MultiCategorical(Logits):
    """Several independent choices at once.   logits [..., d, n]; −inf pads choices with fewer options."""

    def whole(self, x: Tensor) -> Tensor:
        """[..., d] -> [...]"""
        return x.sum(-1)


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

    def magnitude(self, actions: Tensor) -> Tensor:
        """Its terms, and the rounding of mean and action, which 1/σ multiplies.   [..., d] -> [...]"""
        inverse = torch.exp(-self.log_std)
        scaled = ((actions - self.mean) * inverse).abs()
        moved = scaled * inverse * (1 + self.mean.abs() + actions.abs())
        return (scaled.square() + self.log_std.abs() + 1 + moved).sum(-1)

    def entropy(self) -> Tensor:
        """Differential entropy in nats.   [...]"""
        return self.log_std.sum(-1) + 0.5 * math.log(2 * math.pi * math.e) * self.mean.shape[-1]

    def kl(self, other: "DiagonalGaussian") -> Tensor:
        """Exact KL(self‖other).   [...]"""
        return gaussian_kl(self.mean, self.log_std, other.mean, other.log_std)

    def noise(self, generator: torch.Generator, times: tuple[int, ...] = ()) -> Tensor:
        """Standard normal variates.   [*times, ..., d]"""
        return torch.randn((*times, *self.mean.shape), dtype=self.mean.dtype, generator=generator)

    def transform(self, noise: Tensor) -> Tensor:
        """One action per state.   [..., d]"""
        return self.mean + self.log_std.exp() * noise.to(self.mean.device)

    def mode(self) -> Tensor:
        """The mean.   [..., d]"""
        return self.mean


@dataclass(frozen=True)
class Factored(ReparameterisedSampling):
    """Choices and numbers at once, all independent: the log-probability of an action is the sum of its parts'.

    logits [..., k, n], −inf pads choices with fewer options; mean [..., d], log_std [..., d]. Actions [..., k + d] are floats:
    the choices, then the numbers.
    """

    logits: Tensor
    mean: Tensor
    log_std: Tensor

    @property
    def parts(self) -> tuple[MultiCategorical, DiagonalGaussian]:
        """The distributions of the choices and of the numbers."""
        return MultiCategorical(self.logits), DiagonalGaussian(self.mean, self.log_std)

    def log_prob(self, actions: Tensor) -> Tensor:
        """log π(choices) + log π(numbers).   [..., k + d] -> [...]"""
        (choices, numbers), (chosen, drawn) = self.parts, self._split(actions)
        return choices.log_prob(chosen) + numbers.log_prob(drawn)

    def magnitude(self, actions: Tensor) -> Tensor:
        """Sum of the sizes of the terms of log π over choices and numbers.   [...]"""
        (choices, numbers), (chosen, drawn) = self.parts, self._split(actions)
        return choices.magnitude(chosen) + numbers.magnitude(drawn)

    def entropy(self) -> Tensor:
        """In nats, summed.   [...]"""
        choices, numbers = self.parts
        return choices.entropy() + numbers.entropy()

    def kl(self, other: "Factored") -> Tensor:
        """Exact KL(self‖other).   [...]"""
        return self.parts[0].kl(other.parts[0]) + self.parts[1].kl(other.parts[1])

    def noise(self, generator: torch.Generator, times: tuple[int, ...] = ()) -> Tensor:
        """The noise of the choices, then of the numbers.   [*times, ..., k · n + d]"""
        choices, numbers = (part.noise(generator, times) for part in self.parts)
        return torch.cat([choices.flatten(-2), numbers], -1)

    def transform(self, noise: Tensor) -> Tensor:
        """One action per state.   [..., k + d]"""
        of_choices, of_numbers = _columns(noise, self.mean.shape[-1])
        choices, numbers = self.parts
        return self._joined(
            choices.transform(of_choices.reshape(*of_choices.shape[:-1], *self.logits.shape[-2:])),
            numbers.transform(of_numbers),
        )

    def mode(self) -> Tensor:
        """The likeliest choices and the mean.   [..., k + d]"""
        choices, numbers = self.parts
        return self._joined(choices.mode(), numbers.mode())

    def _split(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        chosen, drawn = _columns(actions, self.mean.shape[-1])
        return chosen.long(), drawn

    def _joined(self, chosen: Tensor, drawn: Tensor) -> Tensor:
        return torch.cat([chosen.to(drawn.dtype), drawn], -1)  # exact up to 16 million options


def _columns(x: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
    """The columns of the choices, and the last ones, of the numbers."""
    return x[..., :-numbers], x[..., -numbers:]


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
        functions: Functions | None = None,
    ) -> None:
        super().__init__()
        self.choices, self.single = choices(action_space), isinstance(action_space, spaces.Discrete)
        self.options, box = sum(self.choices or ()), numbers(action_space)
        count = 0 if box is None else math.prod(box.shape)
        self.actor_trunk = make_trunk(observation_space, network, generator, functions, network.actor_parts)
        self.log_std = nn.Parameter(torch.full((count,), network.log_std, dtype=torch.float32)) if count else None
        width = self.actor_trunk.width
        self.actor_memory = None if network.lstm is None else EpisodicLSTM(width, network.lstm, generator)
        self.actor_head = linear(network.lstm or width, self.options + count, 0.01, generator)
        separate = critic and not network.shared_trunk
        self.critic_trunk = None
        if separate:
            self.critic_trunk = make_trunk(observation_space, network, generator, functions, network.critic_parts)
            width = self.critic_trunk.width
            if not {*self.actor_trunk.parameters()}.isdisjoint(self.critic_trunk.parameters()):
                raise SurefootError(
                    f"network.custom={network.custom!r}: returned the same parameters for actor and critic; make new ones on "
                    "every call, or set network.shared_trunk = true"
                )
        self.critic_memory = EpisodicLSTM(width, network.lstm, generator) if separate and network.lstm else None
        self.critic_head = linear(network.lstm or width, 1, 1.0, generator) if critic else None

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """[..., *part] each, [...] or [..., d] -> log-probabilities, entropy, values and distribution, all [...].

        With an LSTM the leading shape is [N, T], and the inputs contain the episode starts and the state before them.
        """
        features = [trunk.forward(inputs) for trunk in (self.actor_trunk, self.critic_trunk) if trunk is not None]
        if self.actor_memory is not None:
            memories = [memory for memory in (self.actor_memory, self.critic_memory) if memory is not None]
            features = lstm_outputs(memories, features, inputs[EPISODE_STARTS], inputs[LSTM_STATE])
        distribution = self._head(features[0], inputs)
        return Evaluation(
            log_probs=distribution.log_prob(actions),
            entropy=distribution.entropy(),
            values=self._values(features[-1]),
            distribution=distribution,
        )

    def step(self, inputs: Mapping[str, Tensor]) -> tuple[Any, Tensor | None]:
        """One step: the distribution over actions, and the next LSTM state.

        [N, *part] each, starts [N], state [N, LSTMs, 2, width] -> Categorical, MultiCategorical, DiagonalGaussian or Factored
        over [N], and the state; without an LSTM, any leading shape and None.
        """
        if self.actor_memory is None:
            return self._head(self.actor_trunk.forward(inputs), inputs), None
        sequences = as_sequences(inputs)
        features, after = _step(self.actor_trunk, self.actor_memory, sequences, 0)
        states = [after]
        if self.critic_trunk is not None and self.critic_memory is not None:
            states.append(_step(self.critic_trunk, self.critic_memory, sequences, 1)[1])
        return self._head(features.squeeze(1), inputs), torch.stack(states, 1)

    def values(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """V(s) at single steps; zeros without a critic.   as in ``step`` -> [N], or any leading shape without an LSTM"""
        if self.actor_memory is not None:
            inputs = as_sequences(inputs)
        trunk, memory, index = self.actor_trunk, self.actor_memory, 0
        if self.critic_trunk is not None:
            trunk, memory, index = self.critic_trunk, self.critic_memory, 1
        features = trunk.forward(inputs) if memory is None else _step(trunk, memory, inputs, index)[0]
        values = self._values(features)
        if values is None:
            values = features.new_zeros(features.shape[:-1])
        return values if memory is None else values.squeeze(1)

    def initial_lstm_state(self, count: int) -> Tensor | None:
        """The LSTM state of N environments before the first step; None without LSTM.   [N, LSTMs, 2, width]"""
        if self.actor_memory is None:
            return None
        lstms, width = 1 if self.critic_trunk is None else 2, self.actor_memory.lstm.hidden_size
        return torch.zeros(count, lstms, 2, width, dtype=torch.float32, device=self.actor_head.weight.device)

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """Trunk and head of a separate critic; empty if the trunk is shared."""
        if self.critic_trunk is None or self.critic_head is None:
            return ()
        modules = (self.critic_trunk, self.critic_memory, self.critic_head)
        return [p for module in modules if module is not None for p in module.parameters() if p.requires_grad]

    def _head(
        self, features: Tensor, inputs: Mapping[str, Tensor]
    ) -> Categorical | MultiCategorical | DiagonalGaussian | Factored:
        outputs = self.actor_head.forward(features)
        if self.choices is None:
            assert self.log_std is not None, "an action without choices has numbers"
            return DiagonalGaussian(outputs, self.log_std.expand_as(outputs))
        logits, allowed = outputs[..., : self.options], inputs.get(MASK)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -math.inf)
        if self.single:
            return Categorical(logits)
        logits = pad_choices(logits, self.choices)
        if self.log_std is None:
            return MultiCategorical(logits)
        mean = outputs[..., self.options :]
        return Factored(logits, mean, self.log_std.expand_as(mean))

    def _values(self, features: Tensor) -> Tensor | None:
        if self.critic_head is None:
            return None
        values: Tensor = self.critic_head.forward(features).squeeze(-1)
        return values


def _step(trunk: Trunk | CustomTrunk, lstm: EpisodicLSTM, inputs: Mapping[str, Tensor], index: int) -> tuple[Tensor, Tensor]:
    """The output of a trunk's LSTM at a single step, and its state after it."""
    return lstm.step(trunk.forward(inputs), inputs[EPISODE_STARTS], inputs[LSTM_STATE][:, index])


def as_sequences(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Single steps [N, ...] as sequences of one step [N, 1, ...]."""
    return {path: x if path == LSTM_STATE else x.unsqueeze(1) for path, x in inputs.items()}
