"""The CPU, memory and GPU that a run uses."""

import contextlib
import time

WORKERS_EVERY = 5.0
"""seconds between two searches for worker processes, which take milliseconds"""
GB = 1e9


class MachineUse:
    """Measures the CPU, memory and GPU that this process and its workers use.

    device   of the recipe
    """

    def __init__(self, device: str) -> None:
        import psutil

        self.device = device
        self.process = psutil.Process()
        self.workers: list[psutil.Process] = []
        self.searched = float("-inf")
        self.used: dict[int, float] = {}
        """seconds of CPU time of each process at the last measurement"""
        self.measured = time.perf_counter()
        self._processes()

    def measure(self) -> dict[str, float | None]:
        """The metrics in ``SYSTEM`` that this machine has, since the last call or since the beginning."""
        now = time.perf_counter()
        seconds, memory = self._processes()
        elapsed, self.measured = max(now - self.measured, 1e-9), now
        return {"cpu_cores": seconds / elapsed, "memory_gb": memory / GB, **self._gpu()}

    def _processes(self) -> tuple[float, int]:
        """Seconds of CPU time since the last call, and bytes of memory."""
        import psutil

        if time.monotonic() - self.searched > WORKERS_EVERY:
            self.workers, self.searched = self.process.children(recursive=True), time.monotonic()
        before, self.used = self.used, {self.process.pid: time.process_time()}  # finer than what psutil reads
        memory = self.process.memory_info().rss
        for worker in self.workers:
            with contextlib.suppress(psutil.Error):  # it has ended
                times = worker.cpu_times()
                memory += worker.memory_info().rss
                self.used[worker.pid] = times.user + times.system
        return sum(used - before.get(pid, used) for pid, used in self.used.items()), memory

    def _gpu(self) -> dict[str, float | None]:
        if self.device == "cpu":
            return {}
        import torch

        if self.device == "mps":
            return {"gpu_memory_gb": torch.mps.driver_allocated_memory() / GB}
        measured: dict[str, float | None] = {"gpu_memory_gb": torch.cuda.memory_reserved(self.device) / GB}
        with contextlib.suppress(Exception):  # no nvidia-ml-py, or a driver that does not support it
            measured["gpu_percent"] = float(torch.cuda.utilization(self.device))
        return measured
