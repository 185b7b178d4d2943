"""Rows of tokens as a model reads them: below each other and padded, or end to end in one row without padding.

End to end, positions begin at 0 in every row, and attention is computed row by row, so a row reads no other. The linear layers,
most of a pass, then read real tokens only. ``transformers`` recognises rows that are end to end by their positions and makes a
mask of all tokens by all tokens, which costs more than padding on a CPU (docs/benchmarks/language.md). So its interfaces for
attention and masks get functions here that compute each row by itself, and are otherwise its own.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from surefoot.language import quiet_transformers
from surefoot.language.models.loading import logits_close
from surefoot.recipes.language import ModelRecipe

ATTENTION = "sdpa"
"""the attention of ``transformers`` that is extended; its default for most families"""


@dataclass(frozen=True)
class Reading:
    """Rows of tokens in the form of a model's inputs."""

    ids: Tensor
    """[B, L], or [1, N] end to end"""
    real: Tensor
    """True at real tokens; of the same shape"""
    options: dict[str, Tensor] = field(default_factory=dict)
    """further inputs of the model"""
    lengths: tuple[int, ...] = ()
    """of the rows that are end to end; () if padded"""
    place: Tensor | None = None
    """column of every token in the one row; None if padded   [B, L]"""

    def at(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Where the tokens at (row, column) of the padded rows are.   [K], [K] -> [K], [K]"""
        return (rows, columns) if self.place is None else (torch.zeros_like(rows), self.place[rows, columns])

    @contextmanager
    def laid_out(self) -> Iterator[None]:
        """Passes over the rows: attention treats each by itself."""
        token = _LENGTHS.set(self.lengths)
        try:
            yield
        finally:
            _LENGTHS.reset(token)


def padded(ids: Tensor, real: Tensor) -> Reading:
    """Rows below each other.   [B, L], [B, L]"""
    return Reading(ids, real)


def end_to_end(ids: Tensor, real: Tensor) -> Reading:
    """The real tokens of all rows in one row; every row has at least one.   [B, L], [B, L]"""
    extend_attention()
    order = real.cumsum(-1) - 1
    return Reading(
        ids[real].unsqueeze(0),
        real[real].unsqueeze(0),
        {"position_ids": order[real].unsqueeze(0)},
        tuple(real.sum(-1).tolist()),
        real.flatten().cumsum(0).view(real.shape) - 1,
    )


@torch.no_grad()
def reason_for_padding(trunk: Any) -> str | None:
    """Why a model's rows can't be read end to end; None if they can. It is tested by a pass over three rows.

    trunk  a model without head, in eval mode
    """
    reader = getattr(trunk, "reader", trunk)
    if "position_ids" not in inspect.signature(reader.forward).parameters:
        return f"{type(reader).__name__} takes no position_ids"
    attention = reader.config._attn_implementation
    if attention != ATTENTION:
        return f"the attention of {type(reader).__name__} is {attention!r}, not {ATTENTION!r}"
    embeddings = reader.get_input_embeddings().weight
    ids = (torch.arange(24, device=embeddings.device) * 7 % embeddings.shape[0]).view(3, 8)
    real = torch.arange(8, device=ids.device) < torch.tensor([[5], [8], [1]], device=ids.device)
    rows, columns = real.nonzero(as_tuple=True)
    try:
        with quiet_transformers():
            states = []
            for read in (padded(ids, real), end_to_end(ids, real)):
                with read.laid_out():
                    hidden = trunk(input_ids=read.ids, use_cache=False, **read.options).last_hidden_state
                states.append(hidden[read.at(rows, columns)])
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError):  # another signature, output or shape
        return f"{type(reader).__name__} can't read them"
    if not logits_close(*states):
        return f"{type(reader).__name__} would let a row read the one before it, as recurrent layers do"
    return None


def padding_notes(recipe: ModelRecipe, reason: str | None) -> list[str]:
    """A line of the run's start with what became of ``padding_free``; none if it is off."""
    if not recipe.padding_free:
        return []
    return ["padding_free: rows are read end to end" if reason is None else f"padding_free: rows are padded, because {reason}"]


_LENGTHS: ContextVar[tuple[int, ...]] = ContextVar("lengths", default=())
"""of the rows that are end to end in the present pass"""


@dataclass(frozen=True)
class RowMask:
    """Attention within rows that are end to end, in place of a mask of all tokens by all tokens.

    It is what every layer gets, so a layer that is computed again in the backward pass has it too.
    """

    lengths: tuple[int, ...]
    causal: Tensor | None
    """the mask of the longest row, whose beginning is that of a shorter one; None: plain causal   [1, 1, L, L]"""

    def of(self, length: int) -> Tensor | None:
        """The mask of a row."""
        return None if self.causal is None else self.causal[..., :length, :length]


@cache
def extend_attention() -> None:
    """Let the attention of ``transformers`` accept rows that are end to end. Other passes get its own functions, unchanged."""
    from transformers import AttentionInterface, AttentionMaskInterface

    attention: Any = AttentionInterface()[ATTENTION]
    mask: Any = AttentionMaskInterface()[ATTENTION]
    AttentionInterface.register(ATTENTION, _by_row(attention))
    AttentionMaskInterface.register(ATTENTION, _mask_by_row(mask))


def _by_row(attention: Callable[..., Any]) -> Callable[..., Any]:
    # Lengths differ from pass to pass, so they are not part of a compiled block.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def each_row(module: torch.nn.Module, *states: Tensor, mask: RowMask, **options: Any) -> Tensor:
        of_rows = [torch.split_with_sizes(x, mask.lengths, dim=2) for x in states]
        rows = zip(mask.lengths, *of_rows, strict=True)
        return torch.cat([attention(module, *row, mask.of(length), **options)[0] for length, *row in rows], dim=1)

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """The attention of one layer.   each [B, heads, L, width] -> [B, L, heads, width]"""
        if isinstance(attention_mask, RowMask):
            rows: Tensor = each_row(module, query, key, value, mask=attention_mask, **options)
            return rows, None
        output: tuple[Tensor, None] = attention(module, query, key, value, attention_mask, **options)
        return output

    return attend


def _mask_by_row(mask: Callable[..., Any]) -> Callable[..., Any]:
    def make(*sizes: Any, **options: Any) -> Any:
        """The mask of a pass: causal, perhaps with a window or in chunks, as ``mask_function`` in the options is."""
        lengths = _LENGTHS.get()
        if not lengths:
            return mask(*sizes, **options)
        longest = max(lengths)
        start = sum(lengths[: lengths.index(longest)])
        # The function is of all tokens, and knows the rows; so the block of one row is that row's mask.
        options |= {"q_length": longest, "kv_length": longest, "q_offset": start, "kv_offset": start}
        block = mask(*sizes, **{**options, "allow_is_causal_skip": False})
        plain = torch.ones(longest, longest, dtype=torch.bool, device=block.device).tril()
        return RowMask(lengths, None if bool((block == plain).all()) else block)

    return make
