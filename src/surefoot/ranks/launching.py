"""Joining the processes that a launcher started, as ranks that train together.

``torchrun``, ``srun`` and ``surefoot train --ranks N`` start the processes; ``join_ranks`` makes them one group. A rank that
fails leaves its message for the others, whose next exchange fails. Importing this needs no torch.
"""

import atexit
import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from surefoot.errors import SurefootError, cause_of

T = TypeVar("T")
TIMEOUT = "SUREFOOT_RANK_TIMEOUT"
"""environment variable: seconds that an exchange waits for the slowest rank"""
DEFAULT_TIMEOUT = 600.0
FAILURE = "surefoot/failure"
"""key of the message of a rank that failed"""


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started."""

    rank: int
    size: int
    local_rank: int
    """its number among those of this machine"""
    launcher: str


def launch_of(variables: Mapping[str, str]) -> Launch | None:
    """The launch that environment variables describe; None for a single process.

    Launchers can be nested: the first of torchrun, mpirun and srun with several processes counts. SLURM_NTASKS does not: a
    batch script with several tasks has it and is one process; srun sets SLURM_STEP_NUM_TASKS.
    """
    for launcher, of_rank, of_size, of_local in (
        ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ):
        numbers = [variables.get(name, "") for name in (of_rank, of_size)]
        if all(number.isdecimal() for number in numbers) and int(numbers[1]) > 1:
            local = variables.get(of_local, "0")
            return Launch(int(numbers[0]), int(numbers[1]), int(local) if local.isdecimal() else 0, launcher)
    return None


def join_ranks() -> None:
    """Join the ranks of this launch, once per process; nothing for a single process, or in a group that exists already.

    Raises SurefootError if the others don't join within the timeout, or run another version.
    """
    launch = launch_of(os.environ)
    if launch is None:
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings with C++ frames when the store's process has ended
    import torch.distributed as dist

    from surefoot.ranks import collectives

    if dist.is_initialized():
        return
    for name, value in _meeting_point(launch).items():
        os.environ.setdefault(name, value)
    _open_group(rank_timeout(), rank=launch.rank, world_size=launch.size)
    collectives.reason_of_failure = _reason_of_failure
    atexit.register(leave_ranks)
    _check_versions()


def leave_ranks(failure: str | None = None) -> bool:
    """Leave the group; whether this process was in one.

    failure   the reason that the other ranks show if they are waiting for this one
    """
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    from surefoot.ranks import collectives

    if not dist.is_initialized():
        return False
    if failure is not None and _store is not None:
        text = f"rank {dist.get_rank()}: {failure}"
        _briefly(lambda: _store.set(FAILURE, text))
    collectives.forget_groups()
    # A thread that is still busy with this when the interpreter ends aborts the process.
    _briefly(dist.destroy_process_group, seconds=30.0 if failure is None else 2.0)
    return True


def choose_gpu(device: str) -> None:
    """Make "cuda" stand for the GPU with this rank's number on its machine.

    Raises SurefootError if there are fewer GPUs than ranks, or the device is one GPU by number.
    """
    import torch

    launch = launch_of(os.environ)
    if launch is None or not device.startswith("cuda"):
        return
    if device != "cuda":
        raise SurefootError(f"device={device!r}: all {launch.size} ranks would use it; set device = 'cuda', one GPU per rank")
    count = torch.cuda.device_count()
    # With --gpus-per-task, Slurm shows each rank its own GPUs alone: fewer than the step has on this machine.
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
    per_task = re.search(r"(?:^|[:=])1$", os.environ.get("SLURM_GPUS_PER_TASK") or os.environ.get("SLURM_TRES_PER_TASK", ""))
    fewer = on_node.isdecimal() and count <= launch.local_rank and count < int(on_node)
    alone = launch.launcher == "srun" and (per_task is not None or fewer)
    if 0 < count <= launch.local_rank and not alone:
        raise SurefootError(f"ranks: rank {launch.rank} has no GPU, this machine has {count}; start one rank per GPU")
    if count:  # without any, the check of the device has its own message
        torch.cuda.set_device(0 if alone else launch.local_rank)


@contextmanager
def process_group(backend: str = "gloo", timeout: float = DEFAULT_TIMEOUT) -> Iterator[int]:
    """Join the processes that ``torchrun`` started, in a program of your own; gives this process's rank.

    timeout   seconds that an exchange waits for the slowest rank: more than any rank needs to collect a batch

    Raises SurefootError if the other ranks don't join in that time.
    """
    import torch.distributed as dist

    from surefoot.ranks import collectives

    _open_group(timeout, backend)
    try:
        yield dist.get_rank()
    finally:
        collectives.forget_groups()
        dist.destroy_process_group()


_shared: Any = None
"""the store of torchrun's agent, or of rank 0; torchrun's outlives a restart of the ranks"""
_store: Any = None
"""the part of it for this attempt: without a part of its own, a restarted rank could read where a dead one listened"""


def _open_group(timeout: float, backend: str | None = None, rank: int = -1, world_size: int = -1) -> None:
    """Open the group: gloo for the CPU and NCCL for GPUs, unless ``backend`` names another."""
    global _shared, _store
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    patience = timedelta(seconds=timeout)
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        _shared, number, size = next(rendezvous("env://", rank, world_size, timeout=patience))
        _store = dist.PrefixStore(f"surefoot/attempt {restarts()}", _shared)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=_store, rank=number, world_size=size, timeout=patience)
    except (RuntimeError, ValueError) as error:
        raise SurefootError(
            f"ranks: the others did not join within {timeout:g} s ({cause_of(error)}); start all with torchrun"
        ) from error


def _reason_of_failure() -> str | None:
    """The message of a rank that failed, if it left one; a rank without it has died or hangs."""
    return _briefly(lambda: str(_store.get(FAILURE).decode()) if _store.check([FAILURE]) else None)


def _briefly(function: Callable[[], T], seconds: float = 2.0) -> T | None:
    """The result of a function; None if it fails or takes long, because the process with the store has ended or hangs."""
    results: list[T] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def rank_timeout() -> float:
    """Seconds that an exchange waits for the slowest rank. Raises SurefootError if the environment variable is wrong."""
    text = os.environ.get(TIMEOUT, str(DEFAULT_TIMEOUT))
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e8:
            return float(text)
    raise SurefootError(f"{TIMEOUT}={text!r}: is not a number of seconds above 0; set one")


def _meeting_point(launch: Launch) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT, unless they are set, as by torchrun. Raises SurefootError if they are not known."""
    if {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        return {}
    if launch.launcher == "srun":
        job, step = (int(os.environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        host = first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "127.0.0.1"))
        return {"MASTER_ADDR": host, "MASTER_PORT": str(20_000 + (job * 31 + step) % 20_000)}
    raise SurefootError(
        "MASTER_ADDR, MASTER_PORT: are not set, so the ranks can't find each other; set them to a host and a free port of rank "
        "0, or start with torchrun"
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm list, such as ``gpu[003-007,9],login``."""
    first = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    return nodes if first is None else "".join(part or "" for part in first.groups())


def _check_versions() -> None:
    """Raise SurefootError, on every rank, if one runs another version, other code or another command than the first."""
    import torch

    from surefoot.files import package_source
    from surefoot.ranks.collectives import exchange

    package = sys.modules["surefoot"]
    version = f"surefoot {package.__version__}, torch {torch.__version__}"
    source = f"the code {package_source()[:12]}"
    ours = Path(sys.argv[0]).name in ("surefoot", "__main__.py")
    command = " ".join(["surefoot", *sys.argv[1:2]]) if ours else "a script"
    everyone = exchange((version, source, command))
    kinds = ("install the same versions", "use the same checkout", "start the same command")
    for number, mine in enumerate(everyone):
        for theirs, first, remedy in zip(mine, everyone[0], kinds, strict=True):
            if theirs != first:
                raise SurefootError(f"ranks: rank {number} runs {theirs}, rank 0 {first}; {remedy} on all machines")


def note(key: str, value: str | None = None) -> str | None:
    """A note that outlives a restart of all ranks by torchrun's agent; None if there is none, or no agent.

    value   write this first
    """
    if _shared is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    key = f"surefoot/{key}"
    if value is not None:
        _shared.set(key, value)
    return str(_shared.get(key).decode()) if _shared.check([key]) else None


def restarts() -> int:
    """How often torchrun's agent has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def check_single_process(folder: Path) -> None:
    """Raise SurefootError if a launcher started several processes and this command can't use them."""
    from surefoot.ranks.collectives import world_size

    launch = launch_of(os.environ)
    if launch is None and world_size() == 1:
        return
    count = world_size() if launch is None else launch.size
    raise SurefootError(
        f"ranks: {count} processes were started, but this command is one process, and each would write into {folder}; start it "
        "without torchrun or srun (train, resume, rounds and demo can use several)"
    )
