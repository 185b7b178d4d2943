"""Decode any causal language model of ``transformers`` token by token; finished responses leave the batch.

A decoder holds a batch of *slots*. ``step`` appends one token to each slot and returns the next logits. ``shrink`` drops
finished slots by moving the last ones into their places, which copies one row per finished response.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from surefoot.language.data.batches import positions
from surefoot.language.models.policy.lengths import by_length

CACHE_TOLERANCE = 1e-2
"""largest difference of a log-probability, in float32, between a cached row and a single one that counts as rounding"""
ROUGH_TOLERANCE = 0.02
"""largest KL between their distributions, in nats, that counts as rounding in bfloat16"""


class Decoder(Protocol):
    """A model that has read its prompts, as the sampler steps it."""

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token in each of the n slots.   [n] -> [n, vocabulary]"""

    def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
        """Keep ``count`` slots: slot ``movers[i]`` (>= count) takes the place of ``holes[i]`` (< count)."""


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
    model: nn.Module,
    ids: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    *,
    keep: int,
    past: Any = None,
    caching: bool = True,
) -> Any:
    """One forward pass of a ``transformers`` model, with only the arguments that its class accepts.

    ids [n, t]; mask [n, tokens so far] or None without padding; positions [n, t], None for the model's own. Returns logits of
    the last ``keep`` tokens.
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
    try:
        output = forward(model, prompts.ids, mask, positions(prompts.mask), keep=1)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        output = forward(model, prompts.ids, prompts.mask, positions(prompts.mask), keep=1, caching=False)
    past = getattr(output, cache_name(model), None)
    return output.logits[:, -1], past if can_be_reordered(past) else None


def can_be_reordered(past: Any) -> bool:
    """Whether a cache keeps all of its state in layers that can reorder it; MiniMax has some in a list beside them."""
    state = dict(getattr(past, "__dict__", {}))  # there may be no cache, or a tuple
    layers = state.pop("layers", [])
    beside = [each for value in state.values() for each in (value if isinstance(value, (list, tuple)) else [value])]
    reordered = bool(layers) and all(hasattr(layer, "reorder_cache") for layer in layers)
    return reordered and not any(isinstance(each, Tensor) for each in beside)


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
        self.length += 1
        # a recurrent state contains no padding; such a model would apply the mask to the new token
        state_space = cache_name(self.model) == "cache_params"
        mask = None if self.mask is None or state_space else self.mask[: len(tokens), : self.length]
        output = forward(self.model, tokens.unsqueeze(-1), mask, self.positions, keep=1, past=self.past)
        self.positions = self.positions + 1
        logits: Tensor = output.logits[:, -1]
        return logits

    def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
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


def logits_alone(model: nn.Module, ids: Tensor, columns: Tensor, switch: int | None) -> Tensor:
    """Logits after some tokens of one row that a model reads by itself, each with the frequencies of the text up to there.

    switch   of ``switch_of``

    ids [L], columns [k] ascending -> [k, vocabulary]
    """
    near = columns < (len(ids) if switch is None else switch)
    logits = []
    for part, end in ((near, switch), (~near, None)):
        if bool(part.any()):
            text, places = ids[:end], columns[part]
            after = forward(model, text[None], None, None, keep=len(text) - int(places[0]), caching=False).logits[0]
            logits.append(after[places - len(text)])
    return torch.cat(logits)


def difference_from_single_rows(
    model: nn.Module, logits: Tensor, decoder: Decoder, prompts: Prompts, steps: int
) -> tuple[float, float]:
    """Compare a decoder with the model reading each row by itself, without padding, mask, positions or cache.

    logits   of the decoder after each prompt, those of its first token   [G, vocabulary]

    Returns the largest difference of a log-probability, and the largest KL between the distributions of a token.
    """
    tokens = prompts.ids[:, -1:].expand(-1, steps)  # any tokens serve
    decoded = torch.stack([logits, *(decoder.step(token) for token in tokens.T)], 1).float().log_softmax(-1)
    alone = [
        forward(model, torch.cat([ids[real], more]).unsqueeze(0), None, None, keep=steps + 1, caching=False).logits[
            0, -steps - 1 :
        ]
        for ids, real, more in zip(prompts.ids, prompts.mask, tokens, strict=True)
    ]
    single = torch.stack(alone).float().log_softmax(-1)
    gap = single - decoded
    return float(gap.abs().max()), float((single.exp() * gap).sum(-1).max())


_EXACT: WeakKeyDictionary[nn.Module, dict[tuple[bool, ...], bool]] = WeakKeyDictionary()


def cache_is_exact(model: nn.Module, prompts: Prompts, more: int, long: bool = False) -> bool:
    """Whether decoding with the cache gives the log-probabilities of rows that the model reads by themselves. Tested once per
    model, with and without padding, because some families ignore masks or positions, and others misread them with a cache.

    long   whether prompts are past the model's switch of frequencies, for which the test is another
    """
    results, case = _EXACT.setdefault(model, {}), (prompts.padded, long, more > 0)
    if case not in results and (more or prompts.padded):
        few, steps = prompts.at(prompts.shortest_and_longest()), min(2, more)
        logits, past = read_prompts(model, few)
        rough = logits.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(logits.device.type)
        largest, kl = difference_from_single_rows(model, logits, CachedDecoder(model, few, past, 1, steps), few, steps)
        results[case] = kl <= ROUGH_TOLERANCE if rough else largest <= CACHE_TOLERANCE
    return results.get(case, True)


class RecomputingDecoder:
    """A model read without a cache: every step reads the whole sequence, as training does. Slow, but exact for every family.

    spread   by how many tokens the longest prompt is longer than the shortest
    switch   rows of more tokens are read by themselves: their frequencies are others (see ``switch_of``)
    """

    def __init__(
        self, model: nn.Module, prompts: Prompts, samples: int, more: int, spread: int, switch: int | None = None
    ) -> None:
        self.model, self.spread, self.switch, self.length = model, spread, switch, prompts.ids.shape[1]
        self.lengths = prompts.lengths.repeat_interleave(samples)
        order = prompts.mask.int().argsort(dim=-1, descending=True, stable=True)  # padding follows the real tokens
        self.ids = nn.functional.pad(prompts.ids.gather(-1, order), (0, more)).repeat_interleave(samples, 0)

    def step(self, tokens: Tensor) -> Tensor:
        self.ids[torch.arange(len(tokens), device=tokens.device), self.lengths] = tokens
        self.lengths, self.length = self.lengths + 1, self.length + 1
        return self.logits()

    def logits(self) -> Tensor:
        """Logits after all tokens so far.   -> [n, vocabulary]"""
        if self.switch is None:
            return self._after(self.ids[:, : self.length], self.lengths, self.spread)
        parts = by_length(torch.arange(self.length, device=self.ids.device) < self.lengths.unsqueeze(-1), self.switch)
        read = []
        for part in parts:
            lengths = self.lengths[part]
            width = int(lengths.max())
            read.append(self._after(self.ids[part, :width], lengths, width - int(lengths.min())))
        return torch.cat(read)[torch.cat(parts).argsort()]

    def _after(self, ids: Tensor, lengths: Tensor, spread: int) -> Tensor:
        """Logits after the last real token of each row.   [n, t], [n] -> [n, vocabulary]"""
        logits: Tensor = forward(self.model, ids, None, None, keep=spread + 1, caching=False).logits
        return logits[torch.arange(len(ids), device=ids.device), lengths - ids.shape[1] + logits.shape[1] - 1]

    def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
        for buffer in (self.ids, self.lengths):
            buffer[holes] = buffer[movers]
        self.ids, self.lengths = self.ids[:count], self.lengths[:count]
