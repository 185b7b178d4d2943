"""Text of conversations and its ids: control tokens in messages, and where the assistant's text is."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""first character and the one after the last"""
ENDS = ("1" * 29, "2" * 29)
"""texts whose first and last characters differ"""

ANCHORS = ("\n", ".", "0", "a")
"""texts that another one may follow"""


class Continuation:
    """Text that follows other text, as ids and back.

    Many tokenizers add a space at the beginning of a text, and remove it from a decoded one. Here an anchor precedes the text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self._anchors: list[tuple[str, list[int]]] | None = None

    def encode(self, text: str) -> tuple[list[int], list[Span] | None]:
        """The ids, and the characters of each; None for tokenizers without offsets."""
        for anchor, before in self._needed():
            ids, offsets = self.encode_alone(anchor + text)
            if text and before and ids[: len(before)] == before:
                rest = None if offsets is None else offsets[len(before) :]
                return ids[len(before) :], rest and [(start - len(anchor), end - len(anchor)) for start, end in rest]
        return self.encode_alone(text)

    def encode_alone(self, text: str) -> tuple[list[int], list[Span] | None]:
        """The same of text that follows nothing."""
        fast = self.tokenizer.is_fast
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast)
        return list(map(int, encoded["input_ids"])), [tuple(pair) for pair in encoded["offset_mapping"]] if fast else None

    def decode(self, ids: Sequence[int], decode: Callable[[list[int]], str]) -> str:
        """The text of ids that follow others.

        decode   of the tokenizer
        """
        for _, before in reversed(self._needed()):  # the last are no bytes, with which those of a character could not be joined
            start, whole = decode(before), decode([*before, *ids])
            if start and whole.startswith(start):
                return whole[len(start) :]
        return decode([*ids])

    def _needed(self) -> list[tuple[str, list[int]]]:
        """The anchors with their ids; none for tokenizers that add and remove no space."""
        if self._anchors is None:
            both = [self.encode_alone(text)[0] for text in ("1", " a")]
            texts = [self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (both[0] + both[1], both[1])]
            keeps = texts == ["1 a", " a"] and self.encode_alone("a")[0] != both[1]
            self._anchors = [] if keeps else [(anchor, self.encode_alone(anchor)[0]) for anchor in ANCHORS]
        return self._anchors


class ControlTokens:
    """The control tokens of a tokenizer and a chat template: special tokens, and added tokens that the template writes.

    In the text of a message they would end it, or begin another. ``marked`` replaces them by marks, which a template passes
    on; ``encode`` encodes each mark as the ordinary text of its token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str) -> None:
        self.tokenizer, self._text = tokenizer, Continuation(tokenizer)
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        names = {*tokenizer.all_special_tokens, *(name for name, special in added.items() if special or name in template)}
        longest = sorted((name for name in names if name.strip()), key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        self._mark_of = {name: f"7{index:03}{'7305816942' * 2}{index:03}7" for index, name in enumerate(longest)}
        self._name_of = {mark: name for name, mark in self._mark_of.items()}
        self._marks = re.compile(f"({'|'.join(self._name_of) or '(?!)'})")

    def first_in(self, value: Any) -> str | None:
        """The first control token in the text of a value; None if there is none."""
        for text in _texts(value):
            if match := self._pattern.search(text):
                return match.group()
        return None

    def marked(self, value: Any) -> Any:
        """A value with marks in place of control tokens."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._mark_of[match.group()], value)
        if isinstance(value, Mapping):
            return {key: part if key == "role" else self.marked(part) for key, part in value.items()}
        return [self.marked(part) for part in value] if isinstance(value, (list, tuple)) else value

    def encode(self, text: str, follows: bool = False) -> tuple[list[int], list[Span] | None]:
        """The ids of a rendered text with marks, and the characters of each; None for tokenizers without offsets.

        follows   whether other text precedes it
        """
        ids: list[int] = []
        spans: list[Span] = []
        position = 0
        for piece in self._marks.split(text):
            if piece in self._name_of:
                own = self._as_text(self._name_of[piece])
                offsets: list[Span] | None = [(0, len(piece))] * len(own)
            else:
                own, offsets = (self._text.encode if follows or position else self._text.encode_alone)(piece)
            ids += own
            spans += [(position + start, position + end) for start, end in offsets or ()]
            position += len(piece)
        return ids, spans if len(spans) == len(ids) else None

    def _as_text(self, name: str) -> list[int]:
        """The ids of a control token's name as text: its first character apart, so that the tokenizer can't match it."""
        ids = [i for part in (name[:1], name[1:]) for i in self._text.encode(part)[0]]
        if self.tokenizer.convert_tokens_to_ids(name) in ids and name != self.tokenizer.unk_token:
            raise SurefootError(f"the tokenizer can't encode the control token {name!r} as text; remove it from the row")
        return ids


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def changed_span(text: str, others: Sequence[str]) -> Span:
    """The characters of a text in which it differs from all others, which differ from each other at both ends."""
    start = min(_shared(text, other) for other in others)
    end = min(_shared(text[start:][::-1], other[start:][::-1]) for other in others)
    return start, len(text) - end


def _shared(first: str, second: str) -> int:
    """The length of the common beginning."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle)
    return low


def tokens_within(spans: Sequence[Span], characters: Iterable[Span], inside: bool) -> list[bool]:
    """Which tokens are in some of the characters: those that begin there (``inside``), or all that touch them."""
    ranges = list(characters)
    return [
        any(first <= start < last if inside else start < last and end > first for first, last in ranges) for start, end in spans
    ]
