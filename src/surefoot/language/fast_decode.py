"""Decoding with packed weights: what a step of a small model costs is starting its operations, so a layer has about fifteen.

Keys are kept transposed, [rows · heads, width, length], so that attention is two batched matrix products over the cache where
it lies. The prompt is still read by the model's own forward pass, and before a packed model is used it is compared with that
pass on two of the prompts, two tokens further: a family that changed, an adapter, a hook makes the sampler take the model's own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from surefoot.language.kv_cache import Prompts, forward, positions_of
from surefoot.language.packed_model import PackedModel, packed

TOLERANCE = 5e-5
"""largest difference of a log-probability on the probe with which the packed model is taken for the model"""


class FastDecoder:
    """A packed model that stands after its prompts."""

    def __init__(self, packed: PackedModel, prompts: Prompts, past: Any, samples: int, more: int) -> None:
        self.packed, self.length = packed, prompts.ids.shape[1]
        rows, capacity = samples * len(prompts.ids), self.length + more
        like = past.layers[0].keys
        shape = (len(packed.layers), rows, packed.kv_heads, packed.width)
        self.keys = like.new_empty(*shape, capacity)
        self.values = like.new_empty(*shape[:3], capacity, packed.width)
        for index, layer in enumerate(past.layers):
            keys = layer.keys if packed.pairs is None else layer.keys[..., packed.pairs]
            self.keys[index, ..., : self.length].unflatten(0, (-1, samples)).copy_(keys.transpose(-1, -2).unsqueeze(1))
            self.values[index, :, :, : self.length].unflatten(0, (-1, samples)).copy_(layer.values.unsqueeze(1))
        self.positions = prompts.lengths.repeat_interleave(samples)
        self.turns = None if packed.rotary is None else packed.rotary(capacity)
        self.hidden = None
        """[rows, 1, capacity] −∞ at padding, 0 elsewhere"""
        if prompts.padded:
            self.hidden = like.new_zeros(rows, packed.kv_heads, 1, capacity)
            self.hidden[..., : self.length].masked_fill_(~prompts.mask.repeat_interleave(samples, 0)[:, None, None], -torch.inf)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token.   [n] -> [n, vocabulary]"""
        model, n, now = self.packed, len(tokens), self.length
        heads, kv_heads, width = model.heads, model.kv_heads, model.width
        self.length += 1
        positions = self.positions[:n]
        x = model.embedding(tokens)
        if model.places is not None:
            x = x + model.places[positions]
        turn = None if self.turns is None else self.turns[positions].unsqueeze(1)
        new_keys, new_values = self.keys[:, :n, :, :, now].unbind(), self.values[:, :n, :, now].unbind()
        keys = self.keys[:, :n, :, :, : self.length].flatten(1, 2).unbind()
        values = self.values[:, :n, :, : self.length].flatten(1, 2).unbind()
        hidden = None if self.hidden is None else self.hidden[:n, ..., : self.length].flatten(0, 1)
        for i, layer in enumerate(model.layers):
            qkv = product(model.normalised(x), layer.qkv, layer.qkv_bias).view(n, heads + 2 * kv_heads, width)
            if turn is not None:
                torch.view_as_complex(qkv[:, : heads + kv_heads].unflatten(-1, (-1, 2))).mul_(turn)
            query, key, value = qkv.split((heads, kv_heads, kv_heads), 1)
            new_keys[i].copy_(key)
            new_values[i].copy_(value)
            query = query.reshape(n * kv_heads, heads // kv_heads, width)
            scores = torch.bmm(query, keys[i]) if hidden is None else torch.baddbmm(hidden, query, keys[i])
            mixed = torch.bmm(scores.softmax(-1), values[i]).view(n, heads * width)
            x = torch.addmm(x if layer.out_bias is None else x + layer.out_bias, mixed, layer.out)
            wide = product(model.normalised(x), layer.up, layer.up_bias)
            if model.gated:
                gate, up = wide.chunk(2, -1)
                wide = model.activation(gate).mul_(up)
            else:
                wide = model.activation(wide)
            x = torch.addmm(x if layer.down_bias is None else x + layer.down_bias, wide, layer.down)
        positions.add_(1)
        logits: Tensor = model.head(model.norm(x))
        return logits

    def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
        """Drop the finished slots: copies the rows that move, as far as they are filled."""
        if len(holes):
            self.keys[:, holes, :, :, : self.length] = self.keys[:, movers, :, :, : self.length]
            self.values[:, holes, :, : self.length] = self.values[:, movers, :, : self.length]
            for buffer in (self.positions, self.hidden):
                if buffer is not None:
                    buffer[holes] = buffer[movers]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weight + bias.   [n, in], [in, out], [out] -> [n, out]"""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def fast_decoder(model: nn.Module, prompts: Prompts, past: Any, samples: int, more: int) -> FastDecoder | None:
    """The packed model after its prompts, or None where the family is not known or the probe tells it from the model."""
    from transformers.cache_utils import DynamicLayer

    if past is None or not all(type(layer) is DynamicLayer for layer in past.layers):
        return None
    found = packed(model)
    return FastDecoder(found, prompts, past, samples, more) if found and faithful(model, found, prompts, past) else None


def faithful(model: nn.Module, found: PackedModel, prompts: Prompts, past: Any) -> bool:
    """Whether two packed steps after the shortest and the longest prompt say what the model says about the whole sequence."""
    from transformers.cache_utils import DynamicCache

    rows = torch.stack([prompts.lengths.argmin(), prompts.lengths.argmax()])
    few = Prompts(prompts.ids[rows], prompts.mask[rows])
    # any two tokens do: the prompts' last ones
    tokens = few.ids[:, [-1, max(-2, -few.ids.shape[1])]]
    mask = torch.cat([few.mask, few.mask.new_ones(2, 2)], -1)
    output = forward(model, torch.cat([few.ids, tokens], -1), mask, positions_of(mask), keep=2, past=False)
    wanted = output.logits[:, -2:].log_softmax(-1)
    cache = DynamicCache([(layer.keys[rows], layer.values[rows]) for layer in past.layers])
    decoder = FastDecoder(found, few, cache, samples=1, more=2)
    got = torch.stack([decoder.step(token) for token in tokens.T], 1).log_softmax(-1)
    return bool((got - wanted).abs().max() <= TOLERANCE)
