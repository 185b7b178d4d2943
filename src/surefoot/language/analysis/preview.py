"""Preview data before training: rows with trained tokens coloured, lengths, and dropped rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from surefoot.language.data.cache import lengths_of
from surefoot.language.data.datasets import Mapped, Pairs, Tokenised, demonstrations, labelled, pairs, prompts, stepped
from surefoot.language.data.preparation import ControlPolicy
from surefoot.language.data.shapes import is_labelled, paired, shape_of
from surefoot.language.data.sources import Source, open_rows
from surefoot.language.data.tokens import Answers, Tokens
from surefoot.language.language_model import model_folder
from surefoot.language.models.loading import context_length, load_model
from surefoot.store.hub import is_hub_name
from surefoot.terminal import visible

TRAINED, READ = "bold green", "dim"


Sequences = list[tuple[Text, str]]
"""tokens, coloured by whether they are trained, each with a title"""


def preview(
    path: str | Path,
    model: str | Path,
    rows: int = 3,
    max_length: int | None = None,
    trust_remote_code: bool = False,
    columns: Mapping[str, str] | None = None,
    control: ControlPolicy = "split",
    answers: Answers = "template",
) -> Group:
    """The output of ``surefoot data preview FILE --model M``: rows as training reads them.

    rows         number of rows shown, the first that are not dropped
    max_length   longer rows are dropped; the model's context if None
    columns      as ``data.columns``
    control      as ``data.control_tokens``
    answers      as ``data.answers``

    Raises SurefootError for a model or data that training would reject.
    """
    source = open_rows(path, columns)
    first = next(iter(source)).columns
    loaded, tokenizer = load_model(model_folder(str(model)), trust_remote_code=trust_remote_code)
    tokens, limit = Tokens(tokenizer, loaded, answers=answers), max_length or context_length(loaded) or 1_000_000
    kind, shown, table = _sequences(source, first, tokens, limit, rows, control)
    panels = [Panel(text, title=title, title_align="left") for text, title in shown]
    legend = Text.assemble(("trained", TRAINED), ", ", ("read only", READ))
    shape = shape_of(first)
    origin = [Text(f"{source.name}: {shape}, read as {kind}")] if shape or is_hub_name(path) else []
    return Group(*panels, legend, *origin, table)


def _sequences(
    rows: Source, first: Mapping[str, Any], tokens: Tokens, limit: int, count: int, control: ControlPolicy
) -> tuple[str, Sequences, Table]:
    """What the rows are, by the columns of the first one; the first kept sequences; and a summary of all."""
    names = set(first)
    extra: dict[str, str] = {}
    if is_labelled(first):
        answers = labelled(rows, tokens, limit, control=control)
        labels = ["good" if good else "bad" for good in answers.good[:count]]
        good = sum(answers.good)
        extra["labels"] = f"{good:,} good, {len(answers.good) - good:,} bad, for preference.loss = 'kto' or 'binary'"
        extra["pairs"] = f"{sum(1 for _ in paired(rows, [])):,}, for the other losses"
        return _shown(tokens, "labelled answers", answers, answers.ids, answers.trained, labels, limit, extra)
    if names & {"chosen", "rejected"}:
        return _pair_sequences(pairs(rows, tokens, limit, control=control), tokens, limit, count)
    if {"completions", "labels"} <= names:
        steps = stepped(rows, tokens, limit, control=control)
        scored = [[at in ends for at in range(len(ids))] for ids, ends in zip(steps.ids, map(set, steps.ends), strict=True)]
        labels = [" ".join("good" if x else "bad" for x in good) for good in steps.good[:count]]
        good, every = sum(map(sum, steps.good)), sum(map(len, steps.good))
        extra["labels"] = f"{good:,} good and {every - good:,} bad steps, for preference.loss = 'steps'"
        return _shown(tokens, "answers in steps", steps, steps.ids, scored, labels, limit, extra)
    if _is_prompt(names):
        kept = prompts(rows, tokens, limit, control=control)
        if kept.unused:
            extra["for rewards"] = ", ".join(kept.unused)
        untrained = Mapped(kept.ids, lambda ids: [False] * len(ids))
        return _shown(tokens, "prompts", replace(kept, unused=()), kept.ids, untrained, [""] * count, limit, extra)
    made = demonstrations(rows, tokens, limit, control=control)
    if {"prompt", "completion", "label"} <= names and not is_labelled(first, numbers=True):
        extra["label"] = f"{first['label']!r:.40} is not true or false: no label for preference.loss = 'kto' or 'binary'"
    return _shown(tokens, "demonstrations", made, made.ids, made.trained, [""] * count, limit, extra)


def _shown(
    tokens: Tokens,
    kind: str,
    made: Tokenised,
    ids: Sequence[list[int]],
    trained: Sequence[list[bool]],
    labels: Sequence[str],
    limit: int,
    extra: Mapping[str, str],
) -> tuple[str, Sequences, Table]:
    """The first sequences, one for each label, and a summary of all."""
    some = zip(ids[: len(labels)], trained[: len(labels)], labels, strict=False)
    shown = [(coloured_tokens(row, marks, tokens), f"{i} {label}".rstrip()) for i, (row, marks, label) in enumerate(some, 1)]
    left_out = {**extra, **_left_out(made, limit)}
    return kind, shown, _table(kind, len(ids), made.dropped, lengths_of(ids), sum(map(sum, trained)), left_out)


def _pair_sequences(both: Pairs, tokens: Tokens, limit: int, count: int) -> tuple[str, Sequences, Table]:
    """The first sequences and a summary for pairs, whose sides are sequences of their own."""
    sides = (("chosen", both.chosen, both.chosen_trained), ("rejected", both.rejected, both.rejected_trained))
    shown = [
        (coloured_tokens(ids[index], trained[index], tokens), f"{index + 1} {name}")
        for index in range(min(count, len(both.chosen)))
        for name, ids, trained in sides
    ]
    equal = {"equal": f"{both.equal:,} whose answers are the same, dropped"} if both.equal else {}
    lengths = [length for _, ids, _ in sides for length in lengths_of(ids)]
    trained = sum(sum(row) for _, _, side in sides for row in side)
    left_out = _left_out(both, limit) | equal
    return "pairs", shown, _table("pairs", len(both.chosen), both.dropped + both.equal, lengths, trained, left_out)


def _left_out(made: Tokenised, limit: int) -> dict[str, str]:
    """Name and text of each line about dropped and unused data."""
    lines = {"dropped": f"{made.dropped:,} longer than {limit:,} tokens"}
    if made.notes:
        lines["note"] = "\n".join(note.partition(": ")[2] for note in made.notes)
    if made.unused:
        lines["not used"] = ", ".join(made.unused)
    return lines


def _is_prompt(names: set[str]) -> bool:
    """Whether rows with these columns have no answer."""
    if "instruction" in names and "prompt" not in names:
        return "output" not in names
    return "prompt" in names and not names & {"completion", "messages", "text"}


def coloured_tokens(ids: Sequence[int], marks: Sequence[bool], tokens: Tokens) -> Text:
    """The tokens of a sequence, special tokens by name, coloured by whether they are trained."""
    text = Text()
    for trained, run in groupby(zip(ids, marks, strict=True), key=lambda pair: pair[1]):
        pieces = (visible(str(tokens.tokenizer.decode([token]))).replace("⏎", "⏎\n") for token, _ in run)
        text.append("".join(pieces), TRAINED if trained else READ)
    return text


def _table(kind: str, kept: int, dropped: int, lengths: Sequence[int], trained: int, left_out: Mapping[str, str]) -> Table:
    """All kept rows in numbers: the lengths of their sequences, the number of trained ids, and what was left out."""
    lengths = sorted(lengths)
    table = Table(show_header=False)
    for name, value in (
        (kind, f"{kept:,} of {kept + dropped:,} rows"),
        *left_out.items(),
        ("tokens", f"{sum(lengths):,}, of which {trained:,} trained ({trained / sum(lengths):.0%})"),
        ("length", f"{lengths[0]:,} to {lengths[-1]:,}, median {lengths[len(lengths) // 2]:,}"),
    ):
        table.add_row(name, Text(value))
    return table
