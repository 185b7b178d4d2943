"""Scores of responses as tensors: one per response, or one per step or token.

Rewards read text, and the policy's tokens differ from a reward model's. So a step is identified by where it ends in the text,
and its score goes to the policy's token that writes its last character.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from surefoot.functional import masked_moments
from surefoot.language.data.chat import Messages
from surefoot.language.data.steps import split_steps
from surefoot.ranks.collectives import in_float64, merge_across_ranks, world_size

Columns = Mapping[str, Sequence[Any]]
Prompt = str | Messages
"""text, or the messages of a conversation"""
TokenTexts = Sequence[Sequence[str]]
"""the tokens of each response, as the text that each of them adds to it"""
Per = Literal["response", "token", "step"]
"""what a score is for"""
Mark = tuple[int, float]
"""the characters of the response before the end of a step, or the index of a token; and the score"""


@dataclass(frozen=True)
class Scores:
    """The scores of N responses.   All [N] unless said otherwise"""

    total: Tensor
    """float32, weighted; 0 where not valid"""
    parts: dict[str, Tensor]
    """term -> its score before its weight, summed over steps or tokens; 0 where there is none"""
    valid: Tensor
    """False where a term returned no finite number: that response is not trained on"""
    dense: Tensor | None = None
    """[N, T] where a term scores steps or tokens: ``total`` token by token; a score of the whole response is on its last one"""

    def column(self, x: Tensor) -> list[float | None]:
        """Number by number, None where a response has no score.   [N]"""
        return [value if valid else None for value, valid in zip(x.tolist(), self.valid.tolist(), strict=True)]

    def per_token(self, tokens: TokenTexts) -> Tensor:
        """``total`` token by token, whether a term is dense or not.   -> [N, T]"""
        if self.dense is not None:
            return self.dense
        dense = self.total.new_zeros(len(tokens), max(map(len, tokens), default=0))
        for row, texts in enumerate(tokens):
            if texts:  # empty for a conversation that never began
                dense[row, len(texts) - 1] = self.total[row]
        return dense


def mean_of(x: Tensor, valid: Tensor) -> float | None:
    """The mean over the responses with a score; None without any.   [N], [N]"""
    return float(x[valid].mean()) if valid.any() else None


class Reward(Protocol):
    """Anything that scores text. Raises SurefootError when it can't."""

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns, tokens: TokenTexts | None = None
    ) -> Scores:
        """The scores of N responses, each to the prompt of its index; every column has N entries too.

        ``tokens`` is passed when one of the rewards is dense; a dense reward then returns ``Scores.dense``.
        """


def mean_and_std(scores: Scores, x: Tensor) -> tuple[float | None, float | None]:
    """Mean and standard deviation over the responses of all ranks with a score; None without any.   [N]"""
    if world_size() == 1:
        return mean_of(x, scores.valid), float(x[scores.valid].std(correction=0)) if scores.valid.any() else None
    exact = in_float64(x)
    moments = merge_across_ranks(masked_moments(exact, scores.valid.to(exact.device)))
    return (float(moments.mean), float(moments.var.sqrt())) if moments.n else (None, None)


def scatter_scores(scores: Scores, rows: Sequence[int], count: int) -> Scores:
    """Place the scores of some of ``count`` responses at their ``rows``; the others are not valid.   [len(rows)] -> [count]"""
    at = torch.tensor(rows)

    def scatter(x: Tensor) -> Tensor:
        return x.new_zeros(count, *x.shape[1:]).index_copy(0, at.to(x.device), x)

    dense = None if scores.dense is None else scatter(scores.dense)
    return Scores(scatter(scores.total), {name: scatter(x) for name, x in scores.parts.items()}, scatter(scores.valid), dense)


def concat_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of several rounds, by the same reward."""
    dense = [part.dense for part in parts if part.dense is not None]
    width = max((x.shape[1] for x in dense), default=0)
    return Scores(
        torch.cat([part.total for part in parts]),
        {name: torch.cat([part.parts[name] for part in parts]) for name in parts[0].parts},
        torch.cat([part.valid for part in parts]),
        torch.cat([pad(x, (0, width - x.shape[1])) for x in dense]) if dense else None,
    )


def to_number(value: Any) -> float | str:
    """A number that float32 can hold, or a word for what it is instead."""
    if not isinstance(value, Real) and hasattr(value, "item"):  # a scalar of numpy or torch
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return "array"
    if not isinstance(value, Real):
        return "None" if value is None else type(value).__name__
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        return "NaN"
    return number if abs(number) <= torch.finfo(torch.float32).max else "infinite"


def to_list(value: Any) -> Any:
    """Arrays, tensors and sequences as lists; text and anything else unchanged. A user's own type may raise here."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    return value


# ---- steps and tokens ---------------------------------------------------------------------------------------------------


def truncate_texts(length: int, texts: Sequence[str]) -> list[str]:
    """The texts of tokens, limited to ``length`` characters in all; tokens after these, such as a stop string's, add ""."""
    ends = list(accumulate(map(len, texts), initial=0))
    return [text[: max(0, length - start)] for text, start in zip(texts, ends, strict=False)]


def dense_scores(marks: Sequence[Sequence[Mark]], tokens: TokenTexts, per: Per) -> Tensor:
    """Scores on the tokens where they are earned; several on one token add up.   -> [N, T]

    The token of a step is the first that completes all its characters; a step that ends after 0 characters has the first token.
    """
    dense = torch.zeros(len(tokens), max(map(len, tokens), default=0), dtype=torch.float64)
    for row, of_row in enumerate(marks):
        written = list(accumulate(map(len, tokens[row])))
        for place, score in of_row:
            dense[row, place if per == "token" else bisect_left(written, place)] += score
    return dense.float()


def marks_from(entry: Any, response: str, tokens: Sequence[str] | None, per: Per, separator: str | None) -> list[Mark] | str:
    """What a function returned for a response, as marks; or a word for what it returned instead of a number.

    Raises ValueError, with what is wrong, when the count differs from that of tokens or steps, and for invalid ends.
    """
    scores = to_list(entry)
    if scores is None:
        return "None"
    if not isinstance(scores, list):
        raise ValueError(f"a {type(entry).__name__} instead of a list with a score for every {per}")
    if per == "step" and separator is None:
        ends = [_end_of(pair, response) for pair in scores]
        scores = [to_list(pair)[1] for pair in scores]
    elif per == "step":
        assert separator is not None
        ends = [step.end for step in split_steps(response, separator)]
    else:
        ends = list(range(len(tokens or ())))
    if len(scores) != len(ends):
        what = "tokens (EOS is one too)" if per == "token" else f"steps (separator {separator!r})"
        raise ValueError(f"{len(scores)} scores for the {len(ends)} {what}")
    marks: list[Mark] = []
    for end, value in zip(ends, scores, strict=True):
        score = to_number(value)
        if isinstance(score, str):
            return score
        marks.append((end, score))
    return marks if isinstance(to_number(math.fsum(score for _, score in marks)), float) else "infinite"


def _end_of(pair: Any, response: str) -> int:
    """The end of an ``(end, score)``."""
    parts = to_list(pair)
    if not isinstance(parts, list) or len(parts) != 2:
        raise ValueError(f"{_abbreviated(pair)} instead of (end, score); or set separator, to score every step")
    end = to_number(parts[0])
    if isinstance(end, str) or end != int(end) or not 0 <= end <= len(response):
        raise ValueError(
            f"the end {_abbreviated(parts[0])} for a step; it must be a whole number from 0 to its {len(response)} characters"
        )
    return int(end)


def _abbreviated(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:40] + " …"
