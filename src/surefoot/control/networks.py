"""Networks from observations to features: built-in trunks, a user's own network, and the LSTM on top.

Weights are orthogonal (gain √2) and drawn from the given generator; Engstrom et al. 2020 (arXiv 2005.12729) measured the
effect of these details.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot.accel.programs import is_traced
from surefoot.control.recurrent import in_steps
from surefoot.control.spaces import ObservationPart, channels_last, choices, image_shape, is_image, observation_parts
from surefoot.errors import SurefootError, did_you_mean
from surefoot.recipes.callables import NETWORK, Functions, load_function
from surefoot.recipes.control import Network

EPISODE_STARTS = "lstm start"
"""key of a recurrent policy's inputs: where episodes start [B, T]"""
LSTM_STATE = "lstm state"
"""key of a recurrent policy's inputs: the state before the first step [B, LSTMs, 2, width]"""
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
PASS_AT_ONCE = 512
"""images per pass without gradient, to bound memory"""
SPARE = 10_000
"""numbers of a hidden state that cost about as much as a call of nn.LSTM, if calculated in vain"""


def make_trunk(
    observation_space: gymnasium.Space[Any],
    network: Network,
    generator: torch.Generator,
    functions: Functions | None = None,
    names: Sequence[str] | None = None,
) -> "Trunk | CustomTrunk":
    """The trunk of a recipe on the parts of these names (None: all); SurefootError if a user's own network doesn't fit."""
    if names is not None:
        observation_space = selected_space(observation_space, names)
    if network.custom is not None:
        return CustomTrunk(network.custom, observation_space, generator, functions)
    return Trunk(observation_space, network, generator)


def selected_space(space: gymnasium.Space[Any], names: Sequence[str]) -> spaces.Dict:
    """A Dict space with the parts of these names alone; "arm" stands for all parts of the Dict "arm".

    Raises SurefootError for a name that stands for no part.
    """
    parts = list(observation_parts(space))
    for name in names:
        if not isinstance(space, spaces.Dict) or not any(path == name or path.startswith(f"{name}.") for path in parts):
            raise SurefootError(
                f"network.actor_parts, network.critic_parts={list(names)}: the observation has no part "
                f"{name!r}{did_you_mean(name, parts)} (parts: {', '.join(map(repr, parts))})"
            )
    assert isinstance(space, spaces.Dict)
    chosen: dict[str, gymnasium.Space[Any]] = {}
    for key, part in space.spaces.items():
        below = [name.removeprefix(f"{key}.") for name in names if name.startswith(f"{key}.")]
        if key in names:
            chosen[key] = part
        elif below:
            chosen[key] = selected_space(part, below)
    return spaces.Dict(list(chosen.items()))


