"""Scores of steps and tokens: where in a response they are earned.

Rewards get text, and the tokens of a policy are not those of a reward model. So a step is known by where it ends in the text,
and its score lies on the policy's token that writes its last character.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.language.rewards.scores import Pieces, listed, number

Per = Literal["response", "token", "step"]
"""what a score is for"""
Mark = tuple[int, float]
"""how many characters of the response a step ends after, or the number of a token; and the score"""


@dataclass(frozen=True)
class Step:
    """One step of a response."""

    text: str
    """without its separator"""
    end: int
    """characters of the response up to its end, separator included"""


def steps_of(response: str, separator: str) -> list[Step]:
    """What stands between separators; the last step may have none behind it. White space alone is no step."""
    found, end = [], 0
    for text in response.split(separator):
        end = min(end + len(text) + len(separator), len(response))
        if text.strip():
            found.append(Step(text, end))
    return found


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """What each token adds to the text: ``"".join(pieces)`` is ``decode(ids)``. A token that ends nothing adds "".

    A character of several tokens belongs to the last of them, several characters of one token to that one.
    """
    whole, found = decode(ids), [""] * len(ids)
    before, start = 0, 0  # decoded together are the last token with a text of its own and all since: it may change the next
    for place in range(len(ids)):
        known, text = decode(ids[before:start]), decode(ids[before : place + 1])
        if len(text) > len(known) and not text.endswith("\ufffd"):  # otherwise part of a character, or no text at all
            found[place] = text[len(known) :]
            before, start = start, place + 1
    if "".join(found) == whole:
        return found
    ends = [_common(decode(ids[: place + 1]), whole) for place in range(len(ids))]
    ends = list(accumulate([*ends[:-1], len(whole)], max)) if ids else []
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def cut_to(length: int, pieces: Sequence[str]) -> list[str]:
    """The pieces of only so many characters; those that write what comes after, such as a stop string, add ""."""
    ends = list(accumulate(map(len, pieces), initial=0))
    return [piece[: max(0, length - start)] for piece, start in zip(pieces, ends, strict=False)]


def dense_of(marks: Sequence[Sequence[Mark]], tokens: Pieces, per: Per) -> Tensor:
    """Scores where they are earned; several on one token add up.   -> [N, T]

    The token of a step is the first with which all its characters are written; of one that ends after none, the first of all.
    """
    found = torch.zeros(len(tokens), max(map(len, tokens), default=0), dtype=torch.float64)
    for row, of_row in enumerate(marks):
        written = list(accumulate(map(len, tokens[row])))
        for place, score in of_row:
            found[row, place if per == "token" else bisect_left(written, place)] += score
    return found.float()


def marks_from(entry: Any, response: str, tokens: Sequence[str] | None, per: Per, separator: str | None) -> list[Mark] | str:
    """What a function gave for a response, as marks; or in a word what it gave in place of a number.

    Raises ValueError, with what is wrong, for another count than there are tokens or steps, and for ends that are none.
    """
    scores = listed(entry)
    if scores is None:
        return "None"
    if not isinstance(scores, list):
        raise ValueError(f"a {type(entry).__name__} where a list was due, with a score for every {per}")
    if per == "step" and separator is None:
        ends = [_end_of(pair, response) for pair in scores]
        scores = [listed(pair)[1] for pair in scores]
    elif per == "step":
        assert separator is not None
        ends = [step.end for step in steps_of(response, separator)]
    else:
        ends = list(range(len(tokens or ())))
    if len(scores) != len(ends):
        what = "tokens (its end is one too)" if per == "token" else f"steps (separator {separator!r})"
        raise ValueError(f"{len(scores)} scores for the {len(ends)} {what}")
    marks: list[Mark] = []
    for end, value in zip(ends, scores, strict=True):
        score = number(value)
        if isinstance(score, str):
            return score
        marks.append((end, score))
    return marks if isinstance(number(math.fsum(score for _, score in marks)), float) else "infinite"


def _end_of(pair: Any, response: str) -> int:
    """The end of an ``(end, score)``."""
    found = listed(pair)
    if not isinstance(found, list) or len(found) != 2:
        raise ValueError(f"{_shown(pair)} where (end, score) was due; or set separator, for a score of every step")
    end = number(found[0])
    if isinstance(end, str) or end != int(end) or not 0 <= end <= len(response):
        raise ValueError(
            f"the end {_shown(found[0])} for a step; it must be a whole number from 0 to its {len(response)} characters"
        )
    return int(end)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:40] + " …"


def _common(text: str, whole: str) -> int:
    """How many characters both begin with."""
    pairs = zip(text, whole, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(text), len(whole)))
