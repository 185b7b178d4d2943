"""Sums across ranks. With one process, or without torch.distributed, each is the identity.

Losses are divided by global counts, so gradients are *summed*: means of means would weigh ranks, not samples.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.functional import Moments, merge_moments


def rank() -> int:
    """Which of the ranks this process is, from 0; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def total(number: int, like: Tensor) -> int:
    """The sum of a count over ranks, exchanged on the device of ``like``."""
    return int(all_sum(like.new_tensor(number, dtype=torch.int64)))


def all_max(tensor: Tensor) -> Tensor:
    """The elementwise maximum of a tensor over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def merge_across_ranks(moments: Moments) -> Moments:
    """Moments of the union of all ranks' selections, the same on every rank bit for bit."""
    if world_size() == 1:
        return moments
    mine = torch.stack([part.expand_as(moments.mean) for part in moments])
    everyone = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(everyone, mine)
    return functools.reduce(merge_moments, (Moments(*row) for row in everyone))
