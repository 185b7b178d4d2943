"""Demonstrations as tensors, their likelihood under a policy, and the loss on them that mixing adds to PPO."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from surefoot.core.minibatches import evened, groups_by_length, select_rows
from surefoot.core.rollout import Policy, map_tensors
from surefoot.functional import aggregate
from surefoot.language.data import datasets as data
from surefoot.language.data.batches import EpochSampler, FromData, left_padded, right_padded, row_lengths
from surefoot.language.data.cache import lengths_of
from surefoot.language.data.rows import rows_hash
from surefoot.language.models.policy import LanguagePolicy
from surefoot.language.models.policy.passes import in_micro_batches
from surefoot.ranks.collectives import all_sum, exchanging
from surefoot.sharding import is_sharded

Batch = tuple[dict[str, Tensor], Tensor, Tensor]
"""inputs of the policy, actions [B, T], mask [B, T]"""
RowTensors = Callable[[Sequence[int]], Batch]
"""makes the tensors of some rows, by index"""


class Rows:
    """The rows of a file: any of them as tensors, and a hash of all.

    hash      of their content
    lengths   tokens of each row; of a pair, the longer answer's
    trained   the number of them that are trained
    """

    def __init__(self, tensors: RowTensors, hash: str, lengths: Sequence[int], trained: Sequence[int]) -> None:
        self.count, self.tensors, self.hash = len(lengths), tensors, hash
        self.lengths, self.trained = lengths, trained

    def sizes(self, count: int) -> tuple[int, int, int]:
        """Of the first ``count`` rows, or all if fewer: how many, and the most tokens and trained tokens in a row."""
        lengths, trained = self.lengths[:count], self.trained[:count]
        return len(lengths), max(lengths, default=0), max(trained, default=0)


def batches(tensors: RowTensors, count: int, batch: int, device: str) -> Iterator[Batch]:
    """The first ``count`` rows on the device, at most ``batch`` at a time."""
    for start in range(0, count, batch):
        yield map_tensors(lambda x: x.to(device), tensors(range(start, min(start + batch, count))))


def demonstration_rows(demonstrations: data.Demonstrations, pad_id: int) -> Rows:
    """The rows of demonstrations."""
    facts = demonstrations.facts
    return Rows(
        partial(demonstration_tensors, demonstrations, pad_id=pad_id),
        facts.once("hash", lambda: rows_hash(zip(demonstrations.ids, demonstrations.trained, strict=True))),
        lengths_of(demonstrations.ids),
        facts.once("trained", lambda: [sum(trained) for trained in demonstrations.trained]),
    )


def demonstration_tensors(demonstrations: data.Demonstrations, rows: Sequence[int], pad_id: int) -> Batch:
    """The tokens before the first trained one as the prompt, the rest as the response; the mask is True where trained."""
    ids, trained = demonstrations.ids, demonstrations.trained
    starts = [trained[row].index(True) for row in rows]
    prompt, prompt_mask = left_padded([ids[row][:start] for row, start in zip(rows, starts, strict=True)], pad_id)
    actions, _ = right_padded([ids[row][start:] for row, start in zip(rows, starts, strict=True)], pad_id)
    mask, _ = right_padded([trained[row][start:] for row, start in zip(rows, starts, strict=True)], 0)
    return {"prompt": prompt, "prompt_mask": prompt_mask}, actions, mask.bool()


@torch.no_grad()
def row_log_probs(
    policy: Policy, rows: Rows, count: int, batch: int, device: str, tokens: int | None = None, size: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Log-probabilities and mask, both [B, T], of the first ``count`` rows, padded in batches of ``batch``.

    A forward pass has at most ``tokens`` tokens and ``size`` rows.
    """
    for inputs, actions, mask in batches(rows.tensors, min(count, rows.count), batch, device):
        yield in_micro_batches(policy, inputs, actions, mask, tokens, size, policy.costs(inputs, mask)).log_probs, mask


class SftLoss(FromData):
    """The loss −mean log π on the next demonstrations, added to every update (PPO-ptx).

    Ouyang et al. 2022 (arXiv 2203.02155), section 3.5, with rows of the pretraining data.

    policy        the trained model; its passes are those of SFT
    rows          the demonstrations
    batch         demonstrations per update, on all ranks together
    coefficient   of the mean −log π per token in the loss
    tokens, size  of a backward pass at most, padding included; the gradient does not depend on them
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
        self.sampler = EpochSampler(rows.count, seed)

    def add_gradient(self) -> dict[str, float]:
        """Add coefficient × the gradient of the mean over all ranks' tokens; return the mean as ``sft_loss``."""
        batch: Batch = map_tensors(lambda x: x.to(self.device), self.rows.tensors(self.sampler.next(self.batch)))
        mask = batch[2]
        count = all_sum(mask.sum().float()).clamp(min=1)
        total = torch.zeros((), device=mask.device)
        for (inputs, actions, kept), counts in evened(self._parts(batch), batch, is_sharded(self.policy)):
            with self.policy.as_in_sft(), exchanging():
                log_probs = self.policy(inputs, actions, kept).log_probs
                loss = aggregate(-log_probs, kept, "token-mean", count) * counts
                (self.coefficient * loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return {"sft_loss": float(all_sum(total))}

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        if self.tokens is None and self.size is None:
            yield batch
            return
        costs: Tensor = row_lengths(batch[0], batch[2])
        for group in groups_by_length(costs, self.tokens, self.size):
            yield select_rows(batch, group)
