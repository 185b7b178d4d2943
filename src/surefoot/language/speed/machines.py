"""Machines: known GPUs by their data sheets, and this machine by measurement."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import torch

from surefoot.errors import SurefootError

Clock = Callable[[], float]


@dataclass(frozen=True)
class Machine:
    """The rates of a device and its links.

    flops         multiplications and additions of matrices per second, at best; of a GPU in bfloat16
    float32       the same in float32 without TF32; None: as ``flops``
    bandwidth     bytes of memory per second, at best
    link          bytes per second that a rank receives from ranks of its machine
    network       bytes per second that a rank receives from other machines
    memory        bytes of the device
    launch        seconds in which the host starts an operation
    latency       seconds of a step of an exchange, which goes around all its ranks
    few_rows      multiplications and additions of matrices with a row for each sampled token; None: bound by ``flops`` and the
                  bytes of the weights
    efficiency    the share of ``flops`` that matrices of a model reach
    reached       the share of ``bandwidth``, ``link`` and ``network`` that is reached
    overlap       whether device, host and links work at the same time
    """

    name: str
    flops: float
    bandwidth: float
    link: float
    network: float
    memory: float
    per_machine: int = 8
    launch: float = 5e-6
    latency: float = 5e-6
    efficiency: float = 0.6
    reached: float = 0.8
    overlap: bool = True
    few_rows: float | None = None
    float32: float | None = None

    def in_float32(self) -> "Machine":
        """The same machine for passes in float32."""
        return self if self.float32 is None else replace(self, flops=self.float32, float32=None)

    def link_of(self, ranks: int) -> float:
        """Bytes per second of an exchange among this many consecutive ranks.

        Of several machines, what goes around in rings enters each machine once, over the networks of all its ranks.
        """
        return self.reached * (self.link if ranks <= self.per_machine else min(self.link, self.per_machine * self.network))

    @property
    def between(self) -> float:
        """Bytes per second of an exchange of one rank of every machine, as between the copies of hybrid sharding."""
        return self.reached * min(self.link, self.network)


GPUS = {
    machine.name: machine
    for machine in (
        Machine("A100", 312e12, 2.0e12, 300e9, 25e9, 80e9, float32=19.5e12),
        Machine("H100", 989e12, 3.35e12, 450e9, 50e9, 80e9, float32=67e12),
        Machine("H200", 989e12, 4.8e12, 450e9, 50e9, 141e9, float32=67e12),
        Machine("B200", 2250e12, 7.7e12, 900e9, 50e9, 180e9, float32=80e12),
        Machine("L40S", 362e12, 0.86e12, 25e9, 12.5e9, 48e9, float32=91.6e12),
    )
}
"""bfloat16 without sparsity, float32 and memory by the makers' data sheets; NVLink in one direction (PCIe 4 for L40S), and per
GPU a network of 200 Gbit/s (A100), 100 Gbit/s (L40S) or 400 Gbit/s"""


def measured_machine(
    width: int,
    feed_forward: int,
    tokens: int,
    rows: int,
    ranks: int = 1,
    clock: Clock = time.perf_counter,
    seconds: float = 0.3,
) -> Machine:
    """This machine's CPU, one thread per rank: matrices of a model's shape, copies in memory, small operations, and exchanges
    of this many ranks with gloo.

    tokens    rows of the matrices in passes
    rows      the same while sampling
    clock     ``time.process_time`` counts only this process's own work, also on a busy machine
    seconds   of each measurement
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = _matrix_rate(width, feed_forward, tokens, clock, seconds)
        few_rows = _matrix_rate(width, feed_forward, rows, clock, seconds)
        bandwidth, launch = _copy_rate(clock, seconds), _launch_time(clock, seconds)
        latency, link = (0.0, bandwidth) if ranks == 1 else _exchange_rates(ranks, clock)
    finally:
        torch.set_num_threads(threads)
    return cpu_machine(ranks, flops=flops, bandwidth=bandwidth, link=link, launch=launch, latency=latency, few_rows=few_rows)


