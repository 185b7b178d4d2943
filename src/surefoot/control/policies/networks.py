"""Trunks: the leaves of an observation to features. Built in, or a network of the user's own.

Weights are orthogonal (gain √2) and drawn from the generator that is passed in; Engstrom et al. 2020 (arXiv 2005.12729)
measured what these details are worth.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot.control.spaces import Leaf, channels_last, choices, image_shape, is_image, leaves
from surefoot.errors import SurefootError
from surefoot.recipes.control import Network
from surefoot.recipes.import_object import import_object

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
PASS_AT_ONCE = 512
"""images per pass where no gradient is wanted, to bound memory"""


def make_trunk(observation_space: gymnasium.Space[Any], network: Network, generator: torch.Generator) -> "Trunk | CustomTrunk":
    """What the recipe asks for; SurefootError when a network of the user's own doesn't fit."""
    if network.custom is not None:
        return CustomTrunk(network.custom, observation_space, generator)
    return Trunk(observation_space, network, generator)


class Trunk(nn.Module):
    """Every leaf through its encoder, the results side by side, then the hidden layers.   [..., *leaf] each -> [..., width]"""

    def __init__(self, observation_space: gymnasium.Space[Any], network: Network, generator: torch.Generator) -> None:
        super().__init__()
        parts = leaves(observation_space)
        self.paths = list(parts)
        self.plain = len(parts) == 1 and all(leaf.vector and len(leaf.shape) == 1 for leaf in parts.values())
        encoders = [_encoder(leaf, generator) for leaf in parts.values()]
        self.encoders = nn.ModuleList(encoders)
        widths = [sum(encoder.width for encoder in encoders), *network.hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [linear(inputs, outputs, math.sqrt(2), generator), ACTIVATIONS[network.activation]()]
        self.layers = nn.Sequential(*layers)
        self.width = widths[-1]

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Features of normalised observations."""
        # Straight to each layer's forward: module calls cost as much as the arithmetic of networks this small.
        if self.plain:
            x = inputs[self.paths[0]]
        else:
            x = torch.cat([encoder.forward(inputs[path]) for path, encoder in zip(self.paths, self.encoders, strict=True)], -1)
        for layer in self.layers:
            x = layer.forward(x)
        return x


def _encoder(leaf: Leaf, generator: torch.Generator) -> "Vector | OneHot | NatureCNN":
    if isinstance(leaf.space, spaces.Box):
        return NatureCNN(leaf.shape, generator) if is_image(leaf.space) else Vector(leaf.shape)
    return Vector(leaf.shape) if isinstance(leaf.space, spaces.MultiBinary) else OneHot(leaf.space)


