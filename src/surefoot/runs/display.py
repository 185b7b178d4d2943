"""Displays of a run: a live table on a terminal, plain lines in a pipe. Both explain metrics outside their healthy range, and
show a few samples of a language model.
"""

import io
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.core.rollout import LearnerState, Metrics
from surefoot.diagnostics.findings import out_of_range
from surefoot.diagnostics.metrics import SHOWN, shown, title_of
from surefoot.store.events import EvaluationEnd, Event, InitialSamples, IterationEnd, Message, Phase, RunEnd, RunStart, Sample
from surefoot.terminal import LOG_COLUMNS, Output, is_terminal, print_line, visible, visible_lines, wrapped

EVALUATION = ("evaluation_", "held_out_")
"""prefixes of an evaluation's metrics, which stay on display until the next one"""
EVALUATING = "evaluating"
ROUTINE = ("collecting", "learning")
"""phases of every iteration"""
PATIENCE = 2.0
"""seconds after which plain lines name what the run does"""
FEW = 3
"""samples that are shown of each evaluation"""
SCORES = ("reward", "gold")
ARROW = " → "
CELL = '<pre style="line-height: normal">{code}</pre>'
"""the HTML of a table in a notebook"""
METRIC_COLUMNS, SAMPLE_COLUMNS, SAMPLE_LINES = 72, 48, 4
"""columns of the metrics and least columns of the samples when side by side; most lines of a sample"""