def cpu_machine(
    ranks: int, *, flops: float, bandwidth: float, link: float, launch: float, latency: float, few_rows: float
) -> Machine:
    """A machine whose processes compute and exchange one after the other, at rates that are reached."""
    return Machine(
        name=f"this machine, {ranks} rank{'s' * (ranks > 1)}",
        flops=flops,
        bandwidth=bandwidth,
        link=link,
        network=link,
        memory=float("inf"),
        per_machine=ranks,
        launch=launch,
        latency=latency,
        efficiency=1.0,
        reached=1.0,
        overlap=False,
        few_rows=few_rows,
    )


MATRICES = 8
"""that are multiplied in turn, so that weights come from memory as in a model"""


def _repeated(action: Callable[[], object], clock: Clock, seconds: float) -> float:
    """The median seconds of an action, of several in this time; the first does not count."""
    action()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        started = clock()
        for _ in range(4):
            action()
        times.append((clock() - started) / 4)
    return max(median(times), 1e-9)


def _matrix_rate(width: int, feed_forward: int, tokens: int, clock: Clock, seconds: float) -> float:
    """Multiplications and additions per second."""
    x, weights = torch.randn(tokens, width), [torch.randn(feed_forward, width) for _ in range(MATRICES)]

    def multiply() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    return 2 * MATRICES * tokens * width * feed_forward / _repeated(multiply, clock, seconds)


def _copy_rate(clock: Clock, seconds: float) -> float:
    """Bytes read and written per second, in blocks larger than caches."""
    source, target = torch.ones(2**24), torch.empty(2**24)
    return 2 * source.nbytes / _repeated(lambda: torch.add(source, 1.0, out=target), clock, seconds)


def _launch_time(clock: Clock, seconds: float) -> float:
    """Seconds of an operation that computes next to nothing."""
    small = torch.ones(8)
    return _repeated(lambda: small + small, clock, seconds)


def _exchange_rates(ranks: int, clock: Clock) -> tuple[float, float]:
    """Seconds of a step of a small all-reduce, and bytes per second that a rank sends in a large one."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        places = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = [
            context.Process(target=_exchange, args=(rank, ranks, str(Path(folder) / "store"), place, clock), daemon=True)
            for rank, place in enumerate(places)
        ]
        try:
            for process in processes:
                process.start()
            _wait_for(processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        times = [[float(word) for word in place.read_text().split()] for place in places]
    small, large = (max(column) for column in zip(*times, strict=True))
    return small / (ranks - 1), 2 * LARGE * (ranks - 1) / ranks / max(large - small, 1e-9)


def _wait_for(processes: Sequence[BaseProcess]) -> None:
    """Wait until all ranks end. Raises SurefootError at once if one fails, for which the others would wait half an hour."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            ended = running.pop(sentinel)  # type: ignore[arg-type]  # sentinels are numbers
            ended.join()
            if ended.exitcode:
                raise SurefootError(
                    f"--ranks {len(processes)}: a process that measures exchanges ended with code {ended.exitcode}; use fewer "
                    "ranks, or give --gpu instead of --measure"
                )


SMALL, LARGE = 1024, 2**26
"""bytes of the exchanges that are measured"""


def _exchange(rank: int, ranks: int, store: str, place: Path, clock: Clock) -> None:
    """One rank of ``_exchange_rates``: writes its seconds of a small and of a large exchange."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    times = []
    for size, count in ((SMALL, 50), (LARGE, 3)):
        tensor = torch.ones(size // 4)
        dist.all_reduce(tensor)
        started = clock()
        for _ in range(count):
            dist.all_reduce(tensor)
        times.append((clock() - started) / count)
    place.write_text(" ".join(map(str, times)))
    dist.destroy_process_group()
