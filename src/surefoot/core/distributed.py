"""Ranks: their number, sums across them, and checks before training. With one process each sum is the identity.

Losses are divided by global counts, so gradients are *summed*: a mean of means would weight ranks, not samples.
A failed exchange is a SurefootError of one line; within ``process_group`` it fails after a timeout.
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


def rank() -> int:
    """The number of this process, from 0; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# ---- sums across ranks ----------------------------------------------------------------------------------------------


def exact_device(device: torch.device) -> torch.device:
    """The device for tensors in float64: the CPU if this one has no float64, as Apple's MPS."""
    return torch.device("cpu") if device.type == "mps" else device


def in_float64(x: Tensor) -> Tensor:
    """The tensor in float64, on its ``exact_device``."""
    return x.to(exact_device(x.device)).to(torch.float64)


def all_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor over ranks, in place."""
    if world_size() > 1:
        with _one_line_errors():
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def sum_count(number: int, like: Tensor) -> int:
    """The sum of a count over ranks, exchanged on the device of ``like``."""
    return int(all_sum(like.new_tensor(number, dtype=torch.int64)))


def all_max(tensor: Tensor) -> Tensor:
    """The elementwise maximum of a tensor over ranks, in place."""
    if world_size() > 1:
        with _one_line_errors():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def merge_across_ranks(moments: Moments) -> Moments:
    """Moments of the union of all ranks' selections, the same on every rank, bit for bit."""
    if world_size() == 1:
        return moments
    mine = torch.stack([part.expand_as(moments.mean) for part in moments])
    everyone = [torch.empty_like(mine) for _ in range(world_size())]
    with _one_line_errors():
        dist.all_gather(everyone, mine)
    return functools.reduce(merge_moments, (Moments(*row) for row in everyone))


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Raise SurefootError in place of the backend's errors."""
    try:
        yield
    except RuntimeError as error:
        raise SurefootError(
            f"rank {rank()} of {world_size()}: another rank has died, or did not answer in time ({cause_of(error)}); see what "
            "it printed last, then start all ranks again"
        ) from error


# ---- before training ------------------------------------------------------------------------------------------------


@contextmanager
def process_group(backend: str = "gloo", timeout: float = 600.0) -> Iterator[int]:
    """Join the processes that ``torchrun`` started as ranks that train together; gives this process's rank.

    timeout   seconds that an exchange waits for the slowest rank: more than any rank needs to collect a batch

    Raises SurefootError if the other ranks don't join in that time.
    """
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise SurefootError(
            f"ranks: the others did not join within {timeout:g} s ({cause_of(error)}); start all with torchrun"
        ) from error
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "start one process, without torchrun"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "start one process: srun --ntasks=1"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "start one process, without mpirun"),
)
"""for each launcher, the variables with the rank and the number of processes, and the remedy.

Launchers can be nested, so any of them counts. SLURM_NTASKS does not: a batch script with several tasks has it, and is one
process; srun sets SLURM_STEP_NUM_TASKS."""


def check_single_process(folder: Path) -> None:
    """Raise SurefootError if a launcher started several processes, each of which would train the same run."""
    field, count, remedy = "torch.distributed", world_size(), "call init_process_group only in your own training program"
    for rank_name, size_name, instead in LAUNCHERS if count == 1 else ():
        if rank_name in os.environ and (size := os.environ.get(size_name, "")).isdecimal() and int(size) > 1:
            field, count, remedy = size_name, int(size), instead
            break
    if count > 1:
        raise SurefootError(
            f"{field}={count}: {count} processes would each train the same run into {folder}; {remedy} (several ranks: "
            "docs/how-to/several-machines.md)"
        )


def check_device(device: str) -> None:
    """Raise SurefootError unless PyTorch can use the device here."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise SurefootError(f"device={device!r}: can't be used here ({reason}); set device = 'cpu'") from None