class Display:
    """A listener that shows a run to a person. This one shows nothing; the others override what they show."""

    def __init__(self) -> None:
        self.clock, self.becomes = _Clock(), 0

    def __call__(self, event: Event) -> None:
        match event:
            case RunStart():
                self.clock.every, self.becomes = event.evaluate_every, event.becomes
            case Phase():
                self.clock.phase(event.text)
                self.phase(event.text)
            case Message():
                self.message(event.text)
            case InitialSamples():
                self.samples(event.state.steps, event.samples)
            case EvaluationEnd() if event.report.samples:
                self.samples(event.state.steps, event.report.samples)
            case IterationEnd():
                self.show(event.state, event.metrics)
            case RunEnd():
                self.close()

    def total(self, state: LearnerState) -> int:
        """The budget in whole iterations."""
        return self.becomes or state.total_steps

    def show(self, state: LearnerState, metrics: Metrics) -> None:
        """Show one more iteration."""

    def samples(self, steps: int, samples: Sequence[Sample]) -> None:
        """Take the samples of an evaluation; the iteration is shown after them."""

    def phase(self, text: str) -> None:
        """Show what the run does now; empty: nothing more."""

    def message(self, line: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Quiet(Display):
    """Prints nothing but messages."""

    def message(self, line: str) -> None:
        print_line(line)


class Lines(Quiet):
    """Prints plain lines every few seconds, and at the end; none is longer than ``LOG_COLUMNS``, except single words."""

    def __init__(self, title: str, every: float = 5.0) -> None:
        super().__init__()
        self.title, self.every, self.last = title, every, -float("inf")
        self.waiting: threading.Timer | None = None
        self.latest: tuple[int, list[str]] = (0, [])
        """the steps of the samples that are not shown yet, and their lines"""

    def message(self, line: str) -> None:
        for part in line.splitlines():
            super().message(wrapped(part))

    def phase(self, text: str) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None
        if text and (text not in ROUTINE or self.last == -float("inf")):
            self.waiting = threading.Timer(PATIENCE, self.message, [f"{text} …"])
            self.waiting.daemon = True
            self.waiting.start()

    def samples(self, steps: int, samples: Sequence[Sample]) -> None:
        self.latest = steps, [line_of(steps, sample) for sample in some(samples)]

    def show(self, state: LearnerState, metrics: Metrics) -> None:
        self.clock.tick(state)
        now = time.monotonic()
        if now - self.last < self.every and state.steps < state.total_steps:
            return
        if self.last == -float("inf"):  # not earlier: until now the recipe could be rejected
            self.message(self.title)
        self.last = now
        if self.latest[0] < state.steps:
            self._show_samples()
        parts = [f"step {state.steps:,}/{self.total(state):,}"]
        labels = shown(metrics).items()
        parts += [f"{label} {form.format(metrics[name])}" for name, (label, form) in labels if metrics.get(name) is not None]
        for line in joined([*parts, f"left {self.clock.left(state)}"]):
            self.message(line)
        for finding in out_of_range(metrics, state.steps):
            self.message(f"  ! {title_of(finding.name)}: {finding.what}")
        self._show_samples()

    def _show_samples(self) -> None:
        steps, lines = self.latest
        for line in lines:
            self.message(line)
        self.latest = steps, []


class Dashboard(Display):
    """A table redrawn in place. Metrics outside their healthy range are yellow, with the reason."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        super().__init__()
        self.title, self.doing = visible_lines(title), _Doing("")
        self.evaluated: Metrics = {}
        self.latest: tuple[int, Sequence[Sample]] | None = None
        """the steps and samples of the last evaluation"""
        self.new = False
        """whether these samples have not been shown yet"""
        stdout: Any = Output(sys.stdout)
        first = Group(Text(self.title, style="bold"), self.doing)
        self.live = Live(first, console=console or Console(file=stdout), refresh_per_second=8, transient=False)

    def show(self, state: LearnerState, metrics: Metrics) -> None:
        self.live.start()  # not earlier: until now the recipe could be rejected
        self._take(state, metrics)
        drawn = self._draw(state, metrics)
        if self.latest is None:
            self.live.update(drawn)
            return
        page = _Page(drawn, *self.latest)
        console = self.live.console
        if self.new and page.layout(console)[0] == "above":
            console.print(sample_table(console, *self.latest, console.width, 2))
        self.new = False
        self.live.update(page)

    def samples(self, steps: int, samples: Sequence[Sample]) -> None:
        self.latest, self.new = (steps, samples), True

    def _take(self, state: LearnerState, metrics: Metrics) -> None:
        self.clock.tick(state)
        self.evaluated |= {name: value for name, value in metrics.items() if name.startswith(EVALUATION)}

    def _draw(self, state: LearnerState, metrics: Metrics) -> Group:
        metrics = {**metrics, **self.evaluated}
        unhealthy = {finding.name: finding.what for finding in out_of_range(metrics, state.steps)}
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", style="dim")
        table.add_column(justify="right", min_width=10)
        table.add_column(style="yellow", max_width=70)
        for name, (label, form) in shown(metrics).items():
            if name not in metrics:  # this algorithm has no such metric
                continue
            value = metrics[name]
            text = "–" if value is None else form.format(value)
            table.add_row(label, Text(text, style="bold yellow" if name in unhealthy else "bold"), unhealthy.get(name, ""))
        for name in (name for name in unhealthy if name not in SHOWN):
            table.add_row(title_of(name), Text(f"{metrics[name]:.4g}", style="bold yellow"), unhealthy[name])
        progress = Table.grid(padding=(0, 2))
        progress.add_row(
            f"step {state.steps:,} of {self.total(state):,}",
            ProgressBar(total=self.total(state), completed=min(state.steps, self.total(state)), width=32),
            f"{self.clock.left(state)} left",
        )
        return Group(Text(self.title, style="bold"), progress, table, self.doing)

    def phase(self, text: str) -> None:
        self.doing.text, self.doing.since = text, time.monotonic()
        if text:
            self.live.start()

    def message(self, line: str) -> None:
        self.live.console.print(visible_lines(line), highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.live.stop()


class NotebookDashboard(Dashboard):
    """The live table in the output of a notebook's cell, redrawn in place twice a second at most."""

    def __init__(self, title: str, every: float = 0.5) -> None:
        super().__init__(title)
        self.every, self.last = every, -float("inf")
        self.handle: Any = None

    def show(self, state: LearnerState, metrics: Metrics) -> None:
        self._take(state, metrics)
        now = time.monotonic()
        if now - self.last < self.every and state.steps < state.total_steps:
            return
        self.last = now
        console = Console(record=True, file=io.StringIO(), width=METRIC_COLUMNS + SAMPLE_COLUMNS, force_jupyter=False)
        console.print(self._draw(state, metrics))
        if self.latest is not None:
            console.print(sample_table(console, *self.latest, console.width, 2))
        html = console.export_html(inline_styles=True, code_format=CELL, clear=False)
        bundle = {"text/html": html, "text/plain": console.export_text()}
        if self.handle is None:
            from IPython import display

            shown: Any = display.display
            self.handle = shown(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)

    def phase(self, text: str) -> None:
        """Nothing: only the table is redrawn."""

    def message(self, line: str) -> None:
        print_line(line)


def display_here(title: str, always: bool = False) -> Display | None:
    """A live table in a terminal or a notebook. Elsewhere None, or plain lines if ``always``."""
    if _in_notebook():
        return NotebookDashboard(title)
    if is_terminal(sys.stdout):
        return Dashboard(title)
    return Lines(title) if always else None


def _in_notebook() -> bool:
    """Whether the code runs in a notebook's kernel, without importing IPython for that."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class _Doing:
    """A line with what the run does, once it takes over a second."""

    def __init__(self, text: str) -> None:
        self.text, self.since = text, 0.0

    def __rich__(self) -> Text:
        seconds = int(time.monotonic() - self.since)
        return Text(f"{self.text} … {seconds} s" if self.text and seconds else "", style="dim")


class _Page:
    """The table of metrics with samples below it, or beside it on a low and wide terminal. On a small terminal, the samples
    have been printed above.
    """

    def __init__(self, metrics: Group, steps: int, samples: Sequence[Sample]) -> None:
        self.metrics, self.steps, self.samples = metrics, steps, samples

    def layout(self, console: Console) -> tuple[Literal["below", "beside", "above"], int]:
        """Where the samples fit, and how many lines of each."""
        width, height = console.size
        free = height - len(console.render_lines(self.metrics, pad=False)) - 3  # a blank line, a heading, the cursor's line
        if free >= FEW:
            return "below", min(SAMPLE_LINES, free // FEW)
        if width >= SAMPLE_COLUMNS + METRIC_COLUMNS:
            return "beside", min(SAMPLE_LINES, max(1, (height - 3) // FEW))
        return "above", 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        where, lines = self.layout(console)
        if where == "below":
            yield Group(self.metrics, "", sample_table(console, self.steps, self.samples, console.width, lines))
        elif where == "beside":
            width = console.width - METRIC_COLUMNS - 2
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(width=METRIC_COLUMNS)
            grid.add_column(width=width)
            grid.add_row(self.metrics, sample_table(console, self.steps, self.samples, width, lines))
            yield grid
        else:
            yield self.metrics


class _Clock:
    """Time left, from the speed since this process began, and the mean time of the evaluations."""

    def __init__(self) -> None:
        self.every = 0
        """steps between evaluations"""
        self.started: tuple[float, int] | None = None
        self.per_step = 0.0
        self.evaluations: list[float] = []
        """their seconds"""
        self.evaluating: float | None = None
        self.paused = 0.0
        """seconds of evaluations since ``started``"""

    def phase(self, text: str) -> None:
        if self.evaluating is not None:
            self.evaluations.append(time.monotonic() - self.evaluating)
            self.paused += self.evaluations[-1]
        self.evaluating = time.monotonic() if text.startswith(EVALUATING) else None

    def tick(self, state: LearnerState) -> None:
        now = time.monotonic()
        if self.started is None:
            self.started, self.paused = (now, state.steps), 0.0
        elif state.steps > self.started[1]:
            self.per_step = (now - self.started[0] - self.paused) / (state.steps - self.started[1])

    def left(self, state: LearnerState) -> str:
        if not self.per_step:
            return "–"
        ahead = self._evaluations_ahead(state)
        each = sum(self.evaluations) / max(1, len(self.evaluations))
        seconds = round(self.per_step * max(0, state.total_steps - state.steps) + ahead * each)
        unknown = f" and {ahead} evaluation{'s' * (ahead > 1)}" if ahead and not self.evaluations else ""
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}{unknown}"

    def _evaluations_ahead(self, state: LearnerState) -> int:
        """Those at multiples of ``every``, and the one at the end."""
        if not self.every or state.steps >= state.total_steps:
            return 0
        return max(0, (state.total_steps - 1) // self.every - state.steps // self.every) + 1


def some(samples: Sequence[Sample]) -> list[Sample]:
    """A few, from all over the list; always the same ones of lists of one length."""
    count = min(FEW, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


def joined(parts: Sequence[str], width: int = LOG_COLUMNS) -> list[str]:
    """The parts in as few lines as hold them, two spaces between them; the second and later lines are indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"    {part}")
    return lines


