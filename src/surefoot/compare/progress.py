"""What one sees of many trainings: a plain line for each that is finished, and how far all of them are."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from surefoot.core.rollout import LearnerState, Metrics
from surefoot.runs.events import Sample
from surefoot.terminal import visible_lines

EVERY = 60.0
"""seconds between plain lines while nothing finishes"""


class Overall:
    """The progress of several parts that are counted in steps.

    total    steps of all parts
    stderr   write there, because stdout is for a program to read

    On a terminal a bar is redrawn in place below the lines; elsewhere a plain line says the same once a minute.
    """

    def __init__(self, total: int, stderr: bool = False) -> None:
        self.total, self.done = total, dict[str, int]()
        stream = sys.stderr if stderr else sys.stdout
        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        if stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(32), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("all trainings", total=total, left="")
        self.began = self.told = time.monotonic()
        self.skipped = 0

    def skip(self, name: str, steps: int) -> None:
        """This part had come so far before; its steps tell nothing about the speed of what is to come."""
        self.done[name] = steps
        self.skipped += steps

    def step(self, name: str, steps: int) -> None:
        """This part has come so far."""
        self.done[name] = steps
        if self.bar is not None:
            self.bar.start()  # not before: nothing may have begun yet. Once is enough, more does nothing
            self.bar.update(self.task, completed=sum(self.done.values()), left=self.left())
        elif time.monotonic() - self.told > EVERY:
            self.say(f"{min(1.0, sum(self.done.values()) / self.total):.0%} of all steps; {self.left()}")

    def left(self) -> str:
        """About how long the rest takes, by the speed since the beginning; an estimate, since parts differ in speed."""
        done = sum(self.done.values())
        if done <= self.skipped:
            return ""
        per_step = (time.monotonic() - self.began) / (done - self.skipped)
        seconds = round(per_step * max(0, self.total - done))
        return f"about {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"

    def say(self, line: str) -> None:
        """A line that stays."""
        self.told = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # whoever listened has gone; the work goes on
            self.console.print(visible_lines(line), markup=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()


class Reporting:
    """The display of one training among several: it passes on how far it is, and its messages."""

    def __init__(self, on_steps: Callable[[int], None], on_line: Callable[[str], None]) -> None:
        self.on_steps, self.on_line = on_steps, on_line

    def show(self, state: LearnerState, metrics: Metrics) -> None:
        self.on_steps(state.steps)

    def samples(self, steps: int, samples: Sequence[Sample]) -> None:
        pass

    def say(self, line: str) -> None:
        self.on_line(line)

    def close(self) -> None:
        pass
