"""Programs in forked children, which have torch loaded already: two seconds of CPU less than a new process each."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def children(pid: int) -> list[int]:
    """The processes that a process has started; none of one that is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Whether a process runs, and is not only waiting for its parent to notice its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_of(pids: Iterable[int], seconds: float = 60) -> list[int]:
    """Those that still run, once all have ended or the time is over."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


class Forked:
    """A function in a forked child, with what it prints in ``folder``.

    It ends as a program does: with an exit code, the message of ``sys.exit`` and tracebacks on its stderr.
    """

    def __init__(self, body: Callable[[], Any], folder: Path, environment: Mapping[str, str] = {}) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / "out", folder / "err"

        def child() -> None:
            os.environ.update(environment)
            torch.set_num_threads(1)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
            for stream, path in ((1, self._out), (2, self._err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
            body()

        self._process = multiprocessing.get_context("fork").Process(target=child)
        self._process.start()

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self._process.pid or 0, number)

    def wait_for_output(self, seconds: float = 200) -> str:
        """What it has printed, once it has printed anything."""
        end = time.monotonic() + seconds
        while not (self._out.exists() and self._out.stat().st_size):
            assert self._process.is_alive(), self._err.read_text()
            assert time.monotonic() < end, "nothing was printed"
            time.sleep(0.01)
        return self._out.read_text()

    def finish(self, seconds: float = 200) -> tuple[int | None, str, str]:
        """Wait until it ends; its exit code, stdout and stderr."""
        self._process.join(seconds)
        assert not self._process.is_alive(), f"still running after {seconds} s"
        return self._process.exitcode, self._out.read_text(), self._err.read_text()

    def kill(self) -> None:
        """End it, if it still runs."""
        if self._process.is_alive():
            self.send_signal(signal.SIGKILL)
        self._process.join()
