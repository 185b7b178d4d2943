"""Rows of a rollout with their credit, in random order, minibatches and micro-batches."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from surefoot.core.algorithms import Objective
from surefoot.core.objective import Batch
from surefoot.core.rollout import Credit, Rollout, Shared, map_tensors
from surefoot.errors import SurefootError
from surefoot.functional import Moments, covariance_terms, largest_share, masked_moments, whiten
from surefoot.ranks.collectives import all_max, all_sum, exchange, in_float64, merge_across_ranks, rank, world_size

Rows = TypeVar("Rows")


def rows_of(rollout: Rollout, credit: Credit, numbered: bool = False) -> Batch:
    """The rows to shuffle: kept single steps [N], or whole rows [N, T] with their mask. ``numbered`` sets ``flat_index``."""
    mask = rollout.mask
    batch = Batch(
        inputs=rollout.inputs,
        actions=rollout.actions,
        mask=mask,
        old_log_probs=rollout.old_log_probs,
        advantages=credit.advantages,
        returns=credit.returns,
        old_values=rollout.values,
        old_distribution=rollout.old_distribution,
        ref_log_probs=rollout.ref_log_probs,
        behaviour_log_probs=rollout.behaviour_log_probs,
        flat_index=torch.arange(mask.numel(), device=mask.device).view(mask.shape) if numbered else None,
    )
    if rollout.unit == "row":
        return batch
    kept = mask.reshape(-1).nonzero().squeeze(-1)
    steps: Batch = map_tensors(lambda x: x.flatten(0, 1).index_select(0, kept), batch)
    return Batch(**{**vars(steps), "mask": None})


def shuffled(batch: Batch, parts: int, order: Tensor) -> Iterator[Batch]:
    """The rows in an order, in ``parts`` nearly equal parts."""
    order = order.to(batch.advantages.device)
    if len(order) < parts and world_size() > 1:  # the other ranks would wait for one that skips a minibatch
        raise SurefootError(f"objective.reuse.minibatches={parts}: this rank has only {len(order)} rows; use fewer")
    # One gather for the whole pass; the parts are views of it.
    whole = map_tensors(lambda x: x.index_select(0, order), batch) if parts > 1 else batch
    size, larger = divmod(len(order), parts)
    start = 0
    for part in range(parts):
        end = start + size + (part < larger)
        if end > start:
            yield row_range(whole, start, end)
        start = end


def random_order(count: int, generator: torch.Generator) -> Tensor:
    """A random order of ``count`` rows, drawn on the CPU.   [count]

    With several ranks, each draws one number from ``generator``, whatever its ``count``. The generator then has the same state
    on all ranks, so one checkpoint is enough.
    """
    if world_size() > 1:
        drawn = int(torch.randint(2**62, (), generator=generator))
        generator = torch.Generator().manual_seed(drawn)
    return torch.randperm(count, generator=generator)


def micro_batches(
    batch: Batch, size: int | None, tokens: int | None = None, costs: Tensor | None = None, shared: Shared | None = None
) -> Iterator[Batch]:
    """Micro-batches of at most ``size`` consecutive rows, or with ``tokens`` those of ``groups_by_length``.

    ``costs`` [rows] is the number of tokens of each row; None counts each row as one.
    """
    total = len(batch.advantages)
    if tokens is not None:
        costs = torch.ones(total, dtype=torch.long) if costs is None else costs
        for part in groups_by_length(costs, tokens, size, shared):
            yield select_rows(batch, part)
        return
    step = size or total
    for start in range(0, total, step):
        yield row_range(batch, start, min(start + step, total)) if step < total else batch


def evened(parts: Iterable[Rows], whole: Rows, sharded: bool) -> Iterator[tuple[Rows, bool]]:
    """The micro-batches of some rows, and whether each counts. The passes of a sharded model are exchanges, so a rank with
    fewer micro-batches than another repeats a row that does not count.
    """
    spare = 0
    if sharded:
        parts = list(parts)
        spare = int(all_max(torch.tensor(len(parts)))) - len(parts)
    for part in parts:
        yield part, True
    for _ in range(spare):
        yield map_tensors(lambda x: x[:1], whole), False


def groups_by_length(costs: Tensor, tokens: int | None, size: int | None = None, shared: Shared | None = None) -> list[Tensor]:
    """Groups of rows of similar length, longest first, with rows × longest row ≤ ``tokens`` and at most ``size`` rows.

    costs   tokens of each row; 0 counts as 1   [rows]
    shared  beginnings that are read once: then rows with the same one stay together as far as they fit, and the tokens of a
            group, without padding, are at most ``tokens``

    This keeps padding short, and the largest group comes first, so that a lack of memory shows at once. A row longer than
    ``tokens`` forms its own group. Returns the row indices of each group; every row is in exactly one.
    """
    tokens = sys.maxsize if tokens is None else tokens
    if shared is not None:
        return _groups_by_beginning(costs, tokens, size, shared)
    ordered, order = costs.detach().cpu().sort(descending=True, stable=True)
    groups, start = [], 0
    while start < len(order):
        most = max(1, tokens // max(1, int(ordered[start])))
        end = min(start + min(most, size or most), len(order))
        groups.append(order[start:end])
        start = end
    return groups


def _groups_by_beginning(costs: Tensor, tokens: int, size: int | None, shared: Shared) -> list[Tensor]:
    """Rows with the same beginning one after another, those of the longest row first, cut where ``tokens`` or ``size`` ends."""
    lengths, of_row, saved = costs.tolist(), shared.group.tolist(), shared.saved.tolist()
    longest: dict[int, int] = {}
    for length, group in zip(lengths, of_row, strict=True):
        longest[group] = max(length, longest.get(group, 0))
    order = sorted(range(len(lengths)), key=lambda row: (-longest[of_row[row]], of_row[row], -lengths[row]))
    groups: list[list[int]] = []
    used = 0
    for place, row in enumerate(order):
        follows = place > 0 and of_row[order[place - 1]] == of_row[row]
        more = lengths[row] - (saved[row] if follows else 0)
        if not groups or used + more > tokens or len(groups[-1]) == size:
            groups.append([])
            used, more = 0, lengths[row]
        groups[-1].append(row)
        used += more
    return [torch.tensor(group) for group in groups]


def select_rows(tree: Any, indices: Tensor) -> Any:
    """A copy of the rows ``indices`` of every tensor in a tree."""
    return map_tensors(lambda x: x.index_select(0, indices.to(x.device)), tree)


def row_range(batch: Batch, start: int, end: int) -> Batch:
    """Rows start … end − 1, as views."""
    part: Batch = map_tensors(lambda x: x[start:end], batch)
    return part


@dataclass(frozen=True)
class Minibatch:
    """Rows for one step, with what their loss needs of the rows of all ranks."""

    rows: Batch
    denominator: Tensor
    """of the loss's means   []"""
    moments: Moments | None
    """of the advantages; None unless each minibatch is normalised"""