class Vector(nn.Module):
    """Numbers as they are, of any shape.   [..., *shape] -> [..., n]"""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.axes, self.width = len(shape), math.prod(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Side by side, as float32."""
        if self.axes != 1:
            x = x.unsqueeze(-1) if self.axes == 0 else x.flatten(-self.axes)
        return x.float()


class OneHot(nn.Module):
    """A 1 at each choice, among zeros; no order is read into numbers that have none.   [..., *shape] -> [..., Σ n]"""

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
        """float32."""
        x = x.unsqueeze(-1) if self.axes == 0 else x.flatten(-self.axes)
        return (x[..., self.part] == self.values).float()


class NatureCNN(nn.Module):
    """The convolutions of Mnih et al. 2015 ("Human-level control", Nature 518) on bytes.   [..., *shape] -> [..., 512]"""

    def __init__(self, shape: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.axes, self.last = len(shape), channels_last(shape)
        channels, height, width = image_shape(shape)
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
        """Bytes become numbers from 0 to 1 here, so that a rollout keeps bytes."""
        lead = x.shape[: x.dim() - self.axes]
        x = x.movedim(-1, -3) if self.last else x
        x = x.reshape(-1, math.prod(x.shape[len(lead) : -2]), *x.shape[-2:])
        pieces = [x] if torch.is_grad_enabled() else torch.split(x, PASS_AT_ONCE)
        features = [self.layer(self.convolutions(piece.float() / 255).flatten(1)).relu() for piece in pieces]
        return (features[0] if len(features) == 1 else torch.cat(features)).reshape(*lead, self.width)


def linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """A layer with orthogonal weights from the generator, and no bias yet."""
    with torch.random.fork_rng(devices=[]):  # its own initial weights, which are not kept, are drawn from the global stream
        layer = nn.Linear(inputs, outputs)
    _initialise(layer, gain, generator)
    return layer


def _convolution(inputs: int, outputs: int, size: int, stride: int, generator: torch.Generator) -> nn.Conv2d:
    with torch.random.fork_rng(devices=[]):
        layer = nn.Conv2d(inputs, outputs, size, stride)
    _initialise(layer, math.sqrt(2), generator)
    return layer


def _initialise(layer: Any, gain: float, generator: torch.Generator) -> None:
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)


class CustomTrunk(nn.Module):
    """A network of the user's own: ``factory(observation_space)`` makes a module from leaf tensors [N, ...] to features [N, k].

    The module gets the dict of leaf tensors, or the tensor itself where the space is one leaf: Boxes as float32 and
    normalised where the recipe says so, images as bytes, whole numbers as the environment gives them (int64; MultiBinary
    int8). What the factory draws comes from the run's own stream, and the global generator is left as it was.

    Raises SurefootError, one line, when it can't be import_object, makes no module, or gives features of another shape or type.
    """

    def __init__(self, path: str, observation_space: gymnasium.Space[Any], generator: torch.Generator) -> None:
        super().__init__()
        self.path = path
        parts = leaves(observation_space)
        self.axes = {name: len(leaf.shape) for name, leaf in parts.items()}
        self.bare = not next(iter(parts.values())).keys
        factory = import_object("network.custom", path)
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.module = self._made(factory, observation_space)
            self.width = self._probe({name: _made_up(leaf) for name, leaf in parts.items()})

    def _made(self, factory: Any, observation_space: gymnasium.Space[Any]) -> nn.Module:
        try:
            module = factory(observation_space)
        except Exception as error:
            raise self._refusal(f"called with the observation space, it raised {_told(error)}") from None
        if not isinstance(module, nn.Module):
            raise self._refusal(f"made a {type(module).__name__}; it must make a torch.nn.Module")
        return module

    def _probe(self, inputs: dict[str, Tensor]) -> int:
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()  # the running statistics of a batch norm are not for made-up observations
        with torch.no_grad():
            both = self._features(inputs, 2)
            self.width = both.shape[1]  # known from here on, so that another one is refused
            # One alone is what it acts on later, and what a squeeze gives away.
            alone = torch.cat([self._features({name: x[row : row + 1] for name, x in inputs.items()}, 1) for row in (0, 1)])
        rounding = 1e-4 * max(1.0, float(both.abs().max()))
        if both.isfinite().all() and not torch.allclose(both, alone, rtol=1e-3, atol=rounding):
            raise self._refusal("gave an observation other features beside another one than alone; rows must be independent")
        for module, training in modes.items():  # each its own: a frozen part may stand in eval mode in one that trains
            module.training = training
        odd = {str(p.dtype) for p in self.module.parameters() if p.dtype != torch.float32}
        if odd:
            raise self._refusal(f"has parameters of {', '.join(sorted(odd))}; they must be float32")
        return self.width

    def _features(self, inputs: dict[str, Tensor], count: int) -> Tensor:
        try:
            features = self.module(next(iter(inputs.values())) if self.bare else inputs)
        except Exception as error:
            shapes = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in inputs.items())
            raise self._refusal(f"forward raised {_told(error)} (for {shapes})") from error
        if not isinstance(features, Tensor):
            raise self._refusal(f"forward gave a {type(features).__name__}; it must give a tensor of features [N, k]")
        known = getattr(self, "width", None)
        wanted = "k" if known is None else str(known)
        # Not len(features): that makes a constant of what may be any number in an exported program.
        right = features.dim() == 2 and features.shape[0] == count and features.shape[1] > 0
        if not right or (known is not None and features.shape[1] != known):
            raise self._refusal(
                f"gave features of shape {list(features.shape)} for {count} observations, not [{count}, {wanted}]"
            )
        if features.dtype != torch.float32:
            raise self._refusal(f"gave features of {features.dtype}; they must be float32")
        return features

    def _refusal(self, what: str) -> SurefootError:
        return SurefootError(f"network.custom={self.path!r}: {what}")

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Features of normalised observations.   [..., *leaf] each -> [..., k]"""
        name, axes = next(iter(self.axes.items()))
        lead = inputs[name].shape[: inputs[name].dim() - axes]
        parts = {path: inputs[path].reshape(-1, *inputs[path].shape[len(lead) :]) for path in self.axes}
        return self._features(parts, math.prod(lead)).reshape(*lead, self.width)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _made_up(leaf: Leaf) -> Tensor:
    """Two made-up observations of a leaf, with entries or choices at random; always the same."""
    rng, shape = np.random.default_rng(0), (2, *leaf.shape)
    if leaf.vector:
        return torch.from_numpy(rng.random(shape, np.float32))
    low, high = (0, 255) if leaf.bounds is None else leaf.bounds
    return torch.from_numpy(rng.integers(low, high, shape, endpoint=True).astype(leaf.dtype))
