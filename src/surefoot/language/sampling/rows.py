"""How many responses are sampled at a time, so that their caches fit into memory."""

from typing import Any

CACHE_SHARE = 0.4
"""share of the device's memory that the caches of all responses may take: weights, gradients and moments need the rest. Of all
memory, not of what is free, so that a run repeats itself on the same machine"""
LOGIT_BYTES = 24
"""per response and token of the vocabulary: logits and log-probabilities in float32, cumulative probabilities in float64"""


def row_bytes(config: Any, tokens: int, number_bytes: int) -> int | None:
    """Bytes of one response while it is sampled: keys and values of ``tokens``, and logits; None without such a cache.

    number_bytes   of one key or value
    """
    text = config.get_text_config()
    layers, heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    if not layers or not heads:
        return None
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return int(2 * layers * kv_heads * width * tokens * number_bytes + LOGIT_BYTES * text.vocab_size)


def rows_that_fit(config: Any, tokens: int, number_bytes: int, memory: int | None) -> int | None:
    """Responses that are sampled at a time; None for all, if the model or the memory is unknown.

    tokens   of the longest prompt and response
    memory   of the device, in bytes
    """
    each = row_bytes(config, tokens, number_bytes)
    return None if each is None or memory is None else max(1, int(CACHE_SHARE * memory) // each)


def chunk_of(prompts: int, samples: int, rows: int | None) -> tuple[int, int]:
    """Prompts, and responses to each, that are sampled at a time: whole prompts, or a part of the responses to one."""
    if rows is None or rows >= prompts * samples:
        return prompts, samples
    return (rows // samples, samples) if rows >= samples else (1, rows)
