"""Decode any causal language model of ``transformers`` token by token; finished responses leave the batch.

A decoder holds a batch of *slots*. ``step`` appends one token to each slot and returns the next logits. ``shrink`` drops
finished slots by moving the last ones into their places, which copies one row per finished response.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from surefoot.language.data.tokens import positions

T = TypeVar("T")
CACHE_TOLERANCE = 1e-2
"""largest difference of a log-probability, in float32, between decoding with and without the cache that counts as rounding"""


class Decoder(Protocol):
    """A model that has read its prompts, as the sampler steps it."""

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

    def shortest_and_longest(self) -> Tensor:
        """Indices of the shortest and the longest prompt.   [2]"""
        return torch.stack([self.lengths.argmin(), self.lengths.argmax()])

    def at(self, rows: Tensor) -> "Prompts":
        """The prompts in these rows, with the same padding."""
        return Prompts(self.ids[rows], self.mask[rows])

    @property
    def padded(self) -> bool:
        """Whether any prompt is shorter than the longest."""
        return not bool(self.mask[:, 0].all())


def forward(
    model: nn.Module, ids: Tensor, mask: Tensor | None, positions: Tensor, *, keep: int, past: Any = None, caching: bool = True
) -> Any:
    """One forward pass of a ``transformers`` model, with only the arguments that its class accepts.

    ids [n, t]; mask [n, tokens so far] or None without padding; positions [n, t]. Returns logits of the last ``keep`` tokens.
    """
    options = {"position_ids": positions, "logits_to_keep": keep, "use_cache": caching, cache_name(model): past}
    accepted = parameters_of(type(model).forward)
    options = {name: value for name, value in options.items() if name in accepted and value is not None}
    return model(input_ids=ids, attention_mask=None if mask is None else mask.long(), **options)


@cache
def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """The parameter names of a function."""
    return frozenset(inspect.signature(function).parameters)


def cache_name(model: nn.Module) -> str:
    """The argument that takes the cache; state-space models use another name."""
    return "cache_params" if "cache_params" in parameters_of(type(model).forward) else "past_key_values"


def read_prompts(model: nn.Module, prompts: Prompts) -> tuple[Tensor, Any]:
    """The model's logits after each prompt [G, vocabulary] and its cache; None if there is none, or if it fails."""
    mask = prompts.mask if prompts.padded else None
    output = _attempt(lambda: forward(model, prompts.ids, mask, positions(prompts.mask), keep=1))
    if output is None:
        output = forward(model, prompts.ids, prompts.mask, positions(prompts.mask), keep=1, caching=False)
    past = getattr(output, cache_name(model), None)
    usable = all(hasattr(layer, "reorder_cache") for layer in getattr(past, "layers", [None]))
    return output.logits[:, -1], past if usable else None


def _attempt(call: Callable[[], T]) -> T | None:
    """What a call returns; None if it raises, except for lack of memory."""
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None


