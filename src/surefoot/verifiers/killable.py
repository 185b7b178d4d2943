"""Judging in processes that are killed when they take too long, so that a bomb in a response costs that response alone."""

import atexit
import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from surefoot.errors import SurefootError, missing_extra

STARTUP = 120.0
"""seconds besides a judgement's own in a process that has only just been started, and imports first"""
_IDLE: "SimpleQueue[_Worker]" = SimpleQueue()
"""processes kept for the next call: starting one takes a second"""


def judged(kind: str, rows: Sequence[tuple[str, Any]], seconds: float, workers: int) -> list[float]:
    """What the judge of ``kind`` says of each response and what is wanted of it; 0 where it took longer than ``seconds``.

    Raises SurefootError for a row whose own part is wrong.
    """
    with ThreadPoolExecutor(workers or cores()) as threads:
        try:
            replies = list(threads.map(lambda row: _judged(kind, row, seconds), rows))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    for number, reply in enumerate(replies, 1):
        if "error" in reply:
            raise SurefootError(f"response {number}: {reply['error']}")
    return [float(reply["value"]) for reply in replies]


def check_package(module: str, package: str, name: str) -> None:
    """Raise the one line that names the extra, unless the package is there."""
    if importlib.util.find_spec(module) is None:
        raise missing_extra(package, "verifiers", f"surefoot.verifiers:{name}")


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _judged(kind: str, row: tuple[str, Any], seconds: float) -> dict[str, Any]:
    try:
        worker = _IDLE.get_nowait()
    except Empty:
        worker = _Worker()
    try:
        reply = worker.ask([kind, seconds, *row], seconds)
    except BaseException:
        worker.end()
        raise
    if reply is None:
        worker.end()
        return {"value": 0.0}
    _IDLE.put(worker)
    return reply


class _Worker:
    """One process, asked one thing at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "surefoot.verifiers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
        )
        self.fresh = True

    def ask(self, job: Any, seconds: float) -> dict[str, Any] | None:
        """The reply; None where there is none in time."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds + (STARTUP if self.fresh else 0.0)
        heard = b""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        while not heard.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            chunk = os.read(self.process.stdout.fileno(), 65_536)
            if not chunk:  # it has ended: for want of memory, or by its own alarm
                return None
            heard += chunk
        self.fresh = False
        return dict(json.loads(heard))

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what it had not read
                stream.close()


@atexit.register
def close() -> None:
    """End all idle processes."""
    with contextlib.suppress(Empty):
        while True:
            _IDLE.get_nowait().end()
