"""Demonstrations beside the reward: −mean log π of what they show, in every update (PPO-ptx).

Ouyang et al. 2022 (arXiv 2203.02155), section 3.5, where the rows are of the pretraining.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from surefoot.core.distributed import all_sum
from surefoot.core.minibatches import groups_by_length, select_rows
from surefoot.core.rollout import map_tensors
from surefoot.functional import aggregate
from surefoot.language.data.batches import EpochSampler, row_lengths
from surefoot.language.models.policy import LanguagePolicy
from surefoot.language.supervised.demonstrations import Batch, Rows

NAME = "sft_loss"


class Mixing:
    """The next rows of a walk over demonstrations for every step of the optimizer.

    policy        the model that is trained, at temperature 1 and without a critic, as in SFT
    rows          the demonstrations
    batch         of them per update, on all ranks together
    coefficient   what their mean −log π per token is multiplied by in the loss
    tokens, size  of a backward pass at most, padding included; no gradient depends on them
    """

    def __init__(
        self,
        policy: LanguagePolicy,
        rows: Rows,
        batch: int,
        coefficient: float,
        seed: int,
        device: str = "cpu",
        tokens: int | None = None,
        size: int | None = None,
    ) -> None:
        self.policy, self.rows, self.batch, self.coefficient, self.device = policy, rows, batch, coefficient, device
        self.tokens, self.size = tokens, size
        self.walk = EpochSampler(rows.count, seed)

    def add_gradient(self) -> dict[str, float]:
        """Add coefficient × the gradient of the mean over all ranks' tokens to what is there; tell the mean as ``sft_loss``."""
        batch: Batch = map_tensors(lambda x: x.to(self.device), self.rows.tensors(self.walk.next(self.batch)))
        mask = batch[2]
        count = all_sum(mask.sum().float()).clamp(min=1)
        total = torch.zeros((), device=mask.device)
        for inputs, actions, kept in self._parts(batch):
            loss = aggregate(-self.policy(inputs, actions, kept).log_probs, kept, "token-mean", count)
            (self.coefficient * loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return {NAME: float(all_sum(total))}

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        if self.tokens is None and self.size is None:
            yield batch
            return
        costs: Tensor = row_lengths(batch[0], batch[2])
        for group in groups_by_length(costs, sys.maxsize if self.tokens is None else self.tokens, self.size):
            yield select_rows(batch, group)

    def state_dict(self) -> dict[str, Any]:
        """Where the walk stands."""
        return self.walk.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.walk.load_state_dict(state)
