"""Decode small models quickly with packed weights.

At this size, launching operations dominates the time of a step, so a packed layer has only about fifteen. Query, key and value
are one matrix, and so are gate and up. The scales of the normalisations and of attention are multiplied in, and dimensions that
rotary positions rotate together are neighbours, so a rotation is one complex product. Matrices are stored [in, out], which is
faster for a few dozen rows. Attention of one token is two batched matrix products over the cache; the fused kernel, made for
long queries, takes three times as long on a CPU.

The model's own forward pass reads the prompt. Before packed weights are used, two prompts and two more tokens are compared with
the model reading each of them by itself. Adapters are merged into the packed weights. The sampler uses the model's own pass for
unknown families and models with hooks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surefoot.language.models.quantised import has_quantised
from surefoot.language.sampling.kv_cache import Prompts, difference_from_single_rows

PACKED_LIMIT = 64_000_000
"""parameters of all layers above which the model's own forward pass is used: arithmetic dominates there, and packing copies"""


Linear = tuple[Tensor, Tensor | None]
"""a matrix [in, out] and its bias [out]; None means no bias"""


class PackedLayer(NamedTuple):
    """The four matrices of a layer."""

    qkv: Linear
    out: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class PackedModel:
    """A decoder-only transformer with packed weights."""

    layers: list[PackedLayer]
    heads: int
    kv_heads: int
    width: int
    """of a head"""
    eps: float
    centred: bool
    """LayerNorm, which subtracts the mean, or RMSNorm"""
    gated: bool
    activation: Callable[[Tensor], Tensor]
    embedding: nn.Module
    position_embedding: Tensor | None
    """learned positions [context, model width]"""
    rotary: Callable[[int], Tensor] | None
    """length -> e^{i angle} [length, width / 2]"""
    pairs: Tensor | None
    """[width] the order of a key's dimensions in which rotated pairs are neighbours"""
    norm: nn.Module
    head: nn.Module

    def normalised(self, x: Tensor) -> Tensor:
        """LayerNorm or RMSNorm without weights; those are in the next matrix.   [n, d] -> [n, d]"""
        norm = nn.functional.layer_norm if self.centred else nn.functional.rms_norm
        return norm(x, x.shape[-1:], eps=self.eps)


States = list[tuple[Tensor, Tensor]]
"""keys and values of every layer, [rows, heads, length, width] each"""

TOLERANCE = 5e-5
"""largest difference of a log-probability at which the packed model replaces the model"""


