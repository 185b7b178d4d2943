"""Decoding any causal language model of ``transformers``: the prompt once, then one token a step, rows leaving as they finish.

A decoder holds a batch of *slots*. ``step`` appends one token to each and returns what comes next; ``shrink`` drops the slots
that are done by letting the last ones take their places, which copies one row per finished response and nothing else.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from surefoot.language.data.tokens import positions

CACHE_TOLERANCE = 1e-2
"""largest difference of a log-probability that can be rounding, in float32, when the cache is used rather than not"""


class Decoder(Protocol):
    """What the sampler needs of a model that stands after its prompts."""

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token in each of the n slots.   [n] -> [n, vocabulary]"""
        ...

    def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
        """Keep ``count`` slots: slot ``movers[i]`` (>= count) takes the place of ``holes[i]`` (< count)."""
        ...


@dataclass(frozen=True)
class Prompts:
    """Prompts of different lengths in one tensor, padded on the left."""

    ids: Tensor
    """[G, P]"""
    mask: Tensor
    """[G, P] True at real tokens"""

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each.   [G]"""
        return self.mask.sum(-1)

    def few(self) -> Tensor:
        """The shortest and the longest of them, by index.   [2]"""
        return torch.stack([self.lengths.argmin(), self.lengths.argmax()])

    def at(self, rows: Tensor) -> "Prompts":
        """Some of the prompts, padded as they are."""
        return Prompts(self.ids[rows], self.mask[rows])

    @property
    def padded(self) -> bool:
        """Whether any of them is shorter than the longest."""
        return not bool(self.mask[:, 0].all())


def forward(
    model: nn.Module, ids: Tensor, mask: Tensor | None, positions: Tensor, *, keep: int, past: Any = None, caching: bool = True
) -> Any:
    """One forward pass of a model of ``transformers``, told only what its family understands.

    ids [n, t]; mask [n, everything so far] or None where nothing is padding; positions [n, t]; logits of the last ``keep``.
    """
    options = {"position_ids": positions, "logits_to_keep": keep, "use_cache": caching, cache_name(model): past}
    known = parameters_of(type(model).forward)
    options = {name: value for name, value in options.items() if name in known and value is not None}
    return model(input_ids=ids, attention_mask=None if mask is None else mask.long(), **options)


@cache
def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """What a model's ``forward`` takes, by name."""
    return frozenset(inspect.signature(function).parameters)


def cache_name(model: nn.Module) -> str:
    """State-space models call their cache differently."""
    return "cache_params" if "cache_params" in parameters_of(type(model).forward) else "past_key_values"


def read_prompts(model: nn.Module, prompts: Prompts) -> tuple[Tensor, Any]:
    """The model's logits after each prompt [G, vocabulary] and its cache, None for a model that keeps none."""
    mask = prompts.mask if prompts.padded else None
    output = forward(model, prompts.ids, mask, positions(prompts.mask), keep=1)
    found = getattr(output, cache_name(model), None)
    usable = all(hasattr(layer, "reorder_cache") for layer in getattr(found, "layers", [None]))
    return output.logits[:, -1], found if usable else None


