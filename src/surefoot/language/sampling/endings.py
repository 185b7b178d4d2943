"""Where a response ends: with EOS, or with the token that completes a stop string."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Ending:
    """Whether responses are at their end: EOS by a table over the vocabulary, stop strings by decoding."""

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
        self.stop, self.decode = stop, decode
        self.may_end: dict[int, bool] = {}

    def reached(self, tokens: Tensor, actions: Tensor, slots: Tensor) -> Tensor | None:
        """[n] True where the response in a slot ends with this token, or None where none does.   tokens [n], actions [t, N]"""
        done = self.is_eos[tokens]
        if self.stop:
            done |= torch.tensor(self.stopped(tokens.tolist(), actions, slots.tolist()), device=done.device)
        return done if bool(done.any()) else None

    def stopped(self, tokens: list[int], actions: Tensor, slots: list[int]) -> list[bool]:
        """Whether the decoded text of each slot's response holds a stop string."""
        assert self.decode is not None
        found = []
        for token, slot in zip(tokens, slots, strict=True):
            text = self.decode(actions[:, slot].tolist()) if self.may_complete(token) else ""
            found.append(any(word in text for word in self.stop))
        return found

    def may_complete(self, token: int) -> bool:
        """False only where the token's own text shows that no stop string ends in it, which saves decoding the response.

        Part of a character decodes to U+FFFD, and a decoder may strip spaces at the edge: such tokens are always looked into.
        """
        if token not in self.may_end:
            assert self.decode is not None
            text = self.decode([token])
            ends = any(word[-1].isspace() or word[-1] in text for word in self.stop)
            self.may_end[token] = ends or not text.strip() or "\ufffd" in text
        return self.may_end[token]
