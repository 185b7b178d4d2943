"""A look at data before training: rows with the tokens coloured by what is trained, lengths, and what is dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from surefoot.language.data import demonstrations, pairs, prompts, read_rows
from surefoot.language.models import context_of, load_model
from surefoot.language.rows import Row
from surefoot.language.tokens import Tokens
from surefoot.language.trained import model_folder
from surefoot.run.visible import visible

TRAINED, READ = "bold green", "dim"


@dataclass(frozen=True)
class Shown:
    """One sequence: its ids, which of them are trained, and what it is of its row."""

    ids: list[int]
    trained: list[bool]
    label: str


def preview(
    path: str | Path, model: str | Path, rows: int = 3, max_length: int | None = None, trust_remote_code: bool = False
) -> Group:
    """What training would see of a file: for ``surefoot data preview FILE --model M``.

    rows         how many are shown, the first that are not dropped
    max_length   beyond which rows are dropped; the model's context if None

    Raises SurefootError for a model or data that training would refuse too.
    """
    found = read_rows(path)
    loaded, tokenizer = load_model(model_folder(str(model)), trust_remote_code=trust_remote_code)
    tokens, limit = Tokens(tokenizer, loaded), max_length or context_of(loaded) or 1_000_000
    kind, sequences, dropped = _sequences(found, tokens, limit)
    panels = [Panel(coloured(one, tokens), title=one.label, title_align="left") for one in sequences if _within(one, rows)]
    legend = Text.assemble(("trained", TRAINED), ", ", ("read only", READ))
    return Group(*panels, legend, _summary(kind, sequences, len(found), dropped, limit))


def _sequences(rows: Sequence[Row], tokens: Tokens, limit: int) -> tuple[str, list[Shown], int]:
    """What kind of data rows are, by the first one's columns; every sequence that is kept; how many rows are not."""
    names = set(rows[0].columns)
    if names & {"chosen", "rejected"}:
        both = pairs(rows, tokens, limit)
        found = []
        for index, length in enumerate(both.prompt_lengths):
            for name, ids in (("chosen", both.chosen[index]), ("rejected", both.rejected[index])):
                found.append(Shown(ids, [i >= length for i in range(len(ids))], f"{index + 1} {name}"))
        return "pairs", found, both.dropped
    if "prompt" in names and not names & {"completion", "messages", "text"}:
        asked = prompts(rows, tokens, limit)
        return "prompts", [Shown(ids, [False] * len(ids), f"{i + 1}") for i, ids in enumerate(asked.ids)], asked.dropped
    told = demonstrations(rows, tokens, limit)
    shown = [Shown(*row, f"{i + 1}") for i, row in enumerate(zip(told.ids, told.trained, strict=True))]
    return "demonstrations", shown, told.dropped


def _within(one: Shown, rows: int) -> bool:
    return int(one.label.split()[0]) <= rows


def coloured(one: Shown, tokens: Tokens) -> Text:
    """The tokens of a sequence, special ones by their names, in the colour of what happens to them."""
    text = Text()
    for trained, run in groupby(zip(one.ids, one.trained, strict=True), key=lambda pair: pair[1]):
        pieces = (visible(str(tokens.tokenizer.decode([token]))).replace("⏎", "⏎\n") for token, _ in run)
        text.append("".join(pieces), TRAINED if trained else READ)
    return text


def _summary(kind: str, sequences: Sequence[Shown], rows: int, dropped: int, limit: int) -> Table:
    lengths = sorted(len(one.ids) for one in sequences)
    trained = sum(sum(one.trained) for one in sequences)
    table = Table(show_header=False)
    for name, value in (
        (kind, f"{rows - dropped:,} of {rows:,} rows"),
        ("dropped", f"{dropped:,} longer than {limit:,} tokens"),
        ("tokens", f"{sum(lengths):,}, of which {trained:,} trained ({trained / sum(lengths):.0%})"),
        ("length", f"{lengths[0]:,} to {lengths[-1]:,}, median {lengths[len(lengths) // 2]:,}"),
    ):
        table.add_row(name, value)
    return table