@cache
def preallocated_layer_class() -> Any:
    """The class of a cache layer whose room is taken once: ``transformers``' own grows by copying all of it at every token."""
    from transformers.cache_utils import DynamicLayer

    class PreallocatedLayer(DynamicLayer):
        """Keys and values are views of the first ``rows`` rows and the first positions of two buffers."""

        def __init__(self, source: Any, samples: int, more: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.dtype, self.device, self.is_initialized = source.keys.dtype, source.keys.device, True
            self.length, self.rows = source.keys.shape[-2], samples * len(source.keys)
            self.buffers = [self.room_for(states, samples, more) for states in (source.keys, source.values)]
            self.look()

        def room_for(self, states: Tensor, samples: int, more: int) -> Tensor:
            groups, heads, length, width = states.shape
            buffer = states.new_empty(groups * samples, heads, length + more, width)
            buffer.view(groups, samples, heads, length + more, width)[:, :, :, :length] = states.unsqueeze(1)
            return buffer

        def look(self) -> tuple[Tensor, Tensor]:
            keys, values = (buffer[: self.rows, :, : self.length] for buffer in self.buffers)
            self.keys, self.values = keys, values
            return keys, values

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            """Write the new positions where the old ones end."""
            new = slice(self.length, self.length + key_states.shape[-2])
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer[: self.rows, :, new] = states
            self.length = new.stop
            return self.look()

        def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
            for buffer in self.buffers:
                buffer[holes, :, : self.length] = buffer[movers, :, : self.length]
            self.rows = count
            self.look()

    return PreallocatedLayer


class CachedDecoder:
    """Any model that keeps a cache of ``transformers``, stepped by its own forward pass."""

    def __init__(self, model: nn.Module, prompts: Prompts, past: Any, samples: int, more: int) -> None:
        from transformers.cache_utils import DynamicLayer

        self.model, self.past = model, past
        self.positions = prompts.lengths.repeat_interleave(samples).unsqueeze(-1)
        self.length = prompts.ids.shape[1]
        self.mask = prompts.mask.new_ones(samples * len(prompts.ids), self.length + more) if prompts.padded else None
        if self.mask is not None:
            self.mask[:, : self.length] = prompts.mask.repeat_interleave(samples, 0)
        repeated = torch.arange(len(prompts.ids), device=prompts.ids.device).repeat_interleave(samples)
        for index, layer in enumerate(past.layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                past.layers[index] = preallocated_layer_class()(layer, samples, more)
            else:  # a sliding window or a recurrent state: small, and its class knows how to repeat it
                layer.reorder_cache(repeated)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token.   [n] -> [n, vocabulary]"""
        self.length += 1
        # a recurrent state has forgotten its padding, and such a model would take the mask for the new token's
        state_space = cache_name(self.model) == "cache_params"
        mask = None if self.mask is None or state_space else self.mask[: len(tokens), : self.length]
        output = forward(self.model, tokens.unsqueeze(-1), mask, self.positions, keep=1, past=self.past)
        self.positions = self.positions + 1
        logits: Tensor = output.logits[:, -1]
        return logits

    def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
        """Drop the finished slots from the cache, the mask and the positions."""
        kept = torch.arange(count, device=holes.device)
        kept[holes] = movers
        for layer in self.past.layers:
            if isinstance(layer, preallocated_layer_class()):
                layer.shrink(count, holes, movers)
            else:
                layer.reorder_cache(kept)
        self.positions = self.positions[kept]
        if self.mask is not None:
            self.mask = self.mask[kept]


def log_prob_difference(model: nn.Module, decoder: Decoder, prompts: Prompts, steps: int) -> float:
    """The largest difference of a log-probability between a decoder's steps and the model's pass over the whole sequence."""
    tokens = prompts.ids[:, -1:].expand(-1, steps)  # any would do
    mask = torch.cat([prompts.mask, prompts.mask.new_ones(len(tokens), steps)], -1)
    output = forward(model, torch.cat([prompts.ids, tokens], -1), mask, positions(mask), keep=steps, caching=False)
    got = torch.stack([decoder.step(token) for token in tokens.T], 1)
    return float((got.log_softmax(-1) - output.logits[:, -steps:].log_softmax(-1)).abs().max())


_KEEPS: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()


def cache_is_exact(model: nn.Module, prompts: Prompts, more: int) -> bool:
    """Whether decoding with the model's cache says what the model says without; asked once per model, with and without padding.

    Some families misread a mask or a position when they have a cache.
    """
    known = _KEEPS.setdefault(model, {})
    if more and prompts.padded not in known:
        few, steps = prompts.at(prompts.few()), min(2, more)
        logits, past = read_prompts(model, few)
        rough = logits.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(logits.device.type)
        known[prompts.padded] = (
            rough or log_prob_difference(model, CachedDecoder(model, few, past, 1, steps), few, steps) <= CACHE_TOLERANCE
        )
    return known.get(prompts.padded, True)


class RecomputingDecoder:
    """A model without a cache: the whole sequence at every step. Slow, and right for every family."""

    def __init__(self, model: nn.Module, prompts: Prompts, samples: int, more: int) -> None:
        self.model, self.length = model, prompts.ids.shape[1]
        room = (0, more)
        self.ids = nn.functional.pad(prompts.ids, room).repeat_interleave(samples, 0)
        self.mask = nn.functional.pad(prompts.mask, room, value=True).repeat_interleave(samples, 0)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token.   [n] -> [n, vocabulary]"""
        self.ids[:, self.length] = tokens
        self.length += 1
        ids, mask = self.ids[:, : self.length], self.mask[:, : self.length]
        logits: Tensor = forward(self.model, ids, mask, positions(mask), keep=1, caching=False).logits[:, -1]
        return logits

    def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
        """Drop the finished slots."""
        for buffer in (self.ids, self.mask):
            buffer[holes] = buffer[movers]
        self.ids, self.mask = self.ids[:count], self.mask[:count]
