"""Sums across ranks. With one process, or without torch.distributed, each is the identity.

Losses are divided by global counts, so gradients are *summed*: means of means would weigh ranks, not samples.

A rank that dies or stops would keep the others waiting, by PyTorch's own default for half an hour. Ranks that were ``joined``
wait no longer than they were asked to, and every exchange that fails is a SurefootError of one line.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.errors import SurefootError, cause_of
from surefoot.functional import Moments, merge_moments

LAUNCHED = (
    ("RANK", "WORLD_SIZE", "start one process, without torchrun"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "start one process: srun --ntasks=1"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "start one process, without mpirun"),
)
"""variables that say which process this is and how many there are, and what to do instead.

Launchers may be nested, so any that says several counts. SLURM_NTASKS is no such size: a batch script of several tasks has
it, and is one process; srun sets SLURM_STEP_NUM_TASKS."""


def rank() -> int:
    """Which of the ranks this process is, from 0; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_alone(folder: Path) -> None:
    """Raise SurefootError where a launcher has started this program several times: each would train the same run."""
    field, count, remedy = "torch.distributed", world_size(), "call init_process_group only in a program of your own"
    for which, size, instead in LAUNCHED if count == 1 else ():
        if which in os.environ and (told := os.environ.get(size, "")).isdecimal() and int(told) > 1:
            field, count, remedy = size, int(told), instead
            break
    if count > 1:
        raise SurefootError(
            f"{field}={count}: {count} processes would each train the same run into {folder}; {remedy} (several ranks: "
            "docs/how-to/several-machines.md)"
        )


@contextmanager
def joined(backend: str = "gloo", patience: float = 600.0) -> Iterator[int]:
    """Within, this process and the others that ``torchrun`` has started are ranks that train together; this one's number.

    patience   seconds that an exchange waits for the slowest rank: more than any of them takes to collect

    Raises SurefootError where the others don't come in that time.
    """
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=patience))
    except (RuntimeError, ValueError) as error:
        raise SurefootError(
            f"ranks: the others did not come within {patience:g} s ({cause_of(error)}); start all with torchrun"
        ) from error
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


@contextmanager
def _exchanging() -> Iterator[None]:
    """What the backend raises within becomes one line."""
    try:
        yield
    except RuntimeError as error:
        raise SurefootError(
            f"rank {rank()} of {world_size()}: another rank has died, or did not answer in time ({cause_of(error)}); see what "
            "it printed last, then start all ranks again"
        ) from error


def all_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor over ranks, in place."""
    if world_size() > 1:
        with _exchanging():
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def total(number: int, like: Tensor) -> int:
    """The sum of a count over ranks, exchanged on the device of ``like``."""
    return int(all_sum(like.new_tensor(number, dtype=torch.int64)))


def all_max(tensor: Tensor) -> Tensor:
    """The elementwise maximum of a tensor over ranks, in place."""
    if world_size() > 1:
        with _exchanging():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def merge_across_ranks(moments: Moments) -> Moments:
    """Moments of the union of all ranks' selections, the same on every rank bit for bit."""
    if world_size() == 1:
        return moments
    mine = torch.stack([part.expand_as(moments.mean) for part in moments])
    everyone = [torch.empty_like(mine) for _ in range(world_size())]
    with _exchanging():
        dist.all_gather(everyone, mine)
    return functools.reduce(merge_moments, (Moments(*row) for row in everyone))