class FastDecoder:
    """A packed model that has read its prompts."""

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

    @torch.inference_mode()  # views cost less than under no_grad, and there are many
    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token.   [n] -> [n, vocabulary]"""
        model, n, now = self.packed, len(tokens), self.length
        heads, kv_heads, width = model.heads, model.kv_heads, model.width
        self.length += 1
        places = self.positions[:n]
        x = model.embedding(tokens)
        if model.position_embedding is not None:
            x = x + model.position_embedding[places]
        turn = None if self.turns is None else self.turns[places].unsqueeze(1)
        fresh = self.cache[:, :, :n, :, now].transpose(1, 2).unbind()
        cached = self.cache[:, :, :n, :, : self.length].flatten(2, 3)
        keys, values = cached[:, 0].transpose(-1, -2).unbind(), cached[:, 1].unbind()
        hidden = None if self.hidden is None else self.hidden[:n, ..., : self.length].flatten(0, 1)
        for i, layer in enumerate(model.layers):
            qkv = product(model.normalised(x), *layer.qkv).view(n, heads + 2 * kv_heads, width)
            if turn is not None:
                torch.view_as_complex(qkv[:, : heads + kv_heads].view(n, -1, width // 2, 2)).mul_(turn)
            fresh[i].copy_(qkv[:, heads:].view(n, 2, kv_heads, width))
            query = qkv[:, :heads].reshape(n * kv_heads, heads // kv_heads, width)
            scores = torch.bmm(query, keys[i]) if hidden is None else torch.baddbmm(hidden, query, keys[i])
            mixed = torch.bmm(scores.softmax(-1), values[i]).view(n, heads * width)
            x = add_product(x, mixed, *layer.out)
            wide = product(model.normalised(x), *layer.up)
            if model.gated:
                gate, up = wide.chunk(2, -1)
                wide = model.activation(gate).mul_(up)
            else:
                wide = model.activation(wide)
            x = add_product(x, wide, *layer.down)
        places.add_(1)
        logits: Tensor = model.head(model.norm(x))
        return logits

    def shrink(self, count: int, holes: Tensor, movers: Tensor) -> None:
        """Drop the finished slots by copying the filled part of the rows that move."""
        if len(holes):
            self.cache[:, :, holes, :, : self.length] = self.cache[:, :, movers, :, : self.length]
            for buffer in (self.positions, self.hidden):
                if buffer is not None:
                    buffer[holes] = buffer[movers]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weight + bias.   [n, in], [in, out], [out] -> [n, out]"""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def add_product(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + y · weight + bias.   [n, out], [n, in], [in, out], [out] -> [n, out]"""
    return torch.addmm(x if bias is None else x + bias, y, weight)


def fast_decoder(model: nn.Module, prompts: Prompts, logits: Tensor, past: Any, samples: int, more: int) -> FastDecoder | None:
    """The packed model after its prompts; None for an unknown family or if its log-probabilities differ.

    Packing copies the layers' weights: about a millisecond per million parameters.
    """
    from transformers.cache_utils import DynamicLayer

    if past is None or more < 1 or not all(type(layer) is DynamicLayer for layer in past.layers):
        return None
    if why_not_packed(model) is not None:
        return None
    packed = READERS[model_type(model)](model)
    states = [(layer.keys, layer.values) for layer in past.layers]
    rows, steps = prompts.shortest_and_longest(), min(2, more)
    few = prompts.at(rows)
    probe = FastDecoder(packed, few, [(keys[rows], values[rows]) for keys, values in states], samples=1, more=steps)
    largest, _ = difference_from_single_rows(model, logits[rows], probe, few, steps)
    return FastDecoder(packed, prompts, states, samples, more) if largest <= TOLERANCE else None


def model_type(model: Any) -> str:
    """The family of a model by its configuration, such as "llama"."""
    return str(getattr(getattr(model, "config", None), "model_type", None))


def why_not_packed(model: Any) -> str | None:
    """The reason why a model's weights can't be packed, in a few words; None if they can. Reads no weights."""
    if model_type(model) not in READERS:
        return f"no packed weights for {model_type(model)}"
    if model.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(model.device.type):
        return "packed weights compute in float32"
    if has_quantised(model):
        return "packed weights compute in float32, and these are quantised"
    blocks, supported = _gpt2_layers(model) if model_type(model) == "gpt2" else _llama_layers(model)
    if not supported:
        return f"this {model_type(model)} has layers or positions that can't be packed"
    count = sum(parameter.numel() for parameter in blocks.parameters())
    if not 0 < count <= PACKED_LIMIT:
        return f"packing pays up to {PACKED_LIMIT / 1e6:.0f} M parameters in layers, and these have {count / 1e6:,.0f} M"
    return None


def _llama_layers(model: Any) -> tuple[Any, bool]:
    """The layers, and whether all of them and the positions can be packed."""
    core = model.model
    modules = [getattr(b.self_attn, name) for b in core.layers for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    modules += [getattr(b.mlp, name) for b in core.layers for name in ("gate_proj", "up_proj", "down_proj")]
    moving = core.rotary_emb.rope_type in ("dynamic", "longrope")  # frequencies depend on the length
    return core.layers, all_exactly(modules, nn.Linear) and not moving


def _gpt2_layers(model: Any) -> tuple[Any, bool]:
    from transformers.pytorch_utils import Conv1D

    blocks = model.transformer.h
    modules = [module for b in blocks for module in (b.attn.c_attn, b.attn.c_proj, b.mlp.c_fc, b.mlp.c_proj)]
    return blocks, all_exactly(modules, Conv1D) and not model.config.add_cross_attention


def all_exactly(modules: list[Any], kind: type[nn.Module]) -> bool:
    """Whether all modules are exactly of a class, apart from adapters: a quantised layer computes differently."""
    return all(type(module.base_layer if hasattr(module, "lora_A") else module) is kind for module in modules)


def merged_layer(module: Any) -> Any:
    """A layer's weight and bias, with its active adapters added; ``fast_decoder`` detects other kinds of adapter."""
    if not hasattr(module, "lora_A"):
        return module
    weight = module.base_layer.weight
    for role in module.active_adapters:
        if role in module.lora_A:
            weight = weight + module.get_delta_weight(role)
    return SimpleNamespace(weight=weight, bias=module.base_layer.bias)


def joined_layers(parts: list[Any], scale: Tensor | float = 1.0) -> Linear:
    """Linear layers of one input as one matrix [in, out] and bias [out]; the input's scale [in] is multiplied in."""
    parts = [merged_layer(part) for part in parts]
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return (weight * scale).t().contiguous(), bias


def pack_llama(model: Any) -> PackedModel:
    """Llama and similar models: RMSNorm, rotary positions, grouped queries, a gated feed-forward."""
    core, config = model.model, model.config
    rotary = core.rotary_emb
    width = core.layers[0].self_attn.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    one = 1.0 if config.model_type == "gemma" else 0.0
    pairs = torch.arange(width, device=model.device).view(2, -1).t().flatten()  # 0, w/2, 1, w/2 + 1, …: (re, im) pairs
    order = torch.arange((heads + 2 * kv_heads) * width, device=model.device).view(-1, width)
    order[: heads + kv_heads] = order[: heads + kv_heads, pairs]
    layers = []
    for block in core.layers:
        attention, mlp = block.self_attn, block.mlp
        qkv, bias = joined_layers([attention.q_proj, attention.k_proj, attention.v_proj], one + block.input_layernorm.weight)
        scale = torch.ones(len(order), 1, dtype=qkv.dtype, device=qkv.device)
        scale[:heads] = attention.scaling
        scale = scale.expand(-1, width).flatten()
        layers.append(
            PackedLayer(
                qkv=(qkv[:, order.flatten()] * scale, None if bias is None else bias[order.flatten()] * scale),
                out=joined_layers([attention.o_proj]),
                up=joined_layers([mlp.gate_proj, mlp.up_proj], one + block.post_attention_layernorm.weight),
                down=joined_layers([mlp.down_proj]),
            )
        )

    def turns(length: int) -> Tensor:
        places = torch.arange(length, device=model.device).unsqueeze(0)
        cos, sin = rotary(core.norm.weight, places)
        return torch.complex(cos[0, :, : width // 2].contiguous(), sin[0, :, : width // 2].contiguous())

    return PackedModel(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        eps=config.rms_norm_eps,
        centred=False,
        gated=True,
        activation=core.layers[0].mlp.act_fn,
        embedding=core.embed_tokens,
        position_embedding=None,
        rotary=turns,
        pairs=pairs,
        norm=core.norm,
        head=model.lm_head,
    )


def pack_gpt2(model: Any) -> PackedModel:
    """GPT-2: LayerNorm, learned positions, one matrix for query, key and value, already stored [in, out]."""
    core, config = model.transformer, model.config
    layers = []
    for block in core.h:
        attention, mlp = block.attn, block.mlp
        qkv, up = merged_layer(attention.c_attn), merged_layer(mlp.c_fc)
        out, down = merged_layer(attention.c_proj), merged_layer(mlp.c_proj)
        scale = torch.ones_like(qkv.bias)
        scale[: config.hidden_size] = attention.scaling
        layers.append(
            PackedLayer(
                qkv=(block.ln_1.weight.unsqueeze(-1) * qkv.weight * scale, (block.ln_1.bias @ qkv.weight + qkv.bias) * scale),
                out=(out.weight, out.bias),
                up=(block.ln_2.weight.unsqueeze(-1) * up.weight, block.ln_2.bias @ up.weight + up.bias),
                down=(down.weight, down.bias),
            )
        )
    return PackedModel(
        layers=layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        width=config.hidden_size // config.num_attention_heads,
        eps=config.layer_norm_epsilon,
        centred=True,
        gated=False,
        activation=core.h[0].mlp.act,
        embedding=core.wte,
        position_embedding=core.wpe.weight,
        rotary=None,
        pairs=None,
        norm=core.ln_f,
        head=model.lm_head,
    )


READERS: dict[str, Callable[[Any], PackedModel]] = {
    "llama": pack_llama,
    "mistral": pack_llama,
    "qwen2": pack_llama,
    "gemma": pack_llama,
    "gpt2": pack_gpt2,
}
"""the families that can be packed"""