def line_of(steps: int, sample: Sample) -> str:
    """A sample as plain text of one line."""
    scores = "  ".join(f"{name} {_number(sample[name])}" for name in SCORES if name in sample)
    width = LOG_COLUMNS - len(f"  step {steps:,}  {scores}  ")
    text = visible(f"{_shortened(sample['prompt'], width // 3)}{ARROW}{sample['response'][:width]}")
    return f"  step {steps:,}  {scores}  {text if len(text) <= width else text[: width - 1] + '…'}"


def sample_table(console: Console, steps: int, samples: Sequence[Sample], width: int, lines: int) -> Table:
    """A few samples below each other, each in so many lines at most; one line above them says what the columns are."""
    chosen = some(samples)
    names = [name for name in SCORES if name in chosen[0]]
    numbers = {name: [_number(sample[name]) for sample in chosen] for name in names}
    taken = sum(max(len(name), *map(len, numbers[name])) + 2 for name in names)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, justify="right", style="bold")
    table.add_column(Text(f"prompt{ARROW}response, at step {steps:,}"))
    for row, sample in enumerate(chosen):
        text = _fitted(_text_of(sample, width - taken), console, width - taken, lines)
        table.add_row(*(Text(numbers[name][row]) for name in names), text)
    return table


def _text_of(sample: Sample, width: int) -> Text:
    prompt = visible(_shortened(sample["prompt"], max(8, width // 2)))
    response = Text(visible(sample["response"])) if sample["response"] else Text("(nothing)", style="dim italic")
    return Text.assemble((prompt, "dim"), (ARROW, "dim"), response)


def _fitted(text: Text, console: Console, width: int, lines: int) -> Text:
    """The text wrapped at words; the last line that fits ends in … if there are more."""
    width = max(8, width)
    wrapped = text[: width * lines + 1].wrap(console, width, overflow="fold")
    if len(wrapped) > lines:
        wrapped[lines - 1].truncate(width - 1)
        wrapped[lines - 1].append("…", style="dim")
    return Text("\n").join(wrapped[:lines])


def _shortened(text: str, length: int) -> str:
    """Start and end of a text, since either may hold the question of a prompt."""
    if len(text) <= length:
        return text
    end = length // 2
    return f"{text[: length - end - 1]}…{text[-end:]}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"
