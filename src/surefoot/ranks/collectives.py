"""Ranks: their number, sums and exchanges across them. With one process each of these is the identity.

Losses are divided by global counts, so gradients are *summed*: a mean of means would weight ranks, not samples.
A failed exchange is a SurefootError of one line; ``ranks/launching.py`` joins the ranks and sets the timeout.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.errors import NotFiniteError, RankLostError, SurefootError, cause_of
from surefoot.functional import Moments, merge_moments

T = TypeVar("T")
reason_of_failure: Callable[[], str | None] = lambda: None  # noqa: E731
"""the message with which another rank left; set by ``ranks/launching.py``"""


_alone = False
"""whether this process does something that the others wait for (``on_first``)"""


def rank() -> int:
    """The number of this process, from 0; 0 without torch.distributed."""
    return dist.get_rank() if world_size() > 1 else 0


def world_size() -> int:
    """The number of processes that work together: 1 in what only rank 0 does."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _alone else 1


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
        with one_line_errors():
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


JOINED = 2**20
"""largest number of elements that are copied together to be summed in one exchange"""


def all_sum_together(tensors: Sequence[Tensor]) -> None:
    """The sums of several tensors over ranks, in place, in one exchange if they are small: its time is mostly waiting."""
    if world_size() == 1:
        return
    alike = len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
    if len(tensors) < 2 or not alike or sum(tensor.numel() for tensor in tensors) > JOINED:
        for tensor in tensors:
            all_sum(tensor)
        return
    joined = all_sum(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    for tensor, part in zip(tensors, torch.split(joined, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def sum_count(number: int, like: Tensor) -> int:
    """The sum of a count over ranks, exchanged on the device of ``like``."""
    return int(all_sum(like.new_tensor(number, dtype=torch.int64)))


def mean_over_ranks(mean: float, count: int) -> float:
    """The mean over all ranks, from this rank's mean of ``count`` numbers."""
    if world_size() == 1:
        return mean
    total, numbers = all_sum(torch.tensor([mean * count if count else 0.0, count], dtype=torch.float64)).tolist()
    return total / numbers if numbers else mean


def all_max(tensor: Tensor, group: Any = None) -> Tensor:
    """The elementwise maximum of a tensor over ranks, in place; ``group`` is that of ``exchange``."""
    if group is not None or world_size() > 1:
        with one_line_errors():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    return tensor


def merge_across_ranks(moments: Moments) -> Moments:
    """Moments of the union of all ranks' selections, the same on every rank, bit for bit."""
    if world_size() == 1:
        return moments
    mine = torch.stack([part.expand_as(moments.mean) for part in moments])
    everyone = [torch.empty_like(mine) for _ in range(world_size())]
    with one_line_errors():
        dist.all_gather(everyone, mine)
    return functools.reduce(merge_moments, (Moments(*row) for row in everyone))


# ---- exchanges and agreement ----------------------------------------------------------------------------------------


def share(count: int) -> range:
    """This rank's share of ``count`` things, numbered from 0; the shares are consecutive and nearly equal."""
    return range(rank() * count // world_size(), (rank() + 1) * count // world_size())


def exchange(value: T, group: Any = None) -> list[T]:
    """The values of all ranks, in their order, on every rank.

    group   the result of ``thread_group``, in another thread than that of training
    """
    size = world_size() if group is None else dist.get_world_size(group)
    everyone = [value] * size
    if size > 1:
        with one_line_errors():
            dist.all_gather_object(everyone, value, group)
    return everyone


_groups: dict[int, Any] = {}
"""made so far, by the group of all ranks"""


def thread_group(timeout: float) -> Any:
    """A second group of all ranks, for the exchanges of one other thread; None for a single process. All ranks call this.

    timeout   seconds that an exchange waits for the slowest rank
    """
    if world_size() == 1:
        return None
    key = id(dist.group.WORLD)
    if key not in _groups:
        with one_line_errors():
            _groups[key] = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return _groups[key]


def forget_groups() -> None:
    """Drop the groups that ``thread_group`` made; their own threads must end before the interpreter does."""
    _groups.clear()


def from_first(value: T) -> T:
    """The value of rank 0, on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    with one_line_errors():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def on_first(function: Callable[[], T]) -> T:
    """The result of a function that only rank 0 calls, on every rank; so is its error. The function sees a single process."""
    global _alone
    result: list[T] = []
    with together():
        if rank() == 0:
            before, _alone = _alone, True
            try:
                result.append(function())
            finally:
                _alone = before
    return from_first(result)[0]


@contextmanager
def together(group: Any = None) -> Iterator[None]:
    """A piece of work without exchanges that all ranks do at the same time: if it fails on one, it fails on all.

    group   that of ``exchange``, in another thread than that of training

    Raises the error of this rank, or else a NotFiniteError or SurefootError with the message and the number of the rank that
    has one. Without this, the other ranks would wait in their next exchange for one that will not come.
    """
    if group is None and world_size() == 1:
        yield
        return
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    failed = torch.tensor(0 if mine is None else 1)
    if int(all_max(failed, group)):
        text = None if mine is None else str(mine) if isinstance(mine, SurefootError) else cause_of(mine)
        errors = exchange(None if mine is None else (isinstance(mine, NotFiniteError), text), group)
        # NotFiniteError skips an update, so all ranks must raise it, or none.
        skips = all(error is None or error[0] for error in errors)
        if mine is not None and (skips or not isinstance(mine, NotFiniteError)):
            if isinstance(mine, SurefootError):
                mine.on_all_ranks = True
            raise mine
        number, first = next((i, error) for i, error in enumerate(errors) if error and (skips or not error[0]))
        agreed = (NotFiniteError if skips else SurefootError)(f"rank {number}: {first[1]}")
        agreed.on_all_ranks = True
        raise agreed from mine


MASTER = "master"
"""the attribute of a parameter in bfloat16 with its values in float32 (``sharding/master.py``)"""


def stored(parameter: Tensor) -> Tensor:
    """The values of a parameter that are trained and saved: its master weights if it has some, else itself."""
    master: Tensor = getattr(parameter, MASTER, parameter)
    return master


def broadcast_weights(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0; sharded parameters stay, since every rank has its own part."""
    if world_size() > 1:
        masters = [stored(parameter) for parameter in module.parameters() if stored(parameter) is not parameter]
        with one_line_errors(), torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers(), *masters):
                if not hasattr(tensor, "to_local"):
                    dist.broadcast(tensor.data, src=0)


def check_same_weights(module: nn.Module) -> None:
    """Raise SurefootError, on every rank, if a rank's parameters are not those of rank 0, bit for bit.

    Of sharded parameters, the copies of a shard are compared; without copies there is nothing to compare.
    """
    if world_size() == 1:
        return
    parameters = [stored(parameter) for parameter in module.parameters()]
    bits = torch.stack([bit_sum(p) for p in parameters]).tolist() if parameters else []  # one wait for the device
    mine = {str(index): (_place(p), sum_) for index, (p, sum_) in enumerate(zip(parameters, bits, strict=True))}
    everyone = exchange(mine)
    first: dict[tuple[str, Any], int] = {}
    different = []
    for number, of_rank in enumerate(everyone):
        if any(first.setdefault((index, place), bits) != bits for index, (place, bits) in of_rank.items()):
            different.append(number)
    if different:
        raise SurefootError(
            f"ranks: the weights of rank {', '.join(map(str, different))} differ from those of rank 0; run all ranks on the "
            "same kind of device with the same versions, then resume from the last checkpoint"
        )


def _place(parameter: Any) -> int | None:
    """The number of a rank's shard of a parameter; None for a whole one."""
    mesh = getattr(parameter, "device_mesh", None)
    return None if mesh is None else int(mesh.get_local_rank(mesh.ndim - 1))


def bit_sum(parameter: Any) -> Tensor:
    """The sum of a tensor's bits, or of this rank's part of them, read as whole numbers.   -> [] int64"""
    tensor: Any = parameter.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = tensor.contiguous().view(-1)
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()
    # A sum of shorter numbers would copy them to int64 first.
    words = flat[: len(flat) // per_word * per_word].view(torch.int64)
    rest = flat[len(words) * per_word :].view(
        {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[flat.element_size()]
    )
    total: Tensor = words.sum() + rest.sum(dtype=torch.int64)
    return total


BACKENDS = ("gloo", "NCCL", "c10d", "ProcessGroup")
"""one of these is in the text of an error of an exchange"""


@contextmanager
def exchanging() -> Iterator[None]:
    """Errors of exchanges in a block become one line; other errors, as in a pass of a sharded model, stay as they are."""
    try:
        yield
    except RuntimeError as error:
        if world_size() > 1 and any(name in str(error) for name in BACKENDS):
            with one_line_errors():
                raise
        raise


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise SurefootError in place of the backend's errors."""
    try:
        yield
    except RuntimeError as error:
        why = reason_of_failure()
        if why is not None:
            raise SurefootError(why) from error
        cause, again = re.sub(r"\[/\S+\] ", "", cause_of(error)), "then resume the run, or start all ranks again"
        what, remedy = "has died, or did not answer in time", f"see what it printed last, {again}"
        if "timed out" in cause.lower():
            what, remedy = "did not answer in time", f"if it is slow, and not stopped, raise --rank-timeout, {again}"
        raise RankLostError(f"rank {rank()} of {world_size()}: another rank {what} ({cause}); {remedy}") from error


# ---- before training ------------------------------------------------------------------------------------------------


def check_device(device: str) -> None:
    """Raise SurefootError unless PyTorch can use the device here."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise SurefootError(f"device={device!r}: can't be used here ({reason}); set device = 'cpu'") from None
