"""All rows of a source as token ids: in memory, or in the cache by several processes, with a tally of what was dropped.

Rows are read one at a time. Those of a large source are tokenised by several processes, into a cache on disk. Training begins
after the last row: rows are shuffled over all that are kept, and how many are kept is known only then.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from surefoot.errors import SurefootError
from surefoot.language import quiet_transformers
from surefoot.language.data.cache import Facts, NotJson, cached
from surefoot.language.data.chat import options_of
from surefoot.language.data.one_row import (
    demonstration_columns,
    demonstration_of,
    dialogue_of,
    pair_of,
    prompt_columns,
    prompt_of,
    unused_columns,
    used_columns,
)
from surefoot.language.data.processes import in_processes, usable_processes
from surefoot.language.data.rows import Row, text_or_messages
from surefoot.language.data.shapes import as_demonstration, as_pair, as_prompt, label_of, paired, steps_of, unpaired
from surefoot.language.data.sources import Source
from surefoot.language.data.steps import split_steps, step_tokens
from surefoot.language.data.tokens import Edits, Tokens

VERSION = 5
"""of what rows become; caches of another version are not read"""
LARGE = 32 * 10**6
"""bytes of rows from which on their ids are on disk instead of in memory"""
ControlPolicy = Literal["split", "keep", "reject"]


# ---- one row as its fields --------------------------------------------------------------------------------------------


def _make_demonstration(work: "_RowMaker", row: Row) -> tuple[Sequence[Any], int]:
    row = as_demonstration(row, work.chat)
    label = [[label_of(row)]] if work.kind == "labelled" else []
    work.look(row, (*demonstration_columns(row), *["label"] * len(label)))
    ids, trained = work.tokens.demonstration(demonstration_of(row, work.tokens))
    return (ids, trained, *label), len(ids)


def _make_pair(work: "_RowMaker", row: Row) -> tuple[Sequence[Any], int] | None:
    row = as_pair(row, work.chat)
    work.look(row, ("prompt", "chosen", "rejected"))
    ids, other, prompt_length, trained, trained_too = pair_of(row, work.tokens)
    return None if ids == other else ((ids, other, [prompt_length], trained, trained_too), max(len(ids), len(other)))


def _make_steps(work: "_RowMaker", row: Row) -> tuple[Sequence[Any], int]:
    steps, good = steps_of(row, work.separator)
    work.look(row, ("prompt", "completions", "labels"))
    before = work.tokens.encode_prompt(dialogue_of(row, text_or_messages(row, "prompt"), work.tokens))
    text = work.separator.join(steps)
    after = work.tokens.encode_completion(text)
    ends = step_tokens(work.tokens.decode, after, [step.end for step in split_steps(text, work.separator)])
    return ([*before, *after], [len(before) + end for end in ends], good), len(before) + len(after)


def _make_prompt(work: "_RowMaker", row: Row) -> tuple[Sequence[Any], int]:
    row = as_prompt(row, work.chat)
    columns = prompt_columns(row)
    work.look(row, columns)
    prompt, ids = prompt_of(row, work.tokens)
    others = {name: value for name, value in row.columns.items() if name not in columns}
    if len(ids) <= work.max_length:
        work.tally.columns.update(dict.fromkeys(others))
    plain = prompt if isinstance(prompt, str) else list(prompt)
    return (ids, {"prompt": plain, "options": dict(options_of(prompt)), "columns": others}), len(ids)


Made = tuple[Sequence[Any], int] | None
"""the fields of a row and its length; None for a pair of equal answers"""
FIELDS = {
    "demonstrations": {"ids": "ids", "trained": "flags"},
    "pairs": dict.fromkeys(("chosen", "rejected", "prompt_lengths"), "ids")
    | dict.fromkeys(("chosen_trained", "rejected_trained"), "flags"),
    "labelled": {"ids": "ids", "trained": "flags", "good": "flags"},
    "steps": {"ids": "ids", "ends": "ids", "good": "flags"},
    "prompts": {"ids": "ids", "row": "json"},
}
"""the fields of each kind of row, and what they contain, as in ``cached``"""
MAKERS: dict[str, Callable[["_RowMaker", Row], Made]] = {
    "demonstrations": _make_demonstration,
    "pairs": _make_pair,
    "labelled": _make_demonstration,
    "steps": _make_steps,
    "prompts": _make_prompt,
}


# ---- all rows ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What happened to the rows of a file. JSON can hold it."""

    file: str = ""
    rows: int = 0
    kept: int = 0
    dropped: int = 0
    """longer than the limit"""
    equal: int = 0
    """pairs of the same answer"""
    left_over: int = 0
    """labelled answers without a partner"""
    shortest: int | None = None
    split: int = 0
    """rows with control tokens in messages of others than the assistant"""
    literal: int = 0
    """rows with control tokens in plain text or in the assistant's messages"""
    omitted: int = 0
    """rows of which a part of an answer is not among the tokens"""
    part: str = ""
    """the first such part"""
    other_prompt: int = 0
    """rows that begin otherwise than the prompt of their answer"""
    unknown: int = 0
    """rows with characters that the tokenizer does not know"""
    unused: dict[str, None] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)
    """columns for reward functions"""

    def add(self, other: "Tally") -> None:
        """Add what was noticed in further rows."""
        for name in ("split", "literal", "omitted", "other_prompt", "unknown"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.part = self.part or other.part
        self.unused |= other.unused
        self.columns |= other.columns

    def notes(self, control: ControlPolicy) -> tuple[str, ...]:
        """Lines about rows that are trained otherwise than they read, and about labelled answers left out."""
        remedy = "train what the rows say with data.answers = 'row'"
        how = "text" if control == "split" else "control tokens"
        lines = (
            (self.split, f"rows with control tokens in messages, encoded as {how} (data.control_tokens={control!r})"),
            (self.literal, "rows with control tokens in plain text or answers, encoded as control tokens"),
            (self.omitted, f"rows with an answer of which the chat template omits a part, such as {self.part!r}; {remedy}"),
            (self.other_prompt, f"rows that go on otherwise than the prompt of a sampled answer; {remedy}"),
            (self.unknown, "rows with characters that the tokenizer does not know, encoded as its unknown token"),
            (self.left_over, "labelled answers left out, because their prompt has no answer with the other label"),
        )
        return tuple(f"{self.file}: {count} {what}" for count, what in lines if count)


class _RowMaker:
    """Makes fields of rows, and keeps a tally of what it noticed. It can be sent to another process.

    kind       what the rows become
    separator  of steps
    """

    def __init__(self, kind: str, tokens: Tokens, max_length: int, control: ControlPolicy, separator: str = "") -> None:
        self.kind, self.max_length, self.control, self.separator = kind, max_length, control, separator
        self.tokens = copy.copy(tokens)
        self.tokens.split = control != "keep"
        self.chat = bool(tokens.tokenizer.chat_template)
        unknown = tokens.tokenizer.unk_token_id
        self.unknown = None if unknown in (tokens.pad_id, *tokens.eos_ids) else unknown
        self.tally = Tally()
        self._read_keys: dict[str, bool] = {}

    def __call__(self, rows: list[Row]) -> tuple[list[Made], "Tally", str | None]:
        """The fields of some rows, the tally of these, and the error at the row after them, if there is one."""
        made: list[Made] = []
        self.tally = Tally()
        with quiet_transformers():  # the tokenizer warns of text longer than the context; such rows are counted here
            for row in rows:
                self.tokens.edits = Edits()
                try:
                    made.append(MAKERS[self.kind](self, row))
                except SurefootError as error:
                    return made, self.tally, f"{row.where}: {error}"
                of_row = () if made[-1] is None else zip(FIELDS[self.kind], made[-1][0], strict=True)
                self.tally.unknown += any(self.unknown in ids for name, ids in of_row if name in ("ids", "chosen", "rejected"))
                edits = self.tokens.edits
                self.tally.omitted += bool(edits.omitted)
                self.tally.part = self.tally.part or f"{edits.omitted:.60}"
                self.tally.other_prompt += edits.other_prompt
        return made, self.tally, None

    def look(self, row: Row, columns: Sequence[str]) -> None:
        """Count a row's unused columns and control tokens. Raises SurefootError if control tokens are rejected."""
        used = used_columns(row, tuple(columns))
        self.tally.unused |= unused_columns(row, used, self.tokens, self._read_keys)
        split = literal = None
        for name in used:
            value = row.columns.get(name)
            for part in value if isinstance(value, list) else [value]:
                content = {key: text for key, text in part.items() if key != "role"} if isinstance(part, dict) else part
                token = None if content is None else self.tokens.control_tokens(content)
                if token is None:
                    continue
                if self.control == "reject":
                    raise SurefootError(
                        f"column {name!r} contains the control token {token!r}; remove it, or set data.control_tokens = 'split'"
                    )
                if isinstance(part, dict) and part.get("role") != "assistant":
                    split = token
                else:
                    literal = token
        self.tally.split += split is not None
        self.tally.literal += literal is not None


def prepare(
    kind: str,
    rows: Iterable[Row],
    tokens: Tokens,
    max_length: int,
    limit_text: str,
    control: ControlPolicy,
    separator: str = "",
) -> tuple[Mapping[str, Sequence[Any]], Tally, dict[str, Any]]:
    """The fields of all rows that are kept, a tally of all rows, and the fields of ``Tokenised``.

    Those of a large source are made by several processes, with the same result, and are in the cache.
    """
    maker = _RowMaker(kind, tokens, max_length, control, separator)
    processes, tally, facts = 1, Tally(), Facts()
    made: Mapping[str, Sequence[Any]] | None = None

    def build(append: Callable[[Sequence[Any]], None]) -> dict[str, Any]:
        nonlocal tally
        tally = _add_rows(maker, rows, limit_text, append, processes)
        return asdict(tally)

    if isinstance(rows, Source) and rows.size >= LARGE:
        fingerprint, columns = maker.tokens.fingerprint(), sorted(rows.columns.items())
        depends = [VERSION, kind, rows.content, columns, fingerprint, max_length, control, separator]
        parts = None if fingerprint is None else depends
        processes = 1 if parts is None else usable_processes()  # a tokenizer in Python may have code of its own
        with suppress(NotJson):  # values that only memory can hold
            made, summary, facts = cached(parts, FIELDS[kind], build)
            tally = Tally(**summary)
    if made is None:
        in_memory: list[Sequence[Any]] = []
        build(in_memory.append)
        made = {name: [values[place] for values in in_memory] for place, name in enumerate(FIELDS[kind])}
    common = {"dropped": tally.dropped, "unused": tuple(tally.unused), "notes": tally.notes(control), "facts": facts}
    return made, tally, common


def _add_rows(
    maker: _RowMaker, rows: Iterable[Row], limit_text: str, append: Callable[[Sequence[Any]], None], processes: int
) -> Tally:
    """Append the fields of every row that is kept. Labelled answers become pairs where these are needed, and pairs answers."""
    tally, left_over, given = Tally(), list[int](), rows
    if maker.kind == "pairs":
        rows = paired(rows, left_over)
    elif maker.kind == "labelled":
        rows = unpaired(rows, maker.chat)
    with closing(in_processes(maker, rows, processes)) as chunks:
        for chunk, (made, noticed, error) in chunks:
            tally.add(noticed)
            for row, fields_of_row in zip(chunk, made, strict=False):
                tally.rows, tally.file = tally.rows + 1, row.file
                if fields_of_row is None:
                    tally.equal += 1
                    continue
                values, length = fields_of_row
                tally.shortest = length if tally.shortest is None else min(tally.shortest, length)
                if length > maker.max_length:
                    tally.dropped += 1
                    continue
                append(values)
                tally.kept += 1
            if error is not None:
                raise SurefootError(error)
    tally.left_over = sum(left_over)
    if tally.left_over and not tally.rows:
        raise SurefootError(
            f"{next(iter(given)).file}: column 'label' labels single answers, and no prompt has one of each label to make a "
            "pair; set preference.loss = 'kto' for kind = 'dpo', or 'binary' for kind = 'reward'"
        )
    if tally.equal == tally.rows:
        raise SurefootError(
            f"{tally.file}: chosen and rejected are the same in all {tally.rows} rows; give answers that differ"
        )
    if not tally.kept:
        raise SurefootError(
            f"{tally.file}: all {tally.rows} rows are dropped: the shortest has {tally.shortest} tokens and "
            f"{limit_text or f'max_length={maker.max_length}; raise it'}"
        )
    return tally