def with_global_numbers(parts: Iterable[Batch], objective: Objective) -> list[Minibatch]:
    """The minibatches of a pass with their numbers over all ranks, which are exchanged for the whole pass at once."""
    parts = list(parts)
    if not parts:
        return []
    counts = all_sum(torch.stack([own_count(part, objective.aggregation) for part in parts])).clamp(min=1).unbind()
    moments: list[Moments] | list[None] = [None] * len(parts)
    if objective.normalise_advantages == "minibatch":
        own = [masked_moments(part.advantages, part.mask) for part in parts]
        every = merge_across_ranks(Moments(*(torch.stack(numbers) for numbers in zip(*own, strict=True))))
        moments = [Moments(*numbers) for numbers in zip(*every, strict=True)]
    return [Minibatch(*each) for each in zip(parts, counts, moments, strict=True)]


def advantage_moments(batch: Batch) -> Moments:
    """Mean and variance of the advantages over the kept entries on all ranks."""
    return merge_across_ranks(masked_moments(batch.advantages, batch.mask))


def normalised(batch: Batch, moments: Moments | None = None) -> Batch:
    """The batch with advantages of mean 0 and variance 1 over its kept entries on all ranks, their ``moments``."""
    moments = advantage_moments(batch) if moments is None else moments
    return Batch(**{**vars(batch), "advantages": whiten(batch.advantages, batch.mask, moments=moments)})


def global_count(batch: Batch, aggregation: str) -> Tensor:
    """The denominator of ``aggregate``: kept entries, or sequences with a kept entry, over all ranks.   []"""
    return all_sum(own_count(batch, aggregation)).clamp(min=1)


def own_count(batch: Batch, aggregation: str) -> Tensor:
    """This rank's part of ``global_count``.   []"""
    kept = torch.ones_like(batch.advantages) if batch.mask is None else batch.mask.to(batch.advantages.dtype)
    return kept.sum() if aggregation == "token-mean" else (kept.sum(-1) > 0).sum().to(kept.dtype)


def with_penalised(batch: Batch, fraction: float) -> Batch:
    """The batch with ``penalised``: of the kept entries on all ranks, the share ``fraction`` with the largest terms of the
    covariance of log π_old and advantage.

    A normalisation of the advantages would scale all terms alike, so these are the advantages before it.
    """
    assert batch.old_log_probs is not None, "a KL penalty needs a rollout with old_log_probs"
    kept = torch.ones_like(batch.advantages, dtype=torch.bool) if batch.mask is None else batch.mask.bool()
    mine = torch.stack([in_float64(batch.old_log_probs[kept]), in_float64(batch.advantages[kept])]).cpu()
    everyone = exchange(mine)
    chosen = largest_share(covariance_terms(*torch.cat(everyone, -1)), fraction)
    start = sum(x.shape[-1] for x in everyone[: rank()])
    of_rank = chosen[start : start + mine.shape[-1]]
    penalised = torch.zeros_like(kept).masked_scatter(kept, of_rank.to(kept.device))
    return replace(batch, penalised=penalised)
