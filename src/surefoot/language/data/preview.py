"""A look at data before training: rows with the tokens coloured by what is trained, lengths, and what is dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from surefoot.language.data.datasets import demonstrations, pairs, prompts
from surefoot.language.data.rows import Row, read_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.language_model import model_folder
from surefoot.language.models.loading import context_length, load_model
from surefoot.terminal import visible

TRAINED, READ = "bold green", "dim"


@dataclass(frozen=True)
class TokenSequence:
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
    tokens, limit = Tokens(tokenizer, loaded), max_length or context_length(loaded) or 1_000_000
    kind, sequences, left_out = _sequences(found, tokens, limit)
    panels = [
        Panel(coloured_tokens(one, tokens), title=one.label, title_align="left") for one in sequences if _within(one, rows)
    ]
    legend = Text.assemble(("trained", TRAINED), ", ", ("read only", READ))
    return Group(*panels, legend, _summary(kind, sequences, len(found), left_out))


def _sequences(rows: Sequence[Row], tokens: Tokens, limit: int) -> tuple[str, list[TokenSequence], dict[str, str]]:
    """What kind of data rows are, by the first one's columns; every sequence that is kept; and what is not, for the summary."""
    names = set(rows[0].columns)
    if names & {"chosen", "rejected"}:
        both = pairs(rows, tokens, limit)
        sides = (("chosen", both.chosen, both.chosen_trained), ("rejected", both.rejected, both.rejected_trained))
        found = [
            TokenSequence(ids[index], trained[index], f"{index + 1} {name}")
            for index in range(len(both.chosen))
            for name, ids, trained in sides
        ]
        equal = {"equal": f"{both.equal:,} whose answers are the same, dropped"} if both.equal else {}
        return "pairs", found, {"dropped": _too_long(both.dropped, limit), **equal, **_unused(both.unused)}
    if "prompt" in names and not names & {"completion", "messages", "text"}:
        asked = prompts(rows, tokens, limit)
        found = [TokenSequence(ids, [False] * len(ids), f"{i + 1}") for i, ids in enumerate(asked.ids)]
        columns = {"for rewards": ", ".join(asked.unused)} if asked.unused else {}
        return "prompts", found, {"dropped": _too_long(asked.dropped, limit), **columns}
    told = demonstrations(rows, tokens, limit)
    shown = [TokenSequence(*row, f"{i + 1}") for i, row in enumerate(zip(told.ids, told.trained, strict=True))]
    return "demonstrations", shown, {"dropped": _too_long(told.dropped, limit), **_unused(told.unused)}


def _too_long(dropped: int, limit: int) -> str:
    return f"{dropped:,} longer than {limit:,} tokens"


def _unused(names: Sequence[str]) -> dict[str, str]:
    return {"not used": ", ".join(names)} if names else {}


def _within(one: TokenSequence, rows: int) -> bool:
    return int(one.label.split()[0]) <= rows


def coloured_tokens(one: TokenSequence, tokens: Tokens) -> Text:
    """The tokens of a sequence, special ones by their names, in the colour of what happens to them."""
    text = Text()
    for trained, run in groupby(zip(one.ids, one.trained, strict=True), key=lambda pair: pair[1]):
        pieces = (visible(str(tokens.tokenizer.decode([token]))).replace("⏎", "⏎\n") for token, _ in run)
        text.append("".join(pieces), TRAINED if trained else READ)
    return text


def _summary(kind: str, sequences: Sequence[TokenSequence], rows: int, left_out: Mapping[str, str]) -> Table:
    lengths = sorted(len(one.ids) for one in sequences)
    trained = sum(sum(one.trained) for one in sequences)
    table = Table(show_header=False)
    for name, value in (
        (kind, f"{len({one.label.split()[0] for one in sequences}):,} of {rows:,} rows"),
        *left_out.items(),
        ("tokens", f"{sum(lengths):,}, of which {trained:,} trained ({trained / sum(lengths):.0%})"),
        ("length", f"{lengths[0]:,} to {lengths[-1]:,}, median {lengths[len(lengths) // 2]:,}"),
    ):
        table.add_row(name, Text(value))
    return table
