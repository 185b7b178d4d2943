"""The time of a pass, a sampled token and an exchange, by arithmetic (docs/scale.md).

Every formula is a short function of sizes and rates: operations of matrices over FLOP/s, bytes over bytes per second. A
mixture of experts is counted as if all experts read every token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.language.memory.parameters import count_parameters, layer_count

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOVED_PER_WIDTH, MOVED_PER_FEED_FORWARD = 40, 12
"""numbers that the operations between the matrices of a layer read and write in a forward pass, per token and unit: norms,
rotations, sums of the residual stream, the products of the feed-forward"""
MOVED_PER_LOGIT = 10
"""the same per logit: the logits, their largest, exponentials, sum, probabilities and entropy"""
OPERATIONS = 40
"""operations of a layer in a forward pass, each started by the host"""
OPTIMIZER_BYTES = 32
"""per trained parameter and step: Adam reads value, gradient and two moments and writes three of them; the gradient's norm"""


@dataclass(frozen=True)
class Transformer:
    """The sizes of a model that its time depends on.

    weights   parameters of all layers
    head      parameters that make logits; 0 without them
    total     all parameters
    cache     numbers that are kept of each token while sampling
    """

    layers: int
    width: int
    feed_forward: int
    vocabulary: int
    weights: int
    head: int
    total: int
    cache: int


def transformer_of(config: "PreTrainedConfig", head: bool = True) -> Transformer:
    """The sizes of a model, with or without its head for logits."""
    counts, layers, text = count_parameters(config), layer_count(config), config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 1) or 1)
    of_keys = int(getattr(text, "num_key_value_heads", None) or heads)
    size = int(getattr(text, "head_dim", None) or counts.width // heads)
    return Transformer(
        layers=layers,
        width=counts.width,
        feed_forward=int(getattr(text, "intermediate_size", None) or 4 * counts.width),
        vocabulary=counts.vocabulary,
        weights=counts.layers,
        head=counts.vocabulary * counts.width if head else 0,
        total=counts.total if head else counts.trunk,
        cache=2 * layers * of_keys * size,
    )


def forward_flops(model: Transformer, tokens: float, logits: float, context: float) -> float:
    """Operations of a forward pass: 2 per weight and token, and those of attention.

    tokens    that are read
    logits    of how many of them logits are made
    context   mean number of tokens that a token attends to
    """
    return 2 * (model.weights * tokens + model.head * logits) + 4 * model.layers * model.width * context * tokens


def backward_flops(model: Transformer, tokens: float, logits: float, context: float, checkpointing: bool) -> float:
    """Operations of a backward pass: twice the forward pass, and with checkpointing its layers once more."""
    again = forward_flops(model, tokens, 0, context) if checkpointing else 0.0
    return 2 * forward_flops(model, tokens, logits, context) + again


def moved_bytes(model: Transformer, tokens: float, logits: float, each: int) -> float:
    """Bytes that operations between matrices move in a forward pass; a backward pass moves twice as many.

    each   bytes of a number; logits are in float32
    """
    of_layer = MOVED_PER_WIDTH * model.width + MOVED_PER_FEED_FORWARD * model.feed_forward
    return model.layers * of_layer * tokens * each + MOVED_PER_LOGIT * model.vocabulary * logits * 4 * (model.head > 0)


def decoding_bytes(model: Transformer, rows: float, context: float, each: int) -> float:
    """Bytes that are read for one more token of every row: all weights once, and the cache of every row."""
    return each * (model.weights + model.head + rows * context * model.cache)


def gather_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank receives to hold the whole of what ``ranks`` ranks share; as many as it sends to sum parts of it."""
    return size * (ranks - 1) / ranks


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank sends to have the sum of all: a sum of parts, and a gather of them."""
    return 2 * gather_bytes(size, ranks)


def unpacked_bytes(size: float, ranks: int) -> float:
    """Bytes read and written to copy what was gathered in one tensor to the parameters, or gradients into one."""
    return 2 * size if ranks > 1 else 0.0


def exchange_seconds(size: float, bandwidth: float, count: float, latency: float) -> float:
    """Seconds of ``count`` exchanges of ``size`` bytes together: never less than bytes over bandwidth."""
    return size / bandwidth + count * latency


def together(seconds: Iterable[float], overlap: bool) -> float:
    """Seconds of things that a device does: at the same time, so that the longest counts, or one after another."""
    return max(seconds) if overlap else sum(seconds)
