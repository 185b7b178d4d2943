"""The order in which rows are read, and batches: padded on a side, or packed without padding between prompt and response."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
from torch import Tensor

from surefoot.core.seeding import stream
from surefoot.errors import SurefootError
from surefoot.ranks.collectives import rank, world_size


class EpochSampler:
    """An endless sampler over ``count`` rows, with a new order for each epoch. Its state is two numbers, so it resumes exactly.

    Each of several ranks takes every n-th of the next rows; together they read the rows of one process.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self.epoch, self.position = 0, 0
        self._order = self._order_of(0)

    def next(self, rows: int) -> list[int]:
        """This rank's share of the next ``rows`` rows. The next epoch begins within the same batch.

        Raises SurefootError if a rank would get none, because the others would wait for it.
        """
        if rows < world_size():
            raise SurefootError(f"{rows} rows in each batch: too few for {world_size()} ranks; give at least one row per rank")
        taken: list[int] = []
        while len(taken) < rows:
            if self.position == self.count:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            end = min(self.count, self.position + rows - len(taken))
            taken += self._order[self.position : end]
            self.position = end
        return taken[rank() :: world_size()]

    def first(self, rows: int) -> list[int]:
        """The rows that all ranks together read first, each once: all of them from one epoch on."""
        return self._order_of(0)[:rows]

    @property
    def epochs(self) -> float:
        """Passes over the rows so far."""
        return self.epoch + self.position / self.count

    def _order_of(self, epoch: int) -> list[int]:
        order: list[int] = torch.randperm(self.count, generator=stream(self.seed, f"order {epoch}")).tolist()
        return order

    def state_dict(self) -> dict[str, Any]:
        """The position, for checkpoints."""
        return {"epoch": self.epoch, "place": self.position, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        self.epoch, self.position = index(state["epoch"]), index(state["place"])
        if not 0 <= self.position <= self.count:
            raise ValueError(f"place={self.position}: of {self.count} rows")
        self._order = self._order_of(self.epoch)


class FromData:
    """What has read the rows up to a position, which is all of its state."""

    sampler: EpochSampler

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self.sampler.load_state_dict(state)


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Prompts as one batch.   ids [B, P] and mask [B, P], True where real; the last column is real in every row"""
    return _padded(rows, pad, left=True)


def right_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Responses as one batch.   ids [B, T] and mask [B, T], True where real"""
    return _padded(rows, pad, left=False)


def positions(mask: Tensor) -> Tensor:
    """Position ids from the mask: the first real token has 0.   [B, L] -> [B, L]"""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _padded(rows: Sequence[Sequence[int]], pad: int, left: bool) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(len(row))
        ids[number, place] = torch.tensor(row, dtype=torch.int64)
        mask[number, place] = True
    return ids, mask


@dataclass(frozen=True)
class PackedBatch:
    """B rows of L tokens, of which K were sampled by the policy. Real tokens begin at column 0.

    Separate padding would cost the longest prompt plus the longest response; packed, a batch costs its longest row. Padding
    follows the real tokens, where a causal model can't see it, so results don't depend on it, and positions count from 0.
    """

    ids: Tensor
    """[B, L]; the pad token follows a row's real tokens"""
    real: Tensor
    """[B, L] True at real tokens"""
    last: Tensor
    """[B] column of each row's last real token"""
    rows: Tensor
    """[K] row of each sampled token"""
    steps: Tensor
    """[K] its index in the response, 0 … T − 1"""
    before: Tensor
    """[K] column of the token before it, whose logits predict it"""


def around_switch(
    batch: PackedBatch, rows: Tensor, columns: Tensor, switch: int | None
) -> Iterator[tuple[Tensor, Tensor, PackedBatch]]:
    """The places (row, column) of a batch in parts that a model reads with one set of frequencies each.

    switch  a text of more tokens than this has other frequencies (see ``switch_of``); None: there is one part

    A place is read as the end of a text of its own, as when it was sampled: up to the switch in the first part, past it in the
    second. Yields the indices of a part's places, the rows that it reads, and these as a batch.   [K], [K] -> [k], [b]
    """
    if switch is None or batch.ids.shape[1] <= switch:
        everything = torch.arange(len(rows), device=rows.device), torch.arange(len(batch.ids), device=rows.device)
        yield *everything, replace(batch, rows=rows, before=columns)
        return
    near = columns < switch
    for part, width in ((near, switch), (~near, batch.ids.shape[1])):
        if bool(part.any()):
            used, local = torch.unique(rows[part], return_inverse=True)
            shorter = {"ids": batch.ids[used, :width], "real": batch.real[used, :width], "rows": local}
            yield part.nonzero().squeeze(-1), used, replace(batch, **shorter, last=batch.last[used], before=columns[part])


def read_mask(mask: Tensor) -> Tensor:
    """True up to the last kept token of each response, including tokens between kept ones.   [B, T] -> [B, T]"""
    return mask.bool().flip(-1).cumsum(-1).flip(-1) > 0


def row_lengths(inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """Real tokens of each row, prompt and response.   [B]"""
    return inputs["prompt_mask"].bool().sum(-1) + read_mask(mask).sum(-1)


def pack_batch(inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor, pad_id: int) -> PackedBatch:
    """Pack prompts and responses without padding between them.

    inputs   "prompt" [B, P] and "prompt_mask" [B, P], padding anywhere
    actions  [B, T]
    mask     [B, T] True at the policy's own tokens. Other tokens before the last of them (a tool's, a user's) are read,
             but not scored; everything after it is padding

    Raises SurefootError if a prompt has no token: nothing would predict the first token of its response.
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
