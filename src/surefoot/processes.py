"""Child processes: each runs one function, which answers over a pipe until the pipe closes or its parent is gone.

They are started by command, never forked: they inherit no thread, lock or GPU context, and import the script of their parent
only if they get something that it defines. This module imports no torch.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

from surefoot.signals import STOPPING

POLL_INTERVAL = 0.5
"""seconds between two checks of a busy process, at most"""
EXIT_TIMEOUT = 3
"""seconds until the exit code of a process that has closed its pipe"""
MAIN = "__main__"
parent_gone = threading.Event()
"""in a child: the process that started it has ended"""


class ChildEnded(Exception):
    """A process ended instead of answering."""


class ChildLate(Exception):
    """A process did not answer in time."""


class Child:
    """A process that runs ``function(connection, *arguments)``.

    Its signals ``STOPPING`` wait until the function calls ``let_in``. It ends with its parent, whatever the function does.

    function   ``module:function``
    arguments  anything that can be pickled
    silent     discard what the process prints
    files      open files, by number, which have the same number there
    survives   don't end with its parent; set ``parent_gone`` there

    Raises OSError if the system can't start it, and whatever pickling the arguments raises.
    """

    def __init__(
        self, function: str, *arguments: Any, silent: bool = False, files: Sequence[int] = (), survives: bool = False
    ) -> None:
        content = pickle.dumps(arguments)
        context = _context(needs_main=MAIN.encode() in content)
        self.connection, theirs = multiprocessing.Pipe()
        # For PR_SET_PDEATHSIG, the parent ends when the thread that started the process ends.
        killed_with_parent = not survives and threading.current_thread() is threading.main_thread()
        path = [os.path.abspath(entry) for entry in sys.path]
        code = (
            f"import sys; sys.path[:] = {path!r}; from surefoot.processes import serve; "
            f"serve({function!r}, {theirs.fileno()}, {survives}, {killed_with_parent})"
        )
        output = subprocess.DEVNULL if silent else None
        with contextlib.ExitStack() as undo:
            undo.callback(self.connection.close)
            with held_back(), theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", code, function],  # the function is for readers of a list of processes
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(), *files),
                )
                undo.callback(end, [self])
            with contextlib.suppress(OSError):  # it has ended, which the first answer shows
                self.connection.send(context)
                self.connection.send_bytes(content)
            undo.pop_all()

    def receive(
        self,
        seconds: float,
        read: Callable[["Connection[Any, Any]"], Any] = Connection.recv,
        progress: Callable[[], Any] = lambda: None,
    ) -> Any:
        """The next answer.

        seconds   how long the value of ``progress`` may stay the same

        Raises ChildLate, and ChildEnded.
        """
        before, since = progress(), time.monotonic()
        try:
            while not self.connection.poll(max(0.0, min(POLL_INTERVAL, since + seconds - time.monotonic()))):
                if (now := progress()) != before:
                    before, since = now, time.monotonic()
                elif time.monotonic() - since >= seconds:
                    raise ChildLate
            return read(self.connection)
        except (EOFError, OSError):
            raise ChildEnded from None

    def exit_cause(self) -> str:
        """How a process ended that has closed its pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_TIMEOUT)
        return exit_cause(self.process.returncode)


def end(children: Sequence[Child], grace: float = 0.0) -> None:
    """Close all pipes, which ends the processes; kill those that have not ended after ``grace`` seconds, and wait for all."""
    for child in children:
        child.connection.close()
    until = time.monotonic() + grace
    try:
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until - time.monotonic()))
    finally:  # after Ctrl-C too
        for child in children:
            child.process.kill()
        for child in children:
            child.process.wait()
            assert child.process.stdin is not None
            child.process.stdin.close()


def exit_cause(code: int | None) -> str:
    """How a process ended, from its exit code."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold back the signals ``STOPPING`` of this thread, and those of a process that starts here until it calls ``let_in``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the child ---------------------------------------------------------------------------------------------------------


def let_in(*ignored: int) -> None:
    """In a child: ignore some signals, and receive the others."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def is_importing_main() -> bool:
    """Whether this is a child that imports the script of its parent."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def serve(function: str, file: int, survives: bool, killed_with_parent: bool) -> None:
    """Run a function in this process, which a ``Child`` started.

    Its stdin ends with its parent. It is replaced, so that no code reads it.
    """
    if killed_with_parent and sys.platform == "linux":
        # prctl(PR_SET_PDEATHSIG): C code that hangs with the interpreter lock ends with the parent too.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    threading.Thread(target=_watch_parent, args=(os.dup(0), survives), daemon=True).start()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    connection: Connection[Any, Any] = Connection(file)
    process: Any = multiprocessing.current_process()
    process._inheriting = True
    try:
        spawn.prepare(connection.recv())
        arguments = connection.recv()
    except EOFError:  # the parent is gone
        return
    finally:
        del process._inheriting
    pkgutil.resolve_name(function)(connection, *arguments)


def _context(needs_main: bool) -> dict[str, Any]:
    """What ``spawn.prepare`` needs in a child."""
    if not needs_main:
        return {"sys_argv": sys.argv}
    context = spawn.get_preparation_data("surefoot")
    del context["authkey"]
    return context


def _watch_parent(lifeline: int, survives: bool) -> None:
    os.read(lifeline, 1)
    parent_gone.set()
    if not survives:
        os._exit(1)