class Trunk(nn.Module):
    """An encoder per part, their outputs concatenated, then the hidden layers.   [..., *part] each -> [..., width]"""

    def __init__(self, observation_space: gymnasium.Space[Any], network: Network, generator: torch.Generator) -> None:
        super().__init__()
        parts = observation_parts(observation_space)
        self.paths = list(parts)
        self.plain = len(parts) == 1 and all(part.vector and len(part.shape) == 1 for part in parts.values())
        encoders = [_encoder(part, generator) for part in parts.values()]
        self.encoders = nn.ModuleList(encoders)
        widths = [sum(encoder.width for encoder in encoders), *network.hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [linear(inputs, outputs, math.sqrt(2), generator), ACTIVATIONS[network.activation]()]
        self.layers = nn.Sequential(*layers)
        self.width = widths[-1]

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Features of normalised observations."""
        # Call forward directly: module calls cost as much as the arithmetic of networks this small.
        if self.plain:
            x = inputs[self.paths[0]]
        else:
            x = torch.cat([encoder.forward(inputs[path]) for path, encoder in zip(self.paths, self.encoders, strict=True)], -1)
        for layer in self.layers:
            x = layer.forward(x)
        return x


def _encoder(part: ObservationPart, generator: torch.Generator) -> "Vector | OneHot | NatureCNN":
    if isinstance(part.space, spaces.Box):
        return NatureCNN(part.space, generator) if is_image(part.space) else Vector(part.shape)
    return Vector(part.shape) if isinstance(part.space, spaces.MultiBinary) else OneHot(part.space)


class Vector(nn.Module):
    """Numbers of any shape, flattened.   [..., *shape] -> [..., n]"""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.axes, self.width = len(shape), math.prod(shape)

    def forward(self, x: Tensor) -> Tensor:
        """As float32."""
        if self.axes != 1:
            x = x.unsqueeze(-1) if self.axes == 0 else x.flatten(-self.axes)
        return x.float()


class OneHot(nn.Module):
    """One-hot encodings of every choice, side by side.   [..., *shape] -> [..., Σ n]"""

    first: Tensor
    values: Tensor

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        sizes = choices(space)
        assert sizes is not None, "only Discrete and MultiDiscrete are one-hot"
        self.axes, self.width = len(space.shape or ()), sum(sizes)
        start = torch.as_tensor(space.start).reshape(-1)
        # Entry j of the output belongs to choice part[j], and is 1 where that choice is values[j].
        part = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        values = torch.cat([torch.arange(n) + first for n, first in zip(sizes, start, strict=True)])
        self.register_buffer("part", part, persistent=False)
        self.register_buffer("values", values, persistent=False)
        self.part: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """As float32."""
        x = x.unsqueeze(-1) if self.axes == 0 else x.flatten(-self.axes)
        return (x[..., self.part] == self.values).float()


class NatureCNN(nn.Module):
    """The convolutions of Mnih et al. 2015 ("Human-level control", Nature 518) on bytes.   [..., *shape] -> [..., 512]

    The space's bounds, which are saved with the weights, become 0 and 1.
    """

    low: Tensor
    range: Tensor

    def __init__(self, space: spaces.Box, generator: torch.Generator) -> None:
        super().__init__()
        shape = space.shape
        self.axes, self.last = len(shape), channels_last(shape)
        channels, height, width = image_shape(shape)
        low, high = (self._arranged(torch.from_numpy(bound.astype(np.float32)))[0] for bound in (space.low, space.high))
        for name, x in (("low", low), ("range", (high - low).clamp(min=1))):
            self.register_buffer(name, (x.flatten()[0] if bool((x == x.flatten()[0]).all()) else x).clone())
        self.convolutions = nn.Sequential(
            _convolution(channels, 32, 8, 4, generator),
            nn.ReLU(),
            _convolution(32, 64, 4, 2, generator),
            nn.ReLU(),
            _convolution(64, 64, 3, 1, generator),
            nn.ReLU(),
        )
        for size, stride in ((8, 4), (4, 2), (3, 1)):
            height, width = (height - size) // stride + 1, (width - size) // stride + 1
        self.width = 512
        self.layer = linear(64 * height * width, self.width, math.sqrt(2), generator)

    def forward(self, x: Tensor) -> Tensor:
        """Converts bytes to numbers from 0 to 1, so that a rollout can store bytes."""
        lead = x.shape[: x.dim() - self.axes]
        x = self._arranged(x)
        pieces = [x] if torch.is_grad_enabled() else torch.split(x, PASS_AT_ONCE)
        scaled = ((piece.float() - self.low) / self.range for piece in pieces)
        features = [self.layer(self.convolutions(piece).flatten(1)).relu() for piece in scaled]
        return (features[0] if len(features) == 1 else torch.cat(features)).reshape(*lead, self.width)

    def _arranged(self, x: Tensor) -> Tensor:
        """[..., *shape] -> [N, channels, height, width]"""
        lead = x.dim() - self.axes
        if self.last:  # movedim would leave strides of one channel that the compiler takes for those of channels last
            x = x.squeeze(-1).unsqueeze(-3) if x.shape[-1] == 1 else x.movedim(-1, -3)
        return x.reshape(-1, math.prod(x.shape[lead:-2]), *x.shape[-2:])


def linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """A layer with orthogonal weights from the generator, and zero bias."""
    with torch.random.fork_rng(devices=[]):  # its default weights, which are overwritten, use the global generator
        layer = nn.Linear(inputs, outputs, dtype=torch.float32)  # whatever default an environment's package has set
    _initialise(layer, gain, generator)
    return layer


def _convolution(inputs: int, outputs: int, size: int, stride: int, generator: torch.Generator) -> nn.Conv2d:
    with torch.random.fork_rng(devices=[]):
        layer = nn.Conv2d(inputs, outputs, size, stride, dtype=torch.float32)
    _initialise(layer, math.sqrt(2), generator)
    return layer


def _initialise(layer: Any, gain: float, generator: torch.Generator) -> None:
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)


class CustomTrunk(nn.Module):
    """A user's own network: ``factory(observation_space)`` makes a module from observations [N, ...] to features [N, k].

    The module takes a dict with a tensor per part, or the tensor itself if the space has no parts: Boxes as float32,
    normalised if the recipe normalises; images as bytes; integers as the environment returns them (int64; MultiBinary int8).
    Random numbers in the factory come from the run's own stream; the global generator is restored.

    Raises SurefootError, one line, when it can't be imported, is not a module, or returns features of another shape or type.
    """

    def __init__(
        self, path: str, observation_space: gymnasium.Space[Any], generator: torch.Generator, functions: Functions | None = None
    ) -> None:
        super().__init__()
        self.path = path
        parts = observation_parts(observation_space)
        self.axes = {name: len(part.shape) for name, part in parts.items()}
        self.bare = not next(iter(parts.values())).keys
        factory = load_function(NETWORK, path, functions or {})
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.module = self._make(factory, observation_space)
            self.width = self._probe({name: _random_batch(part) for name, part in parts.items()})

    def _make(self, factory: Any, observation_space: gymnasium.Space[Any]) -> nn.Module:
        try:
            module = factory(observation_space)
        except (Exception, SystemExit) as error:
            raise self._error(f"called with the observation space, it raised {_in_one_line(error)}") from None
        if not isinstance(module, nn.Module):
            raise self._error(f"returned a {type(module).__name__}; it must return a torch.nn.Module")
        return module

    def _probe(self, inputs: dict[str, Tensor]) -> int:
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()  # keep random observations out of the statistics of a batch norm
        with torch.no_grad():
            both = self._features(inputs, 2)
            self.width = both.shape[1]  # later calls must return the same width
            # A single row is what it acts on later, and shows a stray squeeze.
            alone = torch.cat([self._features({name: x[row : row + 1] for name, x in inputs.items()}, 1) for row in (0, 1)])
        rounding = 1e-4 * max(1.0, float(both.abs().max()))
        if both.isfinite().all() and not torch.allclose(both, alone, rtol=1e-3, atol=rounding):
            raise self._error("returned different features for an observation alone and in a batch; rows must be independent")
        for module, training in modes.items():  # one by one: a frozen submodule may be in eval mode
            module.training = training
        odd = {str(p.dtype) for p in self.module.parameters() if p.dtype != torch.float32}
        if odd:
            raise self._error(f"has parameters of {', '.join(sorted(odd))}; they must be float32")
        return self.width

    def _features(self, inputs: dict[str, Tensor], count: int) -> Tensor:
        try:
            features = self.module(next(iter(inputs.values())) if self.bare else inputs)
        except (Exception, SystemExit) as error:
            shapes = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in inputs.items())
            raise self._error(f"forward raised {_in_one_line(error)} (for {shapes})") from error
        if not isinstance(features, Tensor):
            raise self._error(f"forward returned a {type(features).__name__}; it must return a tensor of features [N, k]")
        width = getattr(self, "width", None)
        expected = "k" if width is None else str(width)
        # Not len(features): an exported program would treat it as a constant.
        right = features.dim() == 2 and features.shape[0] == count and features.shape[1] > 0
        if not right or (width is not None and features.shape[1] != width):
            raise self._error(
                f"returned features of shape {list(features.shape)} for {count} observations, not [{count}, {expected}]"
            )
        if features.dtype != torch.float32:
            raise self._error(f"returned features of {features.dtype}; they must be float32")
        return features

    def _error(self, what: str) -> SurefootError:
        return SurefootError(f"network.custom={self.path!r}: {what}")

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Features of normalised observations.   [..., *part] each -> [..., k]"""
        name, axes = next(iter(self.axes.items()))
        lead = inputs[name].shape[: inputs[name].dim() - axes]
        parts = {path: inputs[path].reshape(-1, *inputs[path].shape[len(lead) :]) for path in self.axes}
        return self._features(parts, math.prod(lead)).reshape(*lead, self.width)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _random_batch(part: ObservationPart) -> Tensor:
    """Two random observations of a part, always the same."""
    rng, shape = np.random.default_rng(0), (2, *part.shape)
    if part.vector:
        return torch.from_numpy(rng.random(shape, np.float32))
    low, high = (part.space.low, part.space.high) if part.bounds is None else part.bounds
    return torch.from_numpy(rng.integers(low, high, shape, endpoint=True).astype(part.dtype))


class EpisodicLSTM(nn.Module):
    """An LSTM (Hochreiter & Schmidhuber 1997) whose state is zero again at every episode start.

    Weights are orthogonal (gain 1), drawn from ``generator``; biases are zero.
    """

    def __init__(self, inputs: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True, device="meta", dtype=torch.float32).to_empty(device="cpu")
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter, generator=generator)
            else:
                nn.init.zeros_(parameter)

    def step(self, features: Tensor, starts: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """A single step: [N, 1, inputs], [N, 1] bool, [N, 2, width] -> [N, 1, width], and the state after it.

        ``state`` is hidden and cell before the step; it is reset to zero where an episode starts.
        """
        # A tenth of the time of nn.LSTM, whose calls pay off for many steps.
        hidden, cell = state.masked_fill(starts[:, :, None], 0).unbind(1)
        hidden, cell = torch.lstm_cell(features.squeeze(1), (hidden, cell), *self.lstm.all_weights[0])
        return hidden.unsqueeze(1), torch.stack([hidden, cell], 1)

    def forward(self, features: Tensor, starts: Tensor, state: Tensor) -> Tensor:
        """[N, T, inputs], [N, T] bool, [N, 2, width] -> [N, T, width]

        ``state`` is hidden and cell before the first step; it is reset to zero at each start of a row.
        """
        count, steps = starts.shape
        begins = torch.cat([torch.ones_like(starts[:, :1]), starts[:, 1:]], 1).flatten()
        first = begins.nonzero().flatten()
        if len(first) == count:
            return self._run(features, state.masked_fill(starts[:, :1, None], 0))[0]
        # nn.LSTM is fast but can't reset its state. So the segments between two starts are rows of their own, longest first.
        # A call of nn.LSTM takes all that go on, as long as what it calculates in vain costs less than another call.
        lengths, order = torch.diff(first, append=first.new_tensor([len(begins)])).sort(descending=True, stable=True)
        first = first[order]
        last = first + lengths - 1
        carried = (first % steps == 0) & ~starts.flatten()[first]
        state = state[first // steps].masked_fill(~carried[:, None, None], 0)
        flat, pieces, places, done = features.flatten(0, 1), [], torch.empty_like(begins, dtype=torch.long), 0
        for live, begin, end in narrowing(lengths.tolist(), SPARE // self.lstm.hidden_size):
            steps_of = first[:live, None] + torch.arange(begin, end, device=first.device)
            real = (steps_of <= last[:live, None]).flatten()
            # A segment that ends earlier repeats its last step; what comes out there is not read.
            piece, state = self._run(flat[torch.minimum(steps_of, last[:live, None])], state[:live])
            places[steps_of.flatten()[real]] = done + real.nonzero().flatten()
            done += len(real)
            pieces.append(piece.flatten(0, 1))
        return torch.cat(pieces)[places].view(count, steps, -1)

    def _run(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Without resets: [N, T, inputs], [N, 2, width] -> [N, T, width], and the state after the last step."""
        hidden, cell = (x.contiguous()[None] for x in state.unbind(1))
        outputs, (hidden, cell) = self.lstm(features, (hidden, cell))
        return outputs, torch.stack([hidden[0], cell[0]], 1)


def lstm_outputs(memories: Sequence[EpisodicLSTM], features: Sequence[Tensor], starts: Tensor, state: Tensor) -> list[Tensor]:
    """The outputs of LSTMs that read the same steps.   [N, T, inputs] for each, [N, T] bool, [N, LSTMs, 2, width]"""
    states = state.unbind(1)
    if starts.shape[1] == 1:  # the compiler makes C++ that does not compile of a loop over one step
        return [memory.step(x, starts, before)[0] for memory, x, before in zip(memories, features, states, strict=True)]
    if is_traced():
        return in_steps([memory.lstm for memory in memories], features, starts, state)
    return [memory.forward(x, starts, before) for memory, x, before in zip(memories, features, states, strict=True)]


def narrowing(lengths: Sequence[int], spare: int) -> Iterator[tuple[int, int, int]]:
    """Calls that together take all steps of rows with these lengths, longest first: number of rows, first step, end.

    Each goes on to the length of a longer row while at most ``spare`` of its steps are after the end of their row.

    >>> list(narrowing([9, 5, 4, 1], 3))
    [(4, 0, 4), (2, 4, 5), (1, 5, 9)]
    """
    live, begin = len(lengths), 0
    while live:
        end, spent = lengths[live - 1], 0
        for ended, longer in enumerate(reversed(lengths[: live - 1]), 1):
            spent += ended * (longer - end)
            if spent > spare:
                break
            end = longer
        yield live, begin, end
        while live and lengths[live - 1] <= end:
            live -= 1
        begin = end
