"""What a model says while it is trained: ``samples/<steps>.jsonl`` of a run, and a few of its rows as a table or plain lines.

The text is a model's and may be anything: whatever would move a cursor or change a colour is shown as what it is.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from surefoot.errors import SurefootError
from surefoot.runs.folder import write_text
from surefoot.runs.paths import samples_in
from surefoot.terminal import visible

Sample = dict[str, Any]
"""``prompt`` and ``response``, ``reward`` and whatever else is known: numbers, or None"""

FEW = 3
SCORES = ("reward", "gold")
ARROW = " → "


class SampleFolder:
    """The samples of a run that is written to: one file for each evaluation, a JSON object per answer.

    folder   of the files; made with the first one
    steps    up to where the run stands: what an interrupted one wrote beyond is removed
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        for path in samples_in(folder):
            if int(path.stem) > steps:
                path.unlink()

    def write(self, steps: int, samples: Sequence[Sample]) -> None:
        """Write what was said after so many steps, whole or not at all. Raises SurefootError when the disk refuses."""
        path = self.folder / f"{steps}.jsonl"
        try:
            self.folder.mkdir(exist_ok=True)
            write_text(path, "".join(f"{json.dumps(sample, ensure_ascii=False)}\n" for sample in samples))
        except OSError as error:
            raise SurefootError(f"{path}: can't be written ({error.strerror}); free space and resume") from None


def some(samples: Sequence[Sample], count: int = FEW) -> list[Sample]:
    """A few, from all over the list; always the same ones of lists of one length."""
    count = min(count, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


def line_of(steps: int, sample: Sample, width: int = 160) -> str:
    """A sample as plain text of one line; ``width`` is what prompt and response get."""
    scores = "  ".join(f"{name} {_number(sample[name])}" for name in SCORES if name in sample)
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
        said = _fitted(_text_of(sample, width - taken), console, width - taken, lines)
        table.add_row(*(Text(numbers[name][row]) for name in names), said)
    return table


def _text_of(sample: Sample, width: int) -> Text:
    prompt = visible(_shortened(sample["prompt"], max(8, width // 2)))
    response = Text(visible(sample["response"])) if sample["response"] else Text("(nothing)", style="dim italic")
    return Text.assemble((prompt, "dim"), (ARROW, "dim"), response)


def _fitted(text: Text, console: Console, width: int, lines: int) -> Text:
    """Broken at words into lines, of which the last that fits ends in … where there are more."""
    width = max(8, width)
    found = text[: width * lines + 1].wrap(console, width, overflow="fold")
    if len(found) > lines:
        found[lines - 1].truncate(width - 1)
        found[lines - 1].append("…", style="dim")
    return Text("\n").join(found[:lines])


def _shortened(text: str, length: int) -> str:
    """Beginning and end: either may be what a prompt asks."""
    if len(text) <= length:
        return text
    end = length // 2
    return f"{text[: length - end - 1]}…{text[-end:]}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"
