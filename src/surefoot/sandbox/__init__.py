"""Run code that a model wrote in a sandbox: never in this process, never without bubblewrap.

``run`` starts a Python in new namespaces, writes its input, reads its output, and ends it. It returns the output as bytes, and
how the program ended. The caller compares them with the expected results, which never enter the sandbox.
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
from surefoot.sandbox import bubblewrap
from surefoot.sandbox.driver import READY

Call = tuple[str, Sequence[Any], dict[str, Any]]
"""name of a function, positional and keyword arguments; all JSON"""
SandboxInfo = Callable[[], dict[str, int]]
STARTUP = 60.0
"""seconds that a sandbox may take to start on a busy machine; they don't count against the program's limit"""
_DRIVER = Path(__file__).with_name("driver.py")
_CHUNK = 65_536


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program. A request beyond a limit fails, or ends the program."""

    seconds: float = 5.0
    """wall-clock time, and CPU time of each process, rounded up"""
    memory: int = 2**30
    """bytes in total; each process gets an equal share of address space"""
    processes: int = 4
    """maximum number of processes and threads"""
    files: int = 64
    """open files per process"""
    disk: int = 2**24
    """bytes of all files, which are in memory and deleted at the end; about 1 KB of kernel memory per file is not counted"""
    output: int = 2**20
    """bytes of output; more end the program"""

    def per_process(self) -> dict[str, int]:
        """The limits of one process, by their names in setrlimit."""
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
    """How a program ended, and its output."""

    ended: Literal["done", "failed", "time", "output"]
    """exit code 0; another exit code or a signal; ended at a limit of time or output"""
    output: bytes
    """stdout, or one line for each call; at most ``Limits.output`` bytes"""
    namespace: int
    """number of its process namespace, which no longer exists"""


def run(source: str, *, calls: Sequence[Call] | None = None, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a program, or call functions of it.

    source   Python code
    calls    functions to call, in order; the output has one line for each: ``{"value": …}``, or ``{}`` if the call raised or
             returned a value that JSON can't represent. None: run the program as a script with ``stdin``; the output is stdout
    limits   default: ``Limits()``

    When this returns or raises, no process and no file of the program is left.
    Raises SurefootError if the sandbox can't start; the program never runs without one.
    """
    limits = limits or Limits()
    outcome, complaint = _try_run(_interpreter(), source, calls, stdin, limits)
    if outcome is None:
        raise _start_error(complaint)
    return outcome


def check() -> None:
    """Raise SurefootError, with what to install, unless a sandbox can start on this machine."""
    _interpreter()


@cache
def _interpreter() -> str:
    """The first Python that starts in a sandbox on this machine."""
    complaint = "found no Python to run"
    for python in bubblewrap.interpreters():
        outcome, complaint = _try_run(python, "", None, "", Limits())
        if outcome is not None and outcome.ended == "done":
            return python
    raise _start_error(complaint)


def _start_error(complaint: str) -> SurefootError:
    return SurefootError(f"sandbox: did not start ({complaint}); code that a model wrote never runs without one")


def _try_run(python: str, source: str, calls: Sequence[Call] | None, stdin: str, limits: Limits) -> tuple[Outcome | None, str]:
    """The outcome, or None and the reason why the sandbox did not start."""
    job = json.dumps({"source": source, "calls": calls, "limits": limits.per_process()}).encode()
    payload = b"%d\n%s%s" % (len(job), job, stdin.encode("utf-8", "surrogatepass"))
    with _started(python, limits.disk) as (process, info):
        return _communicate(process, info, payload, limits)


@contextlib.contextmanager
def _started(python: str, disk: int) -> Iterator[tuple[subprocess.Popen[bytes], SandboxInfo]]:
    """A sandbox that waits for its job, and bubblewrap's information about it; killed on exit."""
    with contextlib.ExitStack() as open_pipes:

        def pipe() -> tuple[BinaryIO, BinaryIO]:
            out, into = os.pipe()
            return open_pipes.enter_context(open(out, "rb", 0)), open_pipes.enter_context(open(into, "wb", 0))

        rules, rules_in = pipe()
        info, info_in = pipe()
        rules_in.write(bubblewrap.syscall_filter())
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
            raise _start_error(f"bwrap: {error.strerror or error}") from None
        info_in.close()
        read_info = cache(lambda: _read_info(info))  # a pipe can be read once
        try:
            yield process, read_info
        finally:
            _kill(process, read_info)
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                stream.close()


def _kill(process: subprocess.Popen[bytes], info: SandboxInfo) -> None:
    """Kill the sandbox: first its first process, so that bubblewrap can reap it and no zombie stays."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if process.poll() is None and (inside := info().get("child-pid")):
            os.kill(inside, signal.SIGKILL)
            process.wait(5)
    if process.poll() is None:
        process.kill()
    process.wait()


def _communicate(
    process: subprocess.Popen[bytes], info: SandboxInfo, payload: bytes, limits: Limits
) -> tuple[Outcome | None, str]:
    """Write the input and read the output within the limits. The outcome, or None and why the sandbox did not start."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, complaint, unwritten = bytearray(), bytearray(), memoryview(payload)
    ready, ended, deadline = False, "", time.monotonic() + STARTUP
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as streams:
        streams.register(process.stdin, selectors.EVENT_WRITE)
        for stream in (process.stdout, process.stderr):
            streams.register(stream, selectors.EVENT_READ)
        while process.stdout in {key.fileobj for key in streams.get_map().values()} and not ended:
            for key, _ in streams.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is process.stdin:
                    unwritten = unwritten[_write(key.fd, unwritten[:_CHUNK]) :]
                    if not unwritten:
                        streams.unregister(process.stdin)
                        process.stdin.close()
                elif chunk := os.read(key.fd, _CHUNK):
                    (output if key.fileobj is process.stdout else complaint).extend(chunk)
                else:
                    streams.unregister(key.fileobj)
            if not ready and output.startswith(READY):
                ready, deadline = True, time.monotonic() + limits.seconds
                del output[: len(READY)]
            if len(output) > limits.output:
                ended = "output"
            elif time.monotonic() >= deadline:
                ended = "time"
    if not ended:
        ended = "time"
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = "failed" if process.wait(max(0.0, deadline - time.monotonic())) else "done"
    if not ready:
        lines = complaint.decode(errors="replace").strip().splitlines() or [f"no output within {STARTUP:g} s"]
        return None, lines[-1]
    return Outcome(ended, bytes(output[: limits.output]), info().get("pid-namespace", 0)), ""  # type: ignore[arg-type]


def _write(fd: int, part: memoryview) -> int:
    """The number of bytes written; all of them if the reader has closed the pipe."""
    try:
        return os.write(fd, part)
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(part)


def _read_info(info: BinaryIO) -> dict[str, int]:
    """Bubblewrap's information about the sandbox, which it writes before it starts anything; empty if it failed earlier."""
    if not select.select([info], [], [], 0)[0]:
        return {}
    with contextlib.suppress(ValueError):
        return dict(json.loads(info.read()))
    return {}
