"""Running what a model wrote: never in this process, never without bubblewrap.

``run`` starts a Python in namespaces of its own, feeds it, reads what it says, and ends it. What comes back is bytes and how it
ended; whether they are right is for the caller to say, and what it compares them with never enters the sandbox.
"""

import contextlib
import json
import math
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from surefoot.errors import SurefootError
from surefoot.sandbox import bubblewrap, seccomp
from surefoot.sandbox.driver import READY

Call = tuple[str, Sequence[Any], dict[str, Any]]
"""name of a function, its arguments, its arguments by name; all JSON"""
Told = Callable[[], dict[str, int]]
STARTUP = 60.0
"""seconds that a sandbox may take to start, on a machine with much to do; they are not the program's"""
_DRIVER = Path(__file__).with_name("driver.py")
_CHUNK = 65_536


@dataclass(frozen=True)
class Limits:
    """What a program may use. Whoever exceeds one is refused the rest, or ended."""

    seconds: float = 5.0
    """of wall clock, and of each process's CPU time, rounded up"""
    memory: int = 2**30
    """bytes in all: each of the processes gets its share, as address space"""
    processes: int = 4
    """processes and threads at a time"""
    files: int = 64
    """open files of a process"""
    disk: int = 2**24
    """bytes of files in all; they lie in memory and vanish. Not counted: about 1 KB of the kernel's memory for each file"""
    output: int = 2**20
    """bytes that are read; more end the program"""

    def of_a_process(self) -> dict[str, int]:
        """As setrlimit takes them."""
        return {
            "RLIMIT_CPU": math.ceil(self.seconds),
            "RLIMIT_AS": self.memory // self.processes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": self.files,
            "RLIMIT_FSIZE": self.disk,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and what it had said."""

    ended: Literal["done", "failed", "time", "output"]
    """by itself with 0; by itself otherwise, or by a signal; by us, for a limit"""
    output: bytes
    """of stdout, or the lines with results of calls; not more than was allowed"""
    namespace: int
    """number of its process namespace, which is gone with all that was in it"""


def run(source: str, *, calls: Sequence[Call] | None = None, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a program, or call functions of it.

    source   Python, as a model wrote it
    calls    what to call, in order; the output is a line ``{"value": …}`` for each, ``{}`` where it raised or gave what JSON
             does not have. None: the program runs as a script, with ``stdin``, and the output is what it prints
    limits   default: ``Limits()``

    Nothing of the program is left when this returns or raises: no process, no file.
    Raises SurefootError where there is no sandbox, and never runs without one.
    """
    limits = limits or Limits()
    outcome, complaint = _attempt(_interpreter(), source, calls, stdin, limits)
    if outcome is None:
        raise _refusal(complaint)
    return outcome


def check() -> None:
    """Raise SurefootError, which says what to install, unless a sandbox starts here."""
    _interpreter()


@cache
def _interpreter() -> str:
    """The first Python that starts in a sandbox here."""
    complaint = "there is no Python that it could run"
    for python in bubblewrap.interpreters():
        outcome, complaint = _attempt(python, "", None, "", Limits())
        if outcome is not None and outcome.ended == "done":
            return python
    raise _refusal(complaint)


def _refusal(complaint: str) -> SurefootError:
    return SurefootError(f"what a model wrote runs in a sandbox alone, and that did not start here: {complaint}")


def _attempt(python: str, source: str, calls: Sequence[Call] | None, stdin: str, limits: Limits) -> tuple[Outcome | None, str]:
    """The outcome, or None and why the sandbox did not start."""
    job = json.dumps({"source": source, "calls": calls, "limits": limits.of_a_process()}).encode()
    payload = b"%d\n%s%s" % (len(job), job, stdin.encode("utf-8", "surrogatepass"))
    with _started(python, limits.disk) as (process, told):
        return _conversation(process, told, payload, limits)


@contextlib.contextmanager
def _started(python: str, disk: int) -> Iterator[tuple[subprocess.Popen[bytes], Told]]:
    """A sandbox that waits for its job, and what bubblewrap tells of it; killed on the way out."""
    with contextlib.ExitStack() as open_pipes:

        def pipe() -> tuple[BinaryIO, BinaryIO]:
            out, into = os.pipe()
            return open_pipes.enter_context(open(out, "rb", 0)), open_pipes.enter_context(open(into, "wb", 0))

        rules, rules_in = pipe()
        info, info_in = pipe()
        rules_in.write(seccomp.program())
        rules_in.close()
        command = bubblewrap.command(python, disk, rules.fileno(), info_in.fileno())
        try:
            process = subprocess.Popen(
                [*command, _DRIVER.read_text("utf-8")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(rules.fileno(), info_in.fileno()),
                env=bubblewrap.environment(),
                cwd="/",
                start_new_session=True,
                **bubblewrap.identity(),
            )
        except OSError as error:
            raise _refusal(f"bwrap: {error.strerror or error}") from None
        info_in.close()
        told = cache(lambda: _told(info))  # a pipe is read once
        try:
            yield process, told
        finally:
            _kill(process, told)
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                stream.close()


def _kill(process: subprocess.Popen[bytes], told: Told) -> None:
    """End the sandbox. Its first process before bubblewrap outside, which then sees to it that no zombie stays behind."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if process.poll() is None and (inside := told().get("child-pid")):
            os.kill(inside, signal.SIGKILL)
            process.wait(5)
    if process.poll() is None:
        process.kill()
    process.wait()


def _conversation(process: subprocess.Popen[bytes], told: Told, payload: bytes, limits: Limits) -> tuple[Outcome | None, str]:
    """Say all that there is to say, hear all within the limits, and how it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    heard, complaint, unsaid = bytearray(), bytearray(), memoryview(payload)
    ready, ended, deadline = False, "", time.monotonic() + STARTUP
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as streams:
        streams.register(process.stdin, selectors.EVENT_WRITE)
        for stream in (process.stdout, process.stderr):
            streams.register(stream, selectors.EVENT_READ)
        while process.stdout in {key.fileobj for key in streams.get_map().values()} and not ended:
            for key, _ in streams.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is process.stdin:
                    unsaid = unsaid[_write(key.fd, unsaid[:_CHUNK]) :]
                    if not unsaid:
                        streams.unregister(process.stdin)
                        process.stdin.close()
                elif chunk := os.read(key.fd, _CHUNK):
                    (heard if key.fileobj is process.stdout else complaint).extend(chunk)
                else:
                    streams.unregister(key.fileobj)
            if not ready and heard.startswith(READY):
                ready, deadline = True, time.monotonic() + limits.seconds
                del heard[: len(READY)]
            if len(heard) > limits.output:
                ended = "output"
            elif time.monotonic() >= deadline:
                ended = "time"
    if not ended:
        try:
            ended = "failed" if process.wait(max(0.0, deadline - time.monotonic())) else "done"
        except subprocess.TimeoutExpired:
            ended = "time"
    if not ready:
        lines = complaint.decode(errors="replace").strip().splitlines() or [f"no word within {STARTUP:g} s"]
        return None, lines[-1]
    return Outcome(ended, bytes(heard[: limits.output]), told().get("pid-namespace", 0)), ""  # type: ignore[arg-type]


def _write(fd: int, part: memoryview) -> int:
    """How many bytes are done with: those written, or all where nobody reads."""
    try:
        return os.write(fd, part)
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(part)


def _told(info: BinaryIO) -> dict[str, int]:
    """What bubblewrap said of the sandbox, which it does before it starts anything; nothing, where it did not get so far."""
    if not select.select([info], [], [], 0)[0]:
        return {}
    try:
        return dict(json.loads(info.read()))
    except ValueError:
        return {}
