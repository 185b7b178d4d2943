"""What ends a response: EOS, and stop texts; and the text that a response has without its end.

A stop text that is a special token ends a response by its id. Others are searched for in the decoded text, which has those
special tokens that they contain.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from surefoot.language.data.tokens import Tokens


@dataclass(frozen=True)
class Ends:
    """The ends of a tokenizer's responses.

    stop   texts that end a response, besides EOS
    """

    tokens: "Tokens"
    stop: tuple[str, ...] = ()

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The ids that end a response: EOS, and stop texts that are special tokens."""
        found = map(self.tokens.special_id, self.stop)
        return tuple(dict.fromkeys([*self.tokens.eos_ids, *(token for token in found if token is not None)]))

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``sample`` that come from the tokenizer and the stop texts."""
        return {"eos_ids": self.ids, "pad_id": self.tokens.pad_id, "stop": self.stop, "decode": self.decode}

    @cached_property
    def mixed(self) -> tuple[str, ...]:
        """The stop texts that contain special tokens, and more."""
        within = (word for word in self.stop if self.tokens.special_in(word) is not None)
        return tuple(word for word in within if self.tokens.special_id(word) is None)

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """The special tokens that no such stop text contains."""
        name = self.tokens.tokenizer.convert_ids_to_tokens
        return frozenset(i for i in self.tokens.special_ids if not any(str(name(i)) in word for word in self.mixed))

    def decode(self, ids: Sequence[int]) -> str:
        """The text in which stop texts are searched: without special tokens, but for those that stop texts contain."""
        return self.tokens.decode([i for i in ids if i not in self._hidden], special=True)

    def without_end(self, ids: Sequence[int]) -> list[int]:
        """The ids of a response without an id that ends it."""
        return list(ids[:-1] if ids and ids[-1] in self.ids else ids)

    def text(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of a response, without what ends it.

        special   keep special tokens
        """
        own = self.without_end(ids)
        searched, whole = self.decode(own), self.tokens.decode(own, special)
        kept = cut_at_stop(searched, self.stop)
        if whole == searched or kept == searched:
            return kept if whole == searched else whole
        count = bisect_right(range(len(own)), len(kept), key=lambda count: len(self.decode(own[:count]))) - 1
        return self.tokens.decode(own[:count], special) + kept[len(self.decode(own[:count])) :]  # and a part of a token

    def loses_special(self, ids: Sequence[int]) -> bool:
        """Whether the text of a response lacks special tokens that are in it, besides its end."""
        has_some = not self.tokens.special_ids.isdisjoint(self.without_end(ids))
        return has_some and self.text(ids) != self.text(ids, special=True)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=None)]


class EndDetector:
    """Detects the end of responses: EOS by a table over the vocabulary, stop strings by decoding."""

    def __init__(
        self,
        eos_ids: Sequence[int],
        stop: Sequence[str],
        decode: Callable[[Sequence[int]], str] | None,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self.is_eos = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.is_eos[list(eos_ids)] = True
        self.eos_ids, self.stop, self.decode = frozenset(eos_ids), stop, decode
        self.may_end: dict[int, bool] = {}

    def reached(self, actions: Tensor, slots: Tensor, new: int = 1) -> Tensor | None:
        """[n] the length of the slot's response if one of its last ``new`` tokens ends it, else 0; None if none ends.

        actions [t, N], of which ``slots`` [n] are the columns
        """
        first = len(actions) - new
        done = self.is_eos[actions[first:].index_select(1, slots)]
        if self.stop:
            done |= torch.tensor(self.stopped(actions, slots.tolist(), first), device=done.device)
        ended = done.any(0)
        return torch.where(ended, first + 1 + done.int().argmax(0), 0) if bool(ended.any()) else None

    def stopped(self, actions: Tensor, slots: list[int], first: int) -> list[list[bool]]:
        """Whether the decoded text of each slot's response contains a stop string, up to each token from ``first`` on."""
        return [
            [self.may_complete(tokens[slot]) and self.has_stop(actions[: step + 1, slot].tolist()) for slot in slots]
            for step, tokens in enumerate(actions[first:].tolist(), first)
        ]

    def length(self, ids: Sequence[int]) -> int:
        """The tokens of a response up to its end by EOS or a stop string; 0 if it has none."""
        for place, token in enumerate(ids, 1):
            if token in self.eos_ids or (self.stop and self.may_complete(token) and self.has_stop(ids[:place])):
                return place
        return 0

    def has_stop(self, ids: Sequence[int]) -> bool:
        """Whether the decoded text contains a stop string."""
        assert self.decode is not None
        text = self.decode(ids)
        return any(word in text for word in self.stop)

    def may_complete(self, token: int) -> bool:
        """False if the token's own text rules out that a stop string ends in it; this saves decoding the response.

        Part of a character decodes to U+FFFD, and a decoder may strip spaces at the edges; such tokens always return True.
        """
        if token not in self.may_end:
            assert self.decode is not None
            text = self.decode([token])
            ends = any(word[-1].isspace() or word[-1] in text for word in self.stop)
            self.may_end[token] = ends or not text.strip() or "\ufffd" in text
        return self.may_end[token]
