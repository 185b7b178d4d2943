"""Rows of tokens as a model reads them: below each other and padded, or end to end in one row without padding.

End to end, positions begin at 0 in every row, and attention is computed row by row, so a row reads no other. The linear layers,
most of a pass, then read real tokens only. ``transformers`` recognises rows that are end to end by their positions and makes a
mask of all tokens by all tokens, which costs more than padding on a CPU (docs/benchmarks/language.md). So its interfaces for
attention and masks get functions here that compute each row by itself, and are otherwise its own.

Rows that begin with the same prompt need it once. The first of them is there as a whole; the others are there without their
prompt, and their attention reads the keys and values of the first row's prompt before their own. A causal model computes the
same numbers for equal beginnings, so losses and gradients are those of rows that each read their prompt.
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
from surefoot.recipes.models import ModelRecipe

ATTENTION = "sdpa"
"""the attention of ``transformers`` that is extended; its default for most families"""


COPIED = 8
"""a row that is there without its prompt counts one of so many tokens of it: attention keeps a copy of the prompt's keys and
values, about an eighth of what a layer of a Llama keeps for its backward pass"""


@dataclass(frozen=True)
class Layout:
    """Rows that are end to end.

    lengths  of each, the number of its tokens that are there
    begins   of each, the row whose first tokens it begins with, and their number; None: it is there as a whole
    """

    lengths: tuple[int, ...]
    begins: tuple[tuple[int, int] | None, ...]

    def longest(self) -> tuple[int, int]:
        """Start and length of a longest row, which must be there as a whole."""
        row = max(range(len(self.lengths)), key=lambda row: self.lengths[row] + (self.begins[row] or (0, 0))[1])
        assert self.begins[row] is None, "the first row of a prompt is its longest"
        return sum(self.lengths[:row]), self.lengths[row]


@dataclass(frozen=True)
class Reading:
    """Rows of tokens in the form of a model's inputs; below each other, unless they have a layout."""

    ids: Tensor
    """[B, L], or [1, N] end to end"""
    real: Tensor
    """True at real tokens; of the same shape"""
    options: dict[str, Tensor] = field(default_factory=dict)
    """further inputs of the model"""
    layout: Layout | None = None
    """of the rows that are end to end; None if padded"""
    place: Tensor | None = None
    """column of every token in the one row; None if padded   [B, L]"""

    def at(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Where the tokens at (row, column) of the padded rows are.   [K], [K] -> [K], [K]"""
        return (rows, columns) if self.place is None else (torch.zeros_like(rows), self.place[rows, columns])

    @contextmanager
    def laid_out(self) -> Iterator[None]:
        """Passes over the rows: attention treats each by itself."""
        token = _LAYOUT.set(self.layout)
        try:
            yield
        finally:
            _LAYOUT.reset(token)


def end_to_end(ids: Tensor, real: Tensor) -> Reading:
    """The real tokens of all rows in one row; every row has at least one.   [B, L], [B, L]"""
    extend_attention()
    order = real.cumsum(-1) - 1
    return Reading(
        ids[real].unsqueeze(0),
        real[real].unsqueeze(0),
        {"position_ids": order[real].unsqueeze(0)},
        Layout(tuple(real.sum(-1).tolist()), (None,) * len(real)),
        real.flatten().cumsum(0).view(real.shape) - 1,
    )


def prompts_once(ids: Tensor, real: Tensor, prompts: Tensor) -> Reading:
    """The real tokens of all rows in one row, with the prompt of rows that begin with the same one read once.

    prompts  tokens of each row's prompt   [B]

    Real tokens begin at column 0.   [B, L], [B, L]
    """
    group = same_beginnings(ids, prompts)
    if int(group.max()) + 1 == len(group):
        return end_to_end(ids, real)
    extend_attention()
    lengths, columns = real.sum(-1), torch.arange(ids.shape[1], device=ids.device)
    # By prompt, and the longest row first: masks are parts of the one of the longest row, which is there as a whole.
    order = torch.argsort(lengths, descending=True, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    sorted_groups = group[order]
    is_first = torch.ones_like(order, dtype=torch.bool)
    is_first[1:] = sorted_groups[1:] != sorted_groups[:-1]
    first = order[is_first][group]  # of each row, the row that has its prompt
    own = real & (columns >= torch.where(first == torch.arange(len(ids), device=ids.device), 0, prompts).unsqueeze(-1))
    counts = own.sum(-1)
    starts = torch.empty_like(counts).index_copy_(0, order, counts[order].cumsum(0) - counts[order])
    shift = starts - (lengths - counts)  # from a column of a row to its place
    place = torch.where(own, shift.unsqueeze(-1), starts[first].unsqueeze(-1)) + columns
    there = own[order]
    rank = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    begins = zip(is_first.tolist(), rank[first[order]].tolist(), prompts[order].tolist(), strict=True)
    return Reading(
        ids[order][there].unsqueeze(0),
        torch.ones(1, int(counts.sum()), dtype=torch.bool, device=ids.device),
        {"position_ids": columns.expand_as(ids)[there].unsqueeze(0)},
        Layout(tuple(counts[order].tolist()), tuple(None if whole else (row, size) for whole, row, size in begins)),
        place,
    )


def same_beginnings(ids: Tensor, lengths: Tensor) -> Tensor:
    """A number for each row that is equal for rows whose first ``lengths`` tokens are the same.   [B, L], [B] -> [B]"""
    columns = torch.arange(int(lengths.max()), device=ids.device)
    beginning = ids[:, : len(columns)].masked_fill(columns >= lengths.unsqueeze(-1), -1)
    group: Tensor = torch.unique(beginning, dim=0, return_inverse=True)[1]
    return group


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
    alike = _reads_alike(trunk, end_to_end)
    if alike is None:
        return f"{type(reader).__name__} can't read them"
    return None if alike else f"{type(reader).__name__} would let a row read the one before it, as recurrent layers do"


def reads_prompts_once(trunk: Any) -> bool:
    """Whether a model that reads rows end to end computes the same with ``prompts_once``, by the same test."""
    return bool(_reads_alike(trunk, lambda ids, real: prompts_once(ids, real, real.sum(-1).clamp(max=4))))


@torch.no_grad()
def _reads_alike(trunk: Any, layout: Callable[[Tensor, Tensor], Reading]) -> bool | None:
    """Whether three rows, two of which begin with the same tokens, have the hidden states of padded rows; None if the model
    can't read them.
    """
    embeddings = getattr(trunk, "reader", trunk).get_input_embeddings().weight
    ids = (torch.arange(24, device=embeddings.device) * 7 % embeddings.shape[0]).view(3, 8)
    ids[0, :4] = ids[1, :4]
    real = torch.arange(8, device=ids.device) < torch.tensor([[5], [8], [1]], device=ids.device)
    rows, columns = real.nonzero(as_tuple=True)
    states = []
    try:
        for read in (Reading(ids, real), layout(ids, real)):
            with quiet_transformers(), read.laid_out():
                hidden = trunk(input_ids=read.ids, use_cache=False, **read.options).last_hidden_state
            states.append(hidden[read.at(rows, columns)])
        return logits_close(*states)
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError):  # another signature, output or shape
        return None


def padding_notes(recipe: ModelRecipe, reason: str | None) -> list[str]:
    """A line of the run's start with what became of ``padding_free``; none if it is off."""
    if not recipe.padding_free:
        return []
    return ["padding_free: rows are read end to end" if reason is None else f"padding_free: rows are padded, because {reason}"]


_LAYOUT: ContextVar[Layout | None] = ContextVar("layout", default=None)
"""of the rows that are end to end in the present pass"""


@dataclass(frozen=True)
class RowMask:
    """Attention within rows that are end to end, in place of a mask of all tokens by all tokens.

    It is what every layer gets, so a layer that is computed again in the backward pass has it too.
    """

    layout: Layout
    causal: Tensor | None
    """the mask of the longest row, whose beginning is that of a shorter one; None if no row needs it   [1, 1, L, L]"""
    plain: bool
    """whether it is plain causal, which a row that is there as a whole needs no mask for"""

    def of(self, row: int) -> Tensor | None:
        """The mask of a row: of its tokens that are there by all that it reads.   [1, 1, l, L], or None"""
        begins, length = self.layout.begins[row], self.layout.lengths[row]
        if begins is None and self.plain:
            return None
        assert self.causal is not None
        if begins is None:
            return self.causal[..., :length, :length]
        end = begins[1] + length
        return self.causal[..., begins[1] : end, :end]


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
        rows = list(zip(*(torch.split_with_sizes(x, mask.layout.lengths, dim=2) for x in states), strict=True))

        def of_row(number: int) -> Tensor:
            output: Tensor = attention(module, *rows[number], mask.of(number), **options)[0]
            return output

        def after_prompt(number: int, first: int, size: int) -> Tensor:
            query, *own = rows[number]
            both = [torch.cat([x[:, :, :size], y], 2) for x, y in zip(rows[first][1:], own, strict=True)]
            output: Tensor = attention(module, query, *both, mask.of(number), **options)[0]
            return output

        outputs = []
        for number, begins in enumerate(mask.layout.begins):
            if begins is None:
                outputs.append(of_row(number))
            elif mask.layout.lengths[number]:
                outputs.append(after_prompt(number, *begins))
        return torch.cat(outputs, dim=1)

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
        layout = _LAYOUT.get()
        if layout is None:
            return mask(*sizes, **options)
        start, longest = layout.longest()
        # The function is of all tokens, and knows the rows; so the block of one row is that row's mask.
        options |= {"q_length": longest, "kv_length": longest, "q_offset": start, "kv_offset": start}
        block = mask(*sizes, **{**options, "allow_is_causal_skip": False})
        plain = torch.ones(longest, longest, dtype=torch.bool, device=block.device).tril()
        is_plain = bool((block == plain).all())
        return RowMask(layout, None if is_plain and not any(layout.begins) else block, is_plain)

    return make
