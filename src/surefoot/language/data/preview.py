"""Preview data before training: rows with trained tokens coloured, lengths, and dropped rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from surefoot.language.data.cache import lengths_of
from surefoot.language.data.datasets import ControlPolicy, demonstrations, labelled, pairs, prompts, stepped
from surefoot.language.data.shapes import is_labelled, paired, shape_of
from surefoot.language.data.sources import Source, open_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.language_model import model_folder
from surefoot.language.models.loading import context_length, load_model
from surefoot.runs.hub import is_hub_name
from surefoot.terminal import visible

TRAINED, READ = "bold green", "dim"


@dataclass(frozen=True)
class TokenSequence:
    """One sequence: its ids, which of them are trained, and its label."""

    ids: list[int]
    trained: list[bool]
    label: str


@dataclass(frozen=True)
class Summary:
    """All kept rows in numbers.

    kind       what the rows are
    kept       the number of rows that are kept, of ``rows``
    lengths    the lengths of their sequences
    trained    the number of trained ids
    left_out   name and text of each line about dropped and unused data
    """

    kind: str
    kept: int
    rows: int
    lengths: Sequence[int]
    trained: int
    left_out: Mapping[str, str]


def preview(
    path: str | Path,
    model: str | Path,
    rows: int = 3,
    max_length: int | None = None,
    trust_remote_code: bool = False,
    columns: Mapping[str, str] | None = None,
    control: ControlPolicy = "split",
) -> Group:
    """The output of ``surefoot data preview FILE --model M``: rows as training reads them.

    rows         number of rows shown, the first that are not dropped
    max_length   longer rows are dropped; the model's context if None
    columns      as ``data.columns``
    control      as ``data.control_tokens``

    Raises SurefootError for a model or data that training would reject.
    """
    source = open_rows(path, columns)
    first = next(iter(source)).columns
    loaded, tokenizer = load_model(model_folder(str(model)), trust_remote_code=trust_remote_code)
    tokens, limit = Tokens(tokenizer, loaded), max_length or context_length(loaded) or 1_000_000
    shown, summary = _sequences(source, first, tokens, limit, rows, control)
    panels = [Panel(coloured_tokens(one, tokens), title=one.label, title_align="left") for one in shown]
    legend = Text.assemble(("trained", TRAINED), ", ", ("read only", READ))
    shape = shape_of(first)
    origin = [Text(f"{source.name}: {shape}, read as {summary.kind}")] if shape or is_hub_name(path) else []
    return Group(*panels, legend, *origin, _table(summary))


def _sequences(
    rows: Source, first: Mapping[str, Any], tokens: Tokens, limit: int, count: int, control: ControlPolicy
) -> tuple[list[TokenSequence], Summary]:
    """The first kept sequences, and a summary of all. The columns of the first row show what the rows are."""
    names = set(first)
    if is_labelled(first):
        return _labelled_sequences(rows, tokens, limit, count, control)
    if names & {"chosen", "rejected"}:
        both = pairs(rows, tokens, limit, control=control)
        sides = (("chosen", both.chosen, both.chosen_trained), ("rejected", both.rejected, both.rejected_trained))
        shown = [
            TokenSequence(ids[index], trained[index], f"{index + 1} {name}")
            for index in range(min(count, len(both.chosen)))
            for name, ids, trained in sides
        ]
        equal = {"equal": f"{both.equal:,} whose answers are the same, dropped"} if both.equal else {}
        lengths = [length for _, ids, _ in sides for length in lengths_of(ids)]
        trained = sum(sum(row) for _, _, side in sides for row in side)
        left_out = {"dropped": _too_long(both.dropped, limit), **equal, **_noted(both.notes), **_unused(both.unused)}
        return shown, Summary(
            "pairs", len(both.chosen), len(both.chosen) + both.dropped + both.equal, lengths, trained, left_out
        )
    if {"completions", "labels"} <= names:
        return _stepped_sequences(rows, tokens, limit, count, control)
    if _is_prompt(names):
        kept = prompts(rows, tokens, limit, control=control)
        shown = [TokenSequence(ids, [False] * len(ids), f"{i + 1}") for i, ids in enumerate(kept.ids[:count])]
        columns = {"for rewards": ", ".join(kept.unused)} if kept.unused else {}
        left_out = {"dropped": _too_long(kept.dropped, limit), **columns, **_noted(kept.notes)}
        return shown, Summary("prompts", len(kept.ids), len(kept.ids) + kept.dropped, lengths_of(kept.ids), 0, left_out)
    made = demonstrations(rows, tokens, limit, control=control)
    some = zip(made.ids[:count], made.trained[:count], strict=True)
    shown = [TokenSequence(*row, f"{i + 1}") for i, row in enumerate(some)]
    left_out = {"dropped": _too_long(made.dropped, limit), **_noted(made.notes), **_unused(made.unused)}
    trained = sum(map(sum, made.trained))
    return shown, Summary(
        "demonstrations", len(made.ids), len(made.ids) + made.dropped, lengths_of(made.ids), trained, left_out
    )


def _labelled_sequences(
    rows: Source, tokens: Tokens, limit: int, count: int, control: ControlPolicy
) -> tuple[list[TokenSequence], Summary]:
    """The first labelled answers, and a summary of all, with the number of pairs that they make."""
    made = labelled(rows, tokens, limit, control=control)
    some = zip(made.ids[:count], made.trained[:count], made.good[:count], strict=True)
    shown = [TokenSequence(ids, trained, f"{i + 1} {'good' if good else 'bad'}") for i, (ids, trained, good) in enumerate(some)]
    kept, good = len(made.ids), sum(made.good)
    left_out = {
        "labels": f"{good:,} good, {kept - good:,} bad, for preference.loss = 'kto' or 'binary'",
        "pairs": f"{sum(1 for _ in paired(rows, [])):,}, for the other losses",
        "dropped": _too_long(made.dropped, limit),
        **_noted(made.notes),
        **_unused(made.unused),
    }
    trained = sum(map(sum, made.trained))
    return shown, Summary("labelled answers", kept, kept + made.dropped, lengths_of(made.ids), trained, left_out)


def _stepped_sequences(
    rows: Source, tokens: Tokens, limit: int, count: int, control: ControlPolicy
) -> tuple[list[TokenSequence], Summary]:
    """The first answers in steps, whose last tokens count as trained, and a summary of all."""
    made = stepped(rows, tokens, limit, control=control)
    scored = [[place in ends for place in range(len(ids))] for ids, ends in zip(made.ids, map(set, made.ends), strict=True)]
    shown = [
        TokenSequence(ids, trained, f"{i + 1} {' '.join('good' if x else 'bad' for x in good)}")
        for i, (ids, trained, good) in enumerate(zip(made.ids[:count], scored[:count], made.good[:count], strict=True))
    ]
    steps, good_ones = sum(map(len, made.good)), sum(map(sum, made.good))
    left_out = {
        "labels": f"{good_ones:,} good and {steps - good_ones:,} bad steps, for preference.loss = 'steps'",
        "dropped": _too_long(made.dropped, limit),
        **_noted(made.notes),
        **_unused(made.unused),
    }
    kept = len(made.ids)
    return shown, Summary("answers in steps", kept, kept + made.dropped, lengths_of(made.ids), steps, left_out)


def _is_prompt(names: set[str]) -> bool:
    """Whether rows with these columns have no answer."""
    if "instruction" in names and "prompt" not in names:
        return "output" not in names
    return "prompt" in names and not names & {"completion", "messages", "text"}


def _too_long(dropped: int, limit: int) -> str:
    return f"{dropped:,} longer than {limit:,} tokens"


def _noted(notes: Sequence[str]) -> dict[str, str]:
    return {"note": "\n".join(note.partition(": ")[2] for note in notes)} if notes else {}


def _unused(names: Sequence[str]) -> dict[str, str]:
    return {"not used": ", ".join(names)} if names else {}


def coloured_tokens(one: TokenSequence, tokens: Tokens) -> Text:
    """The tokens of a sequence, special tokens by name, coloured by whether they are trained."""
    text = Text()
    for trained, run in groupby(zip(one.ids, one.trained, strict=True), key=lambda pair: pair[1]):
        pieces = (visible(str(tokens.tokenizer.decode([token]))).replace("⏎", "⏎\n") for token, _ in run)
        text.append("".join(pieces), TRAINED if trained else READ)
    return text


def _table(summary: Summary) -> Table:
    lengths = sorted(summary.lengths)
    table = Table(show_header=False)
    for name, value in (
        (summary.kind, f"{summary.kept:,} of {summary.rows:,} rows"),
        *summary.left_out.items(),
        ("tokens", f"{sum(lengths):,}, of which {summary.trained:,} trained ({summary.trained / sum(lengths):.0%})"),
        ("length", f"{lengths[0]:,} to {lengths[-1]:,}, median {lengths[len(lengths) // 2]:,}"),
    ):
        table.add_row(name, Text(value))
    return table
