"""What responses earn, as tensors: once each, or token by token."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from surefoot.core.distributed import merge_across_ranks, world_size
from surefoot.functional import masked_moments
from surefoot.language.data.tokens import Messages

Columns = Mapping[str, Sequence[Any]]
Prompt = str | Messages
"""text, or the messages of a conversation"""
Pieces = Sequence[Sequence[str]]
"""the tokens of each response, as the text that each of them adds to it"""


@dataclass(frozen=True)
class Scores:
    """What N responses earn.   All [N] unless said otherwise"""

    total: Tensor
    """float32, weighted; 0 where not valid"""
    parts: dict[str, Tensor]
    """term -> what it gave, before its weight, summed over steps or tokens; 0 where it gave none"""
    valid: Tensor
    """False where a term gave no finite number: nothing is to be learned from that response"""
    dense: Tensor | None = None
    """[N, T] where a term scores steps or tokens: ``total`` token by token; what the whole response earns is on its last one"""

    def mean_of(self, x: Tensor) -> float | None:
        """The mean over the responses that have a score; None where none has.   [N]"""
        return float(x[self.valid].mean()) if self.valid.any() else None

    def spread_of(self, x: Tensor) -> float | None:
        """Their standard deviation; None where none has a score.   [N]"""
        return float(x[self.valid].std(correction=0)) if self.valid.any() else None

    def column(self, x: Tensor) -> list[float | None]:
        """Number by number, None where a response has no score.   [N]"""
        return [value if valid else None for value, valid in zip(x.tolist(), self.valid.tolist(), strict=True)]

    def spread(self, tokens: Pieces) -> Tensor:
        """``total`` token by token, whether a term is dense or not.   -> [N, T]"""
        if self.dense is not None:
            return self.dense
        found = self.total.new_zeros(len(tokens), max(map(len, tokens), default=0))
        for row, pieces in enumerate(tokens):
            if pieces:  # a conversation that never began has none
                found[row, len(pieces) - 1] = self.total[row]
        return found


class Reward(Protocol):
    """Anything that scores text. Raises SurefootError when it can't."""

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns, tokens: Pieces | None = None
    ) -> Scores:
        """The scores of N responses, each to the prompt of its index; every column has N entries too.

        ``tokens`` is given where one of the rewards is dense: whoever gets it says in ``Scores.dense`` where what is earned.
        """
        ...


def over_all_ranks(scores: Scores, x: Tensor) -> tuple[float | None, float | None]:
    """Mean and standard deviation over the responses of all ranks that have a score; None where none has.   [N]"""
    if world_size() == 1:
        return scores.mean_of(x), scores.spread_of(x)
    moments = merge_across_ranks(masked_moments(x.double(), scores.valid))
    return (float(moments.mean), float(moments.var.sqrt())) if moments.n else (None, None)


def scattered(scores: Scores, rows: Sequence[int], count: int) -> Scores:
    """Scores of some of ``count`` responses, those of ``rows``, with the others as not valid.   [len(rows)] -> [count]"""
    at = torch.tensor(rows)

    def spread(x: Tensor) -> Tensor:
        return x.new_zeros(count, *x.shape[1:]).index_copy(0, at.to(x.device), x)

    dense = None if scores.dense is None else spread(scores.dense)
    return Scores(spread(scores.total), {name: spread(x) for name, x in scores.parts.items()}, spread(scores.valid), dense)


def joined_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of several rounds, by the same reward."""
    dense = [part.dense for part in parts if part.dense is not None]
    width = max((x.shape[1] for x in dense), default=0)
    return Scores(
        torch.cat([part.total for part in parts]),
        {name: torch.cat([part.parts[name] for part in parts]) for name in parts[0].parts},
        torch.cat([part.valid for part in parts]),
        torch.cat([pad(x, (0, width - x.shape[1])) for x in dense]) if dense else None,
    )


def number(value: Any) -> float | str:
    """A number that float32 can hold, or in a word what it is instead."""
    if not isinstance(value, Real) and hasattr(value, "item"):  # a scalar of numpy or torch
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return "array"
    if not isinstance(value, Real):
        return "None" if value is None else type(value).__name__
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if math.isnan(found):
        return "NaN"
    return found if abs(found) <= torch.finfo(torch.float32).max else "infinite"


def listed(returned: Any) -> Any:
    """Arrays, tensors and sequences as lists; text and anything else as it is. A user's own type may raise here."""
    if hasattr(returned, "tolist"):
        return returned.tolist()
    if isinstance(returned, Sequence) and not isinstance(returned, (str, bytes)):
        return list(returned)
    return returned
