"""Preview data before training: rows with trained tokens coloured, lengths, and dropped rows."""

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
    """One sequence: its ids, which of them are trained, and its label."""

    ids: list[int]
    trained: list[bool]
    label: str


def preview(
    path: str | Path, model: str | Path, rows: int = 3, max_length: int | None = None, trust_remote_code: bool = False
) -> Group:
    """The output of ``surefoot data preview FILE --model M``: rows as training reads them.

    rows         number of rows shown, the first that are not dropped
    max_length   longer rows are dropped; the model's context if None

    Raises SurefootError for a model or data that training would reject.
    """
    all_rows = read_rows(path)
    loaded, tokenizer = load_model(model_folder(str(model)), trust_remote_code=trust_remote_code)
    tokens, limit = Tokens(tokenizer, loaded), max_length or context_length(loaded) or 1_000_000
    kind, sequences, dropped = _sequences(all_rows, tokens, limit)
    panels = [
        Panel(coloured_tokens(one, tokens), title=one.label, title_align="left") for one in sequences if _within(one, rows)
    ]
    legend = Text.assemble(("trained", TRAINED), ", ", ("read only", READ))
    return Group(*panels, legend, _summary(kind, sequences, len(all_rows), dropped))


def _sequences(rows: Sequence[Row], tokens: Tokens, limit: int) -> tuple[str, list[TokenSequence], dict[str, str]]:
    """The kind of data, by the first row's columns; the kept sequences; and lines about dropped and unused data."""
    names = set(rows[0].columns)
    if names & {"chosen", "rejected"}:
        both = pairs(rows, tokens, limit)
        sides = (("chosen", both.chosen, both.chosen_trained), ("rejected", both.rejected, both.rejected_trained))
        sequences = [
            TokenSequence(ids[index], trained[index], f"{index + 1} {name}")
            for index in range(len(both.chosen))
            for name, ids, trained in sides
        ]
        equal = {"equal": f"{both.equal:,} whose answers are the same, dropped"} if both.equal else {}
        return "pairs", sequences, {"dropped": _too_long(both.dropped, limit), **equal, **_unused(both.unused)}
    if "prompt" in names and not names & {"completion", "messages", "text"}:
        kept = prompts(rows, tokens, limit)
        sequences = [TokenSequence(ids, [False] * len(ids), f"{i + 1}") for i, ids in enumerate(kept.ids)]
        columns = {"for rewards": ", ".join(kept.unused)} if kept.unused else {}
        return "prompts", sequences, {"dropped": _too_long(kept.dropped, limit), **columns}
    shown = demonstrations(rows, tokens, limit)
    sequences = [TokenSequence(*row, f"{i + 1}") for i, row in enumerate(zip(shown.ids, shown.trained, strict=True))]
    return "demonstrations", sequences, {"dropped": _too_long(shown.dropped, limit), **_unused(shown.unused)}


def _too_long(dropped: int, limit: int) -> str:
    return f"{dropped:,} longer than {limit:,} tokens"


def _unused(names: Sequence[str]) -> dict[str, str]:
    return {"not used": ", ".join(names)} if names else {}


def _within(one: TokenSequence, rows: int) -> bool:
    return int(one.label.split()[0]) <= rows


def coloured_tokens(one: TokenSequence, tokens: Tokens) -> Text:
    """The tokens of a sequence, special tokens by name, coloured by whether they are trained."""
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