@cache
def preallocated_layer_class() -> Any:
    """The class of a cache layer that is allocated once; the one of ``transformers`` copies its contents at every token."""
    from transformers.cache_utils import DynamicLayer

    class PreallocatedLayer(DynamicLayer):
        """Keys and values are views of the first ``rows`` rows and the first positions of two buffers."""

        def __init__(self, source: Any, samples: int, more: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.dtype, self.device, self.is_initialized = source.keys.dtype, source.keys.device, True
            self.length, self.rows = source.keys.shape[-2], samples * len(source.keys)
            self.buffers = [self._buffer(states, samples, more) for states in (source.keys, source.values)]
            self.update_views()

        def _buffer(self, states: Tensor, samples: int, more: int) -> Tensor:
            groups, heads, length, width = states.shape
            buffer = states.new_empty(groups * samples, heads, length + more, width)
            buffer.view(groups, samples, heads, length + more, width)[:, :, :, :length] = states.unsqueeze(1)
            return buffer

        def update_views(self) -> tuple[Tensor, Tensor]:
            keys, values = (buffer[: self.rows, :, : self.length] for buffer in self.buffers)
            self.keys, self.values = keys, values
            return keys, values

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            """Write the new positions after the old ones."""
            new = slice(self.length, self.length + key_states.shape[-2])
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer[: self.rows, :, new] = states
            self.length = new.stop
            return self.update_views()

        def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
            for buffer in self.buffers:
                buffer[holes, :, : self.length] = buffer[movers, :, : self.length]
            self.rows = count
            self.update_views()

    return PreallocatedLayer


class CachedDecoder:
    """A model with a ``transformers`` cache, stepped by its own forward pass."""

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
            else:  # a sliding window or a recurrent state is small; its class can repeat it
                layer.reorder_cache(repeated)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token.   [n] -> [n, vocabulary]"""
        self.length += 1
        # a recurrent state contains no padding; such a model would apply the mask to the new token
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
    """The largest difference of a log-probability between a decoder's steps and one forward pass over the whole sequence."""
    tokens = prompts.ids[:, -1:].expand(-1, steps)  # any tokens serve
    mask = torch.cat([prompts.mask, prompts.mask.new_ones(len(tokens), steps)], -1)
    output = forward(model, torch.cat([prompts.ids, tokens], -1), mask, positions(mask), keep=steps, caching=False)
    stepped = torch.stack([decoder.step(token) for token in tokens.T], 1)
    return float((stepped.log_softmax(-1) - output.logits[:, -steps:].log_softmax(-1)).abs().max())


_EXACT: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()


def cache_is_exact(model: nn.Module, prompts: Prompts, more: int) -> bool:
    """Whether decoding with the cache gives the model's own log-probabilities. Tested once per model, with and without padding,
    because some families misread masks or positions with a cache, and some caches can't be repeated or reordered.
    """
    results = _EXACT.setdefault(model, {})
    if more and prompts.padded not in results:
        few = prompts.at(prompts.shortest_and_longest())
        difference = _attempt(lambda: _cache_difference(model, few, min(2, more)))
        results[prompts.padded] = difference is not None and difference <= CACHE_TOLERANCE
    return results.get(prompts.padded, True)


def _cache_difference(model: nn.Module, prompts: Prompts, steps: int) -> float:
    """The largest difference of a log-probability with the cache: of two samples of each prompt, then without the first slot.

    0 in bfloat16, where rounding is larger than some faults. Raises what the model or its cache raises.
    """
    logits, past = read_prompts(model, prompts)
    if past is None:
        raise NotImplementedError
    decoder, last = CachedDecoder(model, prompts, past, 2, steps + 1), 2 * len(prompts.ids) - 1
    slots = torch.arange(len(prompts.ids), device=prompts.ids.device).repeat_interleave(2)
    differences = [log_prob_difference(model, decoder, prompts.at(slots), steps)]
    decoder.shrink(last, slots.new_tensor([0]), slots.new_tensor([last]))
    slots = torch.cat([slots[last:], slots[1:last]])
    read = prompts.at(slots)
    read = Prompts(*(torch.cat([x, x[:, -1:].expand(-1, steps)], -1) for x in (read.ids, read.mask)))
    differences.append(log_prob_difference(model, decoder, read, 1))
    rough = logits.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(logits.device.type)
    return 0.0 if rough else max(differences)


class RecomputingDecoder:
    """A model read without a cache: every step reads the whole sequence. Slow, but exact for every family."""

    def __init__(self, model: nn.Module, prompts: Prompts, samples: int, more: int) -> None:
        self.model, self.length = model, prompts.ids.shape[1]
        width = (0, more)
        self.ids = nn.functional.pad(prompts.ids, width).repeat_interleave(samples, 0)
        self.mask = nn.functional.pad(prompts.mask, width, value=True).repeat_interleave(samples, 0)

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
