"""A function of rows, computed by several processes in the order of the rows: ``python -m surefoot.language.data.processes``.

The processes are started by command, never forked: they inherit no thread, lock or GPU context, and a script needs no
``if __name__ == "__main__"``. They end with the process that started them, because their input ends.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from surefoot.errors import SurefootError
from surefoot.files import available_cores

CHUNK = 500
"""rows per request"""
MOST = 8
"""processes: each loads transformers and the tokenizer, but no torch"""

Work = Callable[[list[Any]], Any]


def usable_processes() -> int:
    """As many processes as there are cores that this process may use, at most ``MOST``."""
    return min(available_cores(), MOST)


def in_processes(work: Work, rows: Iterable[Any], processes: int) -> Generator[tuple[list[Any], Any], None, None]:
    """Chunks of rows, in order, each with the result of ``work``; in this process if there is one, or if it can't be pickled.

    An error while reading the rows is raised after the results of the rows before it.

    Raises SurefootError if a process ends early.
    """
    workers = [] if processes < 2 else _started(work, processes)
    if not workers:
        yield from ((chunk, work(chunk)) for chunk, _ in _chunks(rows, stop_at_error=False))
        return
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)
    threads = ThreadPoolExecutor(len(workers))
    pending: deque[tuple[list[Any], Future[Any]]] = deque()

    def request(chunk: list[Any]) -> Any:
        worker = idle.get()
        try:
            return worker.request(chunk)
        finally:
            idle.put(worker)

    try:
        ended = None
        for chunk, error in _chunks(rows, stop_at_error=True):
            ended = error
            pending.append((chunk, threads.submit(request, chunk)))
            if len(pending) > 2 * len(workers):
                first, result = pending.popleft()
                yield first, result.result()
        while pending:
            first, result = pending.popleft()
            yield first, result.result()
        if ended is not None:
            raise ended
    finally:
        for worker in workers:
            worker.process.kill()  # ends the threads' requests too
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()


def _chunks(rows: Iterable[Any], stop_at_error: bool) -> Iterator[tuple[list[Any], SurefootError | None]]:
    """Lists of at most ``CHUNK`` rows; with the last one, the error that ended the rows, if ``stop_at_error``."""
    chunk: list[Any] = []
    try:
        for row in rows:
            chunk.append(row)
            if len(chunk) == CHUNK:
                yield chunk, None
                chunk = []
    except SurefootError as error:
        if not stop_at_error:
            if chunk:
                yield chunk, None
            raise
        yield chunk, error
        return
    if chunk:
        yield chunk, None


def _started(work: Work, processes: int) -> "list[_Worker]":
    """Processes that are ready to work; none if the work, or a class of it, can't be sent to them."""
    try:
        content = pickle.dumps(work)
    except Exception:
        return []
    with contextlib.ExitStack() as started:
        workers = []
        for _ in range(processes):
            workers.append(_Worker(content))
            started.callback(workers[-1].close)
        ready = [worker.is_ready() for worker in workers]
        if all(ready):
            started.pop_all()
            return workers
    return []


class _Worker:
    """One process, which handles one request at a time."""

    def __init__(self, work: bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "surefoot.language.data.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C must reach only the process that waits
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout
        self._send(work)

    def is_ready(self) -> bool:
        """Wait until the process has the work; False if it can't import what the work needs."""
        return self._replies.readline() == b"ready\n"

    def request(self, chunk: list[Any]) -> Any:
        """The result of a chunk."""
        self._send(pickle.dumps(chunk))
        try:
            return pickle.load(self._replies)
        except (EOFError, pickle.UnpicklingError):
            raise SurefootError(
                f"a process that tokenises rows ended early (code {self.process.wait()}); it may have run out of memory: free "
                "some, then repeat the command"
            ) from None

    def _send(self, content: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reply is missing then too
            self._requests.write(content)
            self._requests.flush()

    def close(self) -> None:
        """Kill the process, wait for its end and close its streams."""
        self.process.kill()
        self.process.wait()
        for stream in (self._requests, self._replies):
            with contextlib.suppress(BrokenPipeError):  # a request that was never read
                stream.close()


def main() -> None:
    """Compute requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep prints of libraries out of the replies
    work = pickle.load(sys.stdin.buffer)
    replies.write(b"ready\n")
    replies.flush()
    while True:
        try:
            chunk = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(work(chunk), replies, pickle.HIGHEST_PROTOCOL)
        replies.flush()


if __name__ == "__main__":
    main()
