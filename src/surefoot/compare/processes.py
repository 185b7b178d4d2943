"""Do several works, such as trainings, in this process or in parallel in processes of their own, and show their progress."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from surefoot.errors import Interrupted, SurefootError, in_command
from surefoot.processes import Child, held_back, let_in, parent_gone
from surefoot.processes import end as end_children
from surefoot.signals import SignalHandler
from surefoot.terminal import Output, is_terminal, visible_lines

PROGRESS_EVERY = 60.0
"""seconds between lines of progress while nothing finishes"""


@dataclass(frozen=True)
class Parent:
    """The process that started a work, from inside the work."""

    step: Callable[[str, int], None]
    """set the number of steps that a part has done"""
    print: Callable[[str], None]
    """print a line"""
    stopped: Callable[[], bool] = lambda: False
    """whether the parent is gone, and the work should save and stop"""


Work = Callable[[Parent], Any]
"""a work; in parallel it is pickled, and so is its result"""
Finished = Callable[[str, Any], None]
"""called with the name and the result of a work"""
Failed = Callable[[str, str], None]
"""called with the name and the error of a work"""


def run_works(works: Mapping[str, Work], jobs: int, progress: "OverallProgress", finished: Finished, failed: Failed) -> None:
    """Do every work, ``jobs`` at a time; more than one at a time in separate processes. A failed one doesn't stop the others.

    Raises Interrupted after a signal, when the works that were running have saved.
    """
    if jobs > 1:
        _in_parallel(works, jobs, progress, finished, failed)
        return
    for name, work in works.items():
        try:
            result = work(Parent(progress.step, progress.print))
        except SurefootError as error:
            failed(name, str(error))
        else:
            finished(name, result)


def _in_parallel(works: Mapping[str, Work], jobs: int, progress: "OverallProgress", finished: Finished, failed: Failed) -> None:
    """Do each work in its own process, ``jobs`` at a time. Forward a signal once; every work saves before it stops."""
    waiting, running = list(works), dict[Connection, tuple[str, Child]]()
    with SignalHandler() as signals:
        forwarded = False
        try:
            while running or (waiting and not signals.stop_requested):
                while waiting and len(running) < jobs and not signals.stop_requested:
                    name = waiting.pop(0)
                    with held_back():
                        child = Child(f"{__name__}:serve", works[name], survives=True)
                        running[child.connection] = (name, child)
                if signals.stop_requested and not forwarded:
                    forwarded = True
                    for _, child in running.values():
                        child.process.terminate()
                for connection in wait(list(running), timeout=0.2):
                    assert isinstance(connection, Connection)
                    _receive(connection, running, progress, finished, failed)
        finally:
            end([child for _, child in running.values()])
        if signals.stop_requested:
            raise Interrupted("stopped")


def end(children: Sequence[Child]) -> None:
    """Send SIGTERM to all processes, then wait for each, so that they save and stop at the same time."""
    for child in children:
        child.process.terminate()
    for child in children:
        child.process.wait()
    end_children(children)


def _receive(
    connection: Connection,
    running: dict[Connection, tuple[str, Child]],
    progress: "OverallProgress",
    finished: Finished,
    failed: Failed,
) -> None:
    """Handle one message of a child process, or its exit."""
    name, child = running[connection]
    try:
        kind, content = connection.recv()
    except EOFError:
        kind, content = "failed", None
    if kind == "steps":
        progress.step(*content)
        return
    if kind == "line":
        progress.print(content)
        return
    del running[connection]
    child.process.wait()
    end_children([child])
    if kind == "finished":
        finished(name, content)
    elif kind == "failed":
        failed(name, content or f"its process ended with {child.exit_cause()}")


def serve(connection: Connection, work: Work) -> None:
    """In a process: do a work, and send its progress and its result."""
    os.setpgrp()  # Ctrl-C on the terminal reaches only the parent, which forwards one signal
    let_in(signal.SIGINT)
    last_sent, last_name = 0.0, ""

    def send(kind: str, content: Any) -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            connection.send((kind, content))

    def step(name: str, steps: int) -> None:
        nonlocal last_sent, last_name
        if name != last_name or time.monotonic() - last_sent > 0.25:
            last_sent, last_name = time.monotonic(), name
            send("steps", (name, steps))

    try:
        with in_command():
            send("finished", work(Parent(step, lambda line: send("line", line), parent_gone.is_set)))
    except Interrupted:
        send("stopped", None)
    except SurefootError as error:
        send("failed", str(error))


# ---- progress ---------------------------------------------------------------------------------------------------------


class OverallProgress:
    """The progress of all parts of a comparison, in steps: a bar on a terminal, else one line per minute.

    total    steps of all parts
    stderr   print to stderr instead of stdout
    """

    def __init__(self, total: int, stderr: bool = False) -> None:
        self.total, self.done = total, dict[str, int]()
        stream = sys.stderr if stderr else sys.stdout
        shown: Any = Output(stream)
        self.console = Console(file=shown, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        if is_terminal(stream):
            columns = (TextColumn("{task.description}"), BarColumn(32), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("all runs", total=total, left="")
        self.started = self.last_line = time.monotonic()
        self.skipped = 0

    def __enter__(self) -> "OverallProgress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def skip(self, name: str, steps: int) -> None:
        """Count steps of a part that were done before; the estimate of the remaining time ignores them."""
        self.done[name] = steps
        self.skipped += steps

    def step(self, name: str, steps: int) -> None:
        """Set the number of steps that a part has done."""
        self.done[name] = steps
        if self.bar is not None:
            self.bar.start()  # only the first call has an effect
            self.bar.update(self.task, completed=sum(self.done.values()), left=self.left())
        elif time.monotonic() - self.last_line > PROGRESS_EVERY:
            self.print(f"{min(1.0, sum(self.done.values()) / self.total):.0%} of all steps; {self.left()}")

    def left(self) -> str:
        """An estimate of the remaining time, from the average speed so far; parts may differ in speed."""
        done = sum(self.done.values())
        if done <= self.skipped:
            return ""
        per_step = (time.monotonic() - self.started) / (done - self.skipped)
        seconds = round(per_step * max(0, self.total - done))
        return f"about {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self.last_line = time.monotonic()
        self.console.print(visible_lines(line), markup=False)
