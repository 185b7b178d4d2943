"""Runs of several ranks in forked children, as a launcher starts them."""

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

TIMEOUT = 60.0
"""seconds that ranks wait for each other: longer than a slow machine holds one up"""
SOON = 8.0
"""the same where a rank hangs and the others are to notice it"""
PATIENCE = 120.0
"""seconds beyond that time after which a test gives up on ranks that hang"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start_ranks(count: int, body: Callable[[int], Any], results: Path, timeout: float = TIMEOUT) -> list[BaseProcess]:
    """Start ``body(rank)`` in forked children; rank r's result, or the message of its error, goes to ``results/r``."""
    results.mkdir(parents=True, exist_ok=True)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}

    def child(rank: int) -> None:
        os.environ.update({**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "SUREFOOT_RANK_TIMEOUT": str(timeout)})
        torch.set_num_threads(1)
        try:
            torch.save(body(rank), results / str(rank))
        except BaseException as error:
            from surefoot.ranks.launching import leave_ranks

            (results / f"{rank}.traceback").write_text(traceback.format_exc())
            torch.save(f"{type(error).__name__}: {error}", results / str(rank))
            leave_ranks(str(error))

    fork = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = [fork.Process(target=child, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    return processes


def on_ranks(count: int, body: Callable[[int], Any], results: Path, timeout: float = TIMEOUT) -> list[Any]:
    """The results of ``body(rank)`` on every rank, or the messages of their errors; None for one that was killed."""
    return finish(start_ranks(count, body, results, timeout), results, timeout)


def two_of_which_one_fails(body: Callable[[int], Any], results: Path, hangs: int | None) -> list[Any]:
    """The results of ``body(rank)`` on two ranks; one that hangs is killed once the other has noticed it."""
    timeout = TIMEOUT if hangs is None else SOON
    processes = start_ranks(2, body, results, timeout)
    if hangs is not None:
        processes[1 - hangs].join(PATIENCE)
        os.kill(processes[hangs].pid or 0, signal.SIGKILL)
    return finish(processes, results, timeout)


def finish(processes: list[BaseProcess], results: Path, timeout: float = TIMEOUT) -> list[Any]:
    """Wait for the ranks; their results. A rank that hangs ``PATIENCE`` longer than ranks wait for each other is a failure."""
    end = time.monotonic() + timeout + PATIENCE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
    assert not hanging, f"ranks {hanging} hang"
    files = [results / str(rank) for rank in range(len(processes))]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def own_memory() -> int:
    """Bytes of this process's own memory: pages of mapped files do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
