"""The order in which rows are read, and batches of prompts and responses without padding between."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from surefoot.core.distributed import rank, world_size
from surefoot.core.seeding import stream
from surefoot.errors import SurefootError


class EpochSampler:
    """An endless walk over ``count`` rows. Where it stands is two numbers, so that it resumes exactly.

    With several ranks each takes every so-manieth of the rows that come next; together they walk as one process would.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self.epoch, self.place = 0, 0
        self._order = self._order_of(0)

    def next(self, rows: int) -> list[int]:
        """This rank's share of the next ``rows`` rows. An epoch's end is no break: the next one begins in the same batch.

        Raises SurefootError where a rank would get none, for then the others would wait for it.
        """
        if rows < world_size():
            raise SurefootError(f"{rows} rows in each batch: too few for {world_size()} ranks; take at least one for each")
        taken: list[int] = []
        while len(taken) < rows:
            if self.place == self.count:
                self.epoch, self.place = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            end = min(self.count, self.place + rows - len(taken))
            taken += self._order[self.place : end]
            self.place = end
        return taken[rank() :: world_size()]

    @property
    def epochs(self) -> float:
        """Passes over the rows so far."""
        return self.epoch + self.place / self.count

    def _order_of(self, epoch: int) -> list[int]:
        order: list[int] = torch.randperm(self.count, generator=stream(self.seed, f"order {epoch}")).tolist()
        return order

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"epoch": self.epoch, "place": self.place, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.epoch, self.place = index(state["epoch"]), index(state["place"])
        if not 0 <= self.place <= self.count:
            raise ValueError(f"place={self.place}: of {self.count} rows")
        self._order = self._order_of(self.epoch)


@dataclass(frozen=True)
class PackedBatch:
    """B rows of L tokens with K kept decisions among them."""

    ids: Tensor
    """[B, L]; behind a row's real tokens stands the pad token"""
    real: Tensor
    """[B, L] True at real tokens"""
    last: Tensor
    """[B] where each row's last real token is"""
    rows: Tensor
    """[K] the row of each decision"""
    steps: Tensor
    """[K] its place in the response, 0 … T − 1"""
    before: Tensor
    """[K] where in ``ids`` the token before it is: what the model says there is about this decision"""


def read_mask(mask: Tensor) -> Tensor:
    """What is read of each response: all up to its last kept token, tokens between kept ones included.   [B, T] -> [B, T]"""
    return mask.bool().flip(-1).cumsum(-1).flip(-1) > 0


def row_lengths(inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """How many real tokens each row has, prompt and response.   [B]"""
    return inputs["prompt_mask"].bool().sum(-1) + read_mask(mask).sum(-1)


def pack_batch(inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor, pad_id: int) -> PackedBatch:
    """Side by side what is real.

    inputs   "prompt" [B, P] and "prompt_mask" [B, P], padding anywhere
    actions  [B, T]
    mask     [B, T] True at the policy's own tokens. Other tokens before the last of them (a tool's, a user's) are read too,
             but not scored; what comes after it is padding

    Raises SurefootError where a prompt has no token: nothing would say how likely the first of its response is.
    """
    prompted, kept = inputs["prompt_mask"].bool(), mask.bool()
    real = torch.cat([prompted, read_mask(mask)], -1)
    tokens = torch.cat([inputs["prompt"], actions], -1)
    if not bool(prompted.any(-1).all()):
        row = int((~prompted.any(-1)).nonzero()[0])
        raise SurefootError(f"prompt: row {row} of the batch has no token; begin empty prompts with one, such as the EOS token")
    place = real.cumsum(-1) - 1
    last = place[:, -1]
    width = int(last.max()) + 1
    ids = torch.full((len(tokens), width), pad_id, dtype=torch.long, device=tokens.device)
    where = real.nonzero(as_tuple=True)
    ids[where[0], place[where]] = tokens[where].long()
    rows, steps = kept.nonzero(as_tuple=True)
    return PackedBatch(
        ids=ids,
        real=torch.arange(width, device=last.device) <= last.unsqueeze(-1),
        last=last,
        rows=rows,
        steps=steps,
        before=place[rows, prompted.shape[-1] + steps] - 1,
    )
