"""The steps of a response, and the text of each of its tokens."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from surefoot.language.data.rows import common_length


@dataclass(frozen=True)
class Step:
    """One step of a response."""

    text: str
    """without its separator"""
    end: int
    """characters of the response up to its end, separator included"""


def split_steps(response: str, separator: str) -> list[Step]:
    """The steps between separators; the last one may have no separator after it. White space alone is no step. With an empty
    separator, every other character is one.
    """
    steps, end = [], 0
    for text in response.split(separator) if separator else response:
        end = min(end + len(text) + len(separator), len(response))
        if text.strip():
            steps.append(Step(text, end))
    return steps


def step_tokens(decode: Callable[[Sequence[int]], str], ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each end of a step, in characters, the index of the token that writes its last character."""
    written = list(accumulate(map(len, token_texts(decode, ids))))
    return [min(bisect_left(written, end), len(ids) - 1) for end in ends]  # an unknown character may be decoded as fewer


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text that each token adds: ``"".join(token_texts)`` is ``decode(ids)``. A token that completes no character adds "".

    A character of several tokens belongs to the last of them, several characters of one token to that one.
    """
    whole, texts = decode(ids), [""] * len(ids)
    before, start = 0, 0  # decode from the last token that added text: it may change the text of the next one
    for place in range(len(ids)):
        shorter, text = decode(ids[before:start]), decode(ids[before : place + 1])
        if len(text) > len(shorter) and not text.endswith("\ufffd"):  # otherwise part of a character, or no text at all
            texts[place] = text[len(shorter) :]
            before, start = start, place + 1
    if "".join(texts) == whole:
        return texts
    ends = [common_length(decode(ids[: place + 1]), whole) for place in range(len(ids))]
    ends = list(accumulate([*ends[:-1], len(whole)], max)) if ids else []
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
