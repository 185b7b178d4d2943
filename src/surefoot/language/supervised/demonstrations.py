"""Demonstrations as tensors, and how likely a policy finds them: learned from in SFT, watched in what comes after."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from surefoot.core.rollout import Policy, map_tensors
from surefoot.language.data import datasets as data
from surefoot.language.data.rows import read_rows, rows_hash
from surefoot.language.data.tokens import Tokens, left_padded, right_padded
from surefoot.language.models.policy import in_micro_batches

Batch = tuple[dict[str, Tensor], Tensor, Tensor]
"""inputs of the policy, actions [B, T], mask [B, T]"""


class Rows:
    """What some of a file's rows are as tensors, and by what all of them are recognised.

    lengths   tokens of each row; of a pair, the longer answer's
    trained   those of them that are trained
    notes     a line for each reason why something of the file is not among them
    """

    def __init__(
        self,
        tensors: Callable[[Sequence[int]], Batch],
        content: Iterable[object],
        lengths: Sequence[int],
        trained: Sequence[int],
        notes: Sequence[str] = (),
    ) -> None:
        self.count, self.tensors, self.print = len(lengths), tensors, rows_hash(content)
        self.lengths, self.trained, self.notes = lengths, trained, notes

    def first(self, count: int) -> tuple[int, int, int]:
        """Of the first ``count`` rows, as far as there are so many: how many, and the most tokens and trained ones in a row."""
        lengths, trained = self.lengths[:count], self.trained[:count]
        return len(lengths), max(lengths, default=0), max(trained, default=0)


def demonstration_rows(path: str, tokens: Tokens, limit: int, said: str = "") -> Rows:
    """The demonstrations in a file that have at most ``limit`` tokens; ``said`` is how a message says that (``data.room``).

    Raises SurefootError, with file and line, for what is not such a file, and when every row is too long.
    """
    shown = data.demonstrations(read_rows(path), tokens, limit, said)
    return Rows(
        partial(demonstration_tensors, shown, pad_id=tokens.pad_id),
        zip(shown.ids, shown.trained, strict=True),
        [len(ids) for ids in shown.ids],
        [sum(trained) for trained in shown.trained],
        data.drop_notes(path, limit, shown.dropped, unused=shown.unused),
    )


def demonstration_tensors(shown: data.Demonstrations, rows: Sequence[int], pad_id: int) -> Batch:
    """All before the first trained token as the prompt, the rest as the response; masked True where trained."""
    starts = [shown.trained[row].index(True) for row in rows]
    prompt, prompt_mask = left_padded([shown.ids[row][:start] for row, start in zip(rows, starts, strict=True)], pad_id)
    actions, _ = right_padded([shown.ids[row][start:] for row, start in zip(rows, starts, strict=True)], pad_id)
    mask, _ = right_padded([shown.trained[row][start:] for row, start in zip(rows, starts, strict=True)], 0)
    return {"prompt": prompt, "prompt_mask": prompt_mask}, actions, mask.bool()


@torch.no_grad()
def scored(
    policy: Policy, rows: Rows, count: int, batch: int, device: str, tokens: int | None = None, size: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Log-probabilities and mask, both [B, T], of the first ``count`` rows, padded in batches of ``batch``.

    At most ``tokens`` tokens and ``size`` rows are read at a time.
    """
    count = min(count, rows.count)
    for start in range(0, count, batch):
        inputs, actions, mask = map_tensors(lambda x: x.to(device), rows.tensors(range(start, min(start + batch, count))))
        yield in_micro_batches(policy, inputs, actions, mask, tokens, size, policy.costs(inputs, mask)).log_probs, mask
