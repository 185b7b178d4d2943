"""In which order rows are read: every one once per epoch, each epoch in an order of its own."""

from operator import index
from typing import Any

import torch

from surefoot.core.distributed import rank, world_size
from surefoot.core.seeding import stream
from surefoot.errors import SurefootError


class Walk:
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
