"""A function of rows, computed by several processes in the order of the rows."""

import contextlib
import math
import os
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

from surefoot.errors import SurefootError
from surefoot.files import available_cores
from surefoot.processes import MAIN, Child, ChildEnded, end, let_in
from surefoot.signals import STOPPING

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
    errors: list[SurefootError] = []
    chunks = _chunks(rows, errors)
    children = [] if processes < 2 else _started(work, processes)
    pending: deque[list[Any]] = deque()
    """what each child is working on, in turn"""
    try:
        if not children:
            yield from ((chunk, work(chunk)) for chunk in chunks)
        for number, chunk in enumerate(chain(chunks, [[]] * len(children))):  # the last ones only fetch results
            child = children[number % len(children)]
            done = pending.popleft() if len(pending) == len(children) else []
            result = _result(child) if done else None
            pending.append(chunk)
            if chunk:
                with contextlib.suppress(OSError):  # it has ended, and gives no result
                    child.connection.send(chunk)
            if done:
                yield done, result
    finally:
        end(children)
    if errors:
        raise errors[0]


def _chunks(rows: Iterable[Any], errors: list[SurefootError]) -> Iterator[list[Any]]:
    """Lists of at most ``CHUNK`` rows; ``errors`` gets the one that ended the rows."""
    chunk: list[Any] = []
    try:
        for row in rows:
            chunk.append(row)
            if len(chunk) == CHUNK:
                yield chunk
                chunk = []
    except SurefootError as error:
        errors.append(error)
    if chunk:
        yield chunk


def _started(work: Work, processes: int) -> list[Child]:
    """Processes that are ready to work; none if the work, or a class of it, can't be sent to them."""
    try:
        content = pickle.dumps(work)
    except Exception:
        return []
    if MAIN.encode() in content:  # the processes would run the script again
        return []
    with contextlib.ExitStack() as started:
        children: list[Child] = []
        started.callback(end, children)
        for _ in range(processes):
            children.append(Child(f"{__name__}:serve", content, silent=True))
        with contextlib.suppress(ChildEnded):
            for child in children:
                child.receive(math.inf)
            started.pop_all()
            return children
    return []


def _result(child: Child) -> Any:
    try:
        return child.receive(math.inf)
    except ChildEnded:
        raise SurefootError(
            f"a process that tokenises rows ended early ({child.exit_cause()}); it may have run out of memory: free some, then "
            "repeat the command"
        ) from None


def serve(connection: "Connection[Any, Any]", content: bytes) -> None:
    """In a process: say whether the work can be imported, then compute chunks until the pipe closes."""
    let_in(*STOPPING)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        work = pickle.loads(content)
    except Exception:
        return
    connection.send(True)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(work(connection.recv()))
