"""Decoding with packed weights: what a step of a small model costs is starting its operations, so a layer has about fifteen.

Attention of one token is two batched matrix products over the cache where it lies; the fused kernel, made for long queries,
takes three times as long on a CPU. The prompt is still read by the model's own forward pass, and before packed weights are used
they are compared with that pass: two of the prompts, two tokens further. Adapters are merged into the packed weights; a family
that changed or a hook makes the sampler use the model's own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from surefoot.language.sampling.kv_cache import Prompts, difference
from surefoot.language.sampling.packed_model import PackedModel, packed

States = list[tuple[Tensor, Tensor]]
"""keys and values of every layer, [rows, heads, length, width] each"""

TOLERANCE = 5e-5
"""largest difference of a log-probability on the probe with which the packed model is taken for the model"""


class FastDecoder:
    """A packed model that stands after its prompts."""

    def __init__(self, packed: PackedModel, prompts: Prompts, states: States, samples: int, more: int) -> None:
        self.packed, self.length = packed, prompts.ids.shape[1]
        rows, capacity = samples * len(prompts.ids), self.length + more
        like = states[0][0]
        self.cache = like.new_empty(len(packed.layers), 2, rows, packed.kv_heads, capacity, packed.width)
        for new, (keys, values) in zip(self.cache, states, strict=True):
            keys = keys if packed.pairs is None else keys[..., packed.pairs]
            for buffer, read in zip(new, (keys, values), strict=True):
                buffer.view(-1, samples, *buffer.shape[1:])[:, :, :, : self.length] = read.unsqueeze(1)
        self.positions = prompts.lengths.repeat_interleave(samples)
        self.turns = None if packed.rotary is None else packed.rotary(capacity)
        self.hidden = None
        """[rows, heads, 1, capacity] −∞ at padding, 0 elsewhere"""
        if prompts.padded:
            self.hidden = like.new_zeros(rows, packed.kv_heads, 1, capacity)
            self.hidden[..., : self.length].masked_fill_(~prompts.mask.repeat_interleave(samples, 0)[:, None, None], -torch.inf)

    @torch.inference_mode()  # makes views cheaper than no_grad does, and there are many
    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token.   [n] -> [n, vocabulary]"""
        model, n, now = self.packed, len(tokens), self.length
        heads, kv_heads, width = model.heads, model.kv_heads, model.width
        self.length += 1
        places = self.positions[:n]
        x = model.embedding(tokens)
        if model.places is not None:
            x = x + model.places[places]
        turn = None if self.turns is None else self.turns[places].unsqueeze(1)
        fresh = self.cache[:, :, :n, :, now].transpose(1, 2).unbind()
        seen = self.cache[:, :, :n, :, : self.length].flatten(2, 3)
        keys, values = seen[:, 0].transpose(-1, -2).unbind(), seen[:, 1].unbind()
        hidden = None if self.hidden is None else self.hidden[:n, ..., : self.length].flatten(0, 1)
        for i, layer in enumerate(model.layers):
            qkv = product(model.normalised(x), layer.qkv, layer.qkv_bias).view(n, heads + 2 * kv_heads, width)
            if turn is not None:
                torch.view_as_complex(qkv[:, : heads + kv_heads].view(n, -1, width // 2, 2)).mul_(turn)
            fresh[i].copy_(qkv[:, heads:].view(n, 2, kv_heads, width))
            query = qkv[:, :heads].reshape(n * kv_heads, heads // kv_heads, width)
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
        places.add_(1)
        logits: Tensor = model.head(model.norm(x))
        return logits

    def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
        """Drop the finished slots: copies the rows that move, as far as they are filled."""
        if len(holes):
            self.cache[:, :, holes, :, : self.length] = self.cache[:, :, movers, :, : self.length]
            for buffer in (self.positions, self.hidden):
                if buffer is not None:
                    buffer[holes] = buffer[movers]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weight + bias.   [n, in], [in, out], [out] -> [n, out]"""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def fast_decoder(model: nn.Module, prompts: Prompts, past: Any, samples: int, more: int) -> FastDecoder | None:
    """The packed model after its prompts, or None where the family is not known or the probe tells it from the model."""
    from transformers.cache_utils import DynamicLayer

    if past is None or more < 1 or not all(type(layer) is DynamicLayer for layer in past.layers):
        return None
    found = packed(model)
    if found is None:
        return None
    states = [(layer.keys, layer.values) for layer in past.layers]
    rows, steps = prompts.few(), min(2, more)
    few = prompts.at(rows)
    probe = FastDecoder(found, few, [(keys[rows], values[rows]) for keys, values in states], samples=1, more=steps)
    return FastDecoder(found, prompts, states, samples, more) if difference(model, probe, few, steps) <= TOLERANCE else None
