"""Turn rows into token ids: demonstrations, pairs of answers, labelled answers, prompts.

Demonstrations are ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``. Pairs are ``{"prompt", "chosen",
"rejected"}``, or ``{"chosen", "rejected"}`` with the prompt as their common beginning. Labelled answers are ``{"prompt",
"completion", "label"}``, answers in steps ``{"prompt", "completions", "labels"}`` with two lists. Each column is text, or
messages with a role and a content; ``tools`` and ``chat_template_kwargs`` are passed to the chat template. Answers may repeat
the messages of their prompt, or its text as the user's message. ``surefoot.language.data.shapes`` converts other shapes. Rows
that are too long and pairs of equal answers are dropped and counted. Any other error is one line with file and line.

Rows are read one at a time. Those of a large source are tokenised by several processes, into a cache on disk. Training begins
after the last row: rows are shuffled over all that are kept, and how many are kept is known only then.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from surefoot.errors import SurefootError, cause_of
from surefoot.language import quiet_transformers
from surefoot.language.data.cache import Facts, Fields, NotJson, Ragged, cached
from surefoot.language.data.processes import in_processes, usable_processes
from surefoot.language.data.rows import (
    CALLS,
    SETTINGS,
    TOOLS,
    WEIGHT,
    check_same_kind,
    json_type,
    messages_column,
    require_columns,
    text_column,
    text_or_messages,
)
from surefoot.language.data.rows import Row as Row
from surefoot.language.data.shapes import as_demonstration, as_pair, as_prompt, label_of, paired, steps_of, unpaired
from surefoot.language.data.sources import Source
from surefoot.language.data.sources import open_rows as open_rows
from surefoot.language.data.sources import read_rows as read_rows
from surefoot.language.data.tokens import Dialogue, Messages, Tokens, options_of
from surefoot.language.rewards.scores import split_steps, step_tokens

VERSION = 2
"""of what rows become; caches of another version are not read"""
LARGE = 32 * 10**6
"""bytes of rows from which on their ids are on disk instead of in memory"""
ControlPolicy = Literal["split", "keep", "reject"]
Part = str | list[dict[str, Any]]
SYSTEM = ("system", "developer")
"""roles that may precede the user"""


@dataclass(frozen=True, kw_only=True)
class Tokenised:
    """What rows of every kind have besides their tokens."""

    dropped: int = 0
    """number of rows dropped as too long; a pair is if either side is"""
    unused: tuple[str, ...] = ()
    """columns that are not used; of prompts, those that only reward functions read"""
    notes: tuple[str, ...] = ()
    """lines about control tokens in the rows, and about labelled answers without a partner"""
    facts: Facts = field(default_factory=Facts)
    """what was computed from all rows before"""


@dataclass(frozen=True)
class Demonstrations(Tokenised):
    """Tokenised demonstrations for supervised fine-tuning."""

    ids: Sequence[list[int]]
    trained: Sequence[list[bool]]
    """which ids are trained, row by row; never the first"""


@dataclass(frozen=True)
class Pairs(Tokenised):
    """Tokenised pairs for a reward model or DPO: each side is prompt and answer."""

    chosen: Sequence[list[int]]
    rejected: Sequence[list[int]]
    prompt_lengths: Sequence[int]
    """number of the prompt's ids at the beginning of both sides"""
    chosen_trained: Sequence[list[bool]]
    """which ids of the chosen side the assistant wrote"""
    rejected_trained: Sequence[list[bool]]
    equal: int = 0
    """number of pairs dropped because both answers are the same"""


@dataclass(frozen=True)
class Labelled(Demonstrations):
    """Tokenised answers, each labelled as good or bad."""

    good: Sequence[bool] = ()
    """the labels, row by row"""


@dataclass(frozen=True)
class Stepped(Tokenised):
    """Tokenised answers in steps, each step labelled as good or bad."""

    ids: Sequence[list[int]]
    ends: Sequence[list[int]]
    """the index of the last token of each step"""
    good: Sequence[list[bool]]


@dataclass(frozen=True)
class Prompts(Tokenised):
    """Tokenised prompts for sampling."""

    prompts: Sequence[str | Messages]
    """as in the file"""
    ids: Sequence[list[int]]
    columns: Mapping[str, Sequence[Any]]
    """every other column, for reward functions; None for rows without it"""


def repeat_prompts(prompts: Prompts, rows: Sequence[int], samples: int = 1) -> Prompts:
    """The prompts in these rows, each repeated ``samples`` times."""
    rows = [row for row in rows for _ in range(samples)]
    columns = {name: [column[row] for row in rows] for name, column in prompts.columns.items()}
    return replace(
        prompts,
        prompts=[prompts.prompts[row] for row in rows],
        ids=[prompts.ids[row] for row in rows],
        columns=columns,
    )


def drop_notes(
    path: str, limit: int, dropped: int, *, unused: Sequence[str] = (), rows: str = "rows", notes: Sequence[str] = ()
) -> list[str]:
    """Lines about dropped rows, control tokens and unused columns of a file."""
    return [
        *notes,
        *([f"{path}: dropped, because longer than {limit} tokens: {dropped} {rows}"] if dropped else []),
        *([f"{path}: not used: {', '.join(map(repr, unused))}"] if unused else []),
    ]


def pair_drop_notes(path: str, limit: int, pairs: Pairs) -> list[str]:
    """The same for pairs."""
    equal = [f"{path}: dropped, because both answers are the same: {pairs.equal} rows"] if pairs.equal else []
    return equal + drop_notes(path, limit, pairs.dropped, unused=pairs.unused, notes=pairs.notes)


def token_limit(max_length: int, context: int | None, answer: int = 0) -> tuple[int, str]:
    """The token limit of a row, by ``data.max_length`` or the model's context; and its text with a remedy for errors.

    answer   tokens of the context reserved for a response
    """
    if context is None or max_length <= context - answer:
        return max_length, f"data.max_length={max_length}; raise it"
    less = f", less sampling.max_tokens={answer}" if answer else ""
    return context - answer, f"the model's context is {context}{less}; shorten them"


def demonstrations(
    rows: Iterable[Row], tokens: Tokens, max_length: int, limit_text: str = "", control: ControlPolicy = "split"
) -> Demonstrations:
    """Tokenise the rows of at most ``max_length`` ids, and mark trained ids; see ``Tokens.demonstration``.

    ``limit_text`` describes ``max_length`` and its remedy in errors; see ``token_limit``. ``control`` is
    ``data.control_tokens``.

    Raises SurefootError, with file and line, for a row of another shape, and if every row is too long.
    """
    made, _, common = _Preparation("demonstrations", rows, tokens, max_length, limit_text, control).run()
    return Demonstrations(made["ids"], made["trained"], **common)


def pairs(
    rows: Iterable[Row], tokens: Tokens, max_length: int, limit_text: str = "", control: ControlPolicy = "split"
) -> Pairs:
    """Tokenise both answers of every row, with prompt and EOS, if they differ and have at most ``max_length`` ids.

    Rows with one labelled answer each are paired first; see ``surefoot.language.data.shapes.paired``.

    Raises SurefootError, with file and line, for a row of another shape, and if no row remains.
    """
    made, tally, common = _Preparation("pairs", rows, tokens, max_length, limit_text, control).run()
    lengths = common["facts"].once("prompt-lengths", lambda: [length for (length,) in made["prompt_lengths"]])
    trained = made["chosen_trained"], made["rejected_trained"]
    return Pairs(made["chosen"], made["rejected"], lengths, *trained, tally.equal, **common)


def labelled(
    rows: Iterable[Row], tokens: Tokens, max_length: int, limit_text: str = "", control: ControlPolicy = "split"
) -> Labelled:
    """Tokenise answers of at most ``max_length`` ids with their prompt and their label; a pair is a good and a bad answer.

    Raises SurefootError, with file and line, for a row of another shape, and if every row is too long.
    """
    made, _, common = _Preparation("labelled", rows, tokens, max_length, limit_text, control).run()
    good = common["facts"].once("labels", lambda: [label for (label,) in made["good"]])
    return Labelled(made["ids"], made["trained"], good, **common)


def stepped(
    rows: Iterable[Row],
    tokens: Tokens,
    max_length: int,
    limit_text: str = "",
    control: ControlPolicy = "split",
    separator: str = "\n",
) -> Stepped:
    """Tokenise answers in steps, joined by ``separator``, of at most ``max_length`` ids with their prompt.

    Raises SurefootError, with file and line, for a row of another shape, and if every row is too long.
    """
    made, _, common = _Preparation("steps", rows, tokens, max_length, limit_text, control, separator).run()
    return Stepped(made["ids"], made["ends"], made["good"], **common)


def prompts(
    rows: Iterable[Row], tokens: Tokens, max_length: int, limit_text: str = "", control: ControlPolicy = "split"
) -> Prompts:
    """Tokenise the prompts of at most ``max_length`` ids: column ``prompt``, or ``messages`` without the last answer.

    Raises SurefootError, with file and line, for a row of another shape, and if every prompt is too long.
    """
    made, tally, common = _Preparation("prompts", rows, tokens, max_length, limit_text, control).run()
    columns = {name: _listed(made["row"], _column_of(name)) for name in tally.columns}
    return Prompts(_listed(made["row"], _prompt_of), made["ids"], columns, **common)


class Mapped(Sequence[Any]):
    """A function of every element of a sequence, computed when it is read."""

    def __init__(self, values: Sequence[Any], function: Callable[[Any], Any]) -> None:
        self._values, self._function = values, function

    def __len__(self) -> int:
        """The number of elements."""
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        """One element, or several."""
        if isinstance(index, slice):
            return [self._function(value) for value in self._values[index]]
        return self._function(self._values[index])


def _listed(stored: Sequence[Any], function: Callable[[Any], Any]) -> Sequence[Any]:
    return Mapped(stored, function) if isinstance(stored, Ragged) else [function(value) for value in stored]


def _prompt_of(stored: Mapping[str, Any]) -> str | Messages:
    options = stored["options"]
    prompt: str | Messages = stored["prompt"]
    return Dialogue(prompt, options) if options and not isinstance(prompt, str) else prompt


def _column_of(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda stored: stored["columns"].get(name)


def prompts_without_ids(rows: Sequence[Row]) -> Prompts:
    """Rows for an environment, which makes the prompts: every column is kept, and there are no ids."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    return Prompts(["" for _ in rows], [[] for _ in rows], columns)


# ---- one row as its fields --------------------------------------------------------------------------------------------


def _make_demonstration(work: "_RowMaker", row: Row) -> tuple[Sequence[Any], int]:
    row = as_demonstration(row, work.chat)
    work.look(row, _demonstration_columns(row))
    ids, trained = work.tokens.demonstration(_demonstration(row, work.tokens))
    return (ids, trained), len(ids)


def _make_pair(work: "_RowMaker", row: Row) -> tuple[Sequence[Any], int] | None:
    row = as_pair(row, work.chat)
    work.look(row, ("prompt", "chosen", "rejected"))
    ids, other, prompt_length, trained, trained_too = _pair(row, work.tokens)
    return None if ids == other else ((ids, other, [prompt_length], trained, trained_too), max(len(ids), len(other)))


def _make_labelled(work: "_RowMaker", row: Row) -> tuple[Sequence[Any], int]:
    row = as_demonstration(row, work.chat)
    label = label_of(row)
    work.look(row, (*_demonstration_columns(row), "label"))
    ids, trained = work.tokens.demonstration(_demonstration(row, work.tokens))
    return (ids, trained, [label]), len(ids)


def _make_steps(work: "_RowMaker", row: Row) -> tuple[Sequence[Any], int]:
    steps, good = steps_of(row, work.separator)
    work.look(row, ("prompt", "completions", "labels"))
    before = work.tokens.encode_prompt(_dialogue(row, text_or_messages(row, "prompt"), work.tokens))
    text = work.separator.join(steps)
    after = work.tokens.encode_completion(text)
    ends = step_tokens(work.tokens.decode, after, [step.end for step in split_steps(text, work.separator)])
    return ([*before, *after], [len(before) + end for end in ends], good), len(before) + len(after)


def _make_prompt(work: "_RowMaker", row: Row) -> tuple[Sequence[Any], int]:
    row = as_prompt(row, work.chat)
    columns = _prompt_columns(row)
    work.look(row, columns)
    prompt, ids = _prompt(row, work.tokens)
    others = {name: value for name, value in row.columns.items() if name not in columns}
    if len(ids) <= work.max_length:
        work.tally.columns.update(dict.fromkeys(others))
    plain = prompt if isinstance(prompt, str) else list(prompt)
    return (ids, {"prompt": plain, "options": dict(options_of(prompt)), "columns": others}), len(ids)


Made = tuple[Sequence[Any], int] | None
"""the fields of a row and its length; None for a pair of equal answers"""
FIELDS = {
    "demonstrations": {"ids": "ids", "trained": "flags"},
    "pairs": {
        "chosen": "ids",
        "rejected": "ids",
        "prompt_lengths": "ids",
        "chosen_trained": "flags",
        "rejected_trained": "flags",
    },
    "labelled": {"ids": "ids", "trained": "flags", "good": "flags"},
    "steps": {"ids": "ids", "ends": "ids", "good": "flags"},
    "prompts": {"ids": "ids", "row": "json"},
}
"""the fields of each kind of row, and what they contain (``cache.TYPES``)"""
MAKERS: dict[str, Callable[["_RowMaker", Row], Made]] = {
    "demonstrations": _make_demonstration,
    "pairs": _make_pair,
    "labelled": _make_labelled,
    "steps": _make_steps,
    "prompts": _make_prompt,
}


# ---- one row ----------------------------------------------------------------------------------------------------------


def _demonstration_columns(row: Row) -> tuple[str, ...]:
    """The columns of a demonstration."""
    if "messages" in row.columns:
        return ("messages",)
    return ("text",) if "text" in row.columns and "completion" not in row.columns else ("prompt", "completion")


def _prompt_columns(row: Row) -> tuple[str, ...]:
    """The column of a prompt."""
    return ("messages",) if "prompt" not in row.columns and "messages" in row.columns else ("prompt",)


def _used_columns(row: Row, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those columns; for messages also the columns for the chat template."""
    return (*names, TOOLS, SETTINGS) if any(isinstance(row.columns.get(name), list) for name in names) else names


def _demonstration(row: Row, tokens: Tokens) -> Mapping[str, Any]:
    """The columns of a demonstration, checked."""
    names = _demonstration_columns(row)
    if names == ("messages",):
        return {"messages": _dialogue(row, messages_column(row, "messages"), tokens)}
    if names == ("text",):
        return {"text": text_column(row, "text")}
    require_columns(row, names, "a demonstration has prompt and completion, or messages, or text")
    prompt, completion = _split_answer(text_or_messages(row, "prompt"), text_or_messages(row, "completion"), "completion")
    return {"prompt": _dialogue(row, prompt, tokens), "completion": _dialogue(row, completion, tokens)}


def _pair(row: Row, tokens: Tokens) -> tuple[list[int], list[int], int, list[bool], list[bool]]:
    """Ids of chosen and rejected, the length of their prompt, and which ids of each are the answer's."""
    require_columns(row, ("chosen", "rejected"), "a pair has chosen and rejected, and prompt beside them or within them")
    chosen, rejected = (text_or_messages(row, name) for name in ("chosen", "rejected"))
    check_same_kind({"chosen": chosen, "rejected": rejected})
    if "prompt" in row.columns:
        shared, both = text_or_messages(row, "prompt"), {"chosen": chosen, "rejected": rejected}
        (prompt, chosen), (other_prompt, rejected) = (_split_answer(shared, answer, name) for name, answer in both.items())
        if prompt != other_prompt:
            raise SurefootError("chosen and rejected have different messages before the prompt; begin both alike")
    elif isinstance(chosen, str):
        # Split by ids, not characters: a token may cross the end of the common text.
        whole = [[*tokens.encode_prompt(text), tokens.eos_id] for text in (chosen, rejected)]
        length = min(max(_common_prefix(*whole), 1), len(whole[0]) - 1, len(whole[1]) - 1)
        first, second = ([i >= length for i in range(len(ids))] for ids in whole)
        return whole[0], whole[1], length, first, second
    else:
        count = min(_common_prefix(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
        if not prompt:
            raise SurefootError("chosen and rejected begin differently, so there is no prompt; begin both with it")
    prompt = _dialogue(row, prompt, tokens)
    (ids, trained), (other, trained_too) = (
        tokens.demonstration({"prompt": prompt, "completion": _dialogue(row, answer, tokens)}) for answer in (chosen, rejected)
    )
    return ids, other, len(tokens.encode_prompt(prompt)), trained, trained_too


def _prompt(row: Row, tokens: Tokens) -> tuple[str | Messages, list[int]]:
    """A prompt as in the file, and its ids."""
    prompt: str | list[dict[str, Any]]
    if _prompt_columns(row) == ("messages",):
        prompt = messages_column(row, "messages")
        while prompt and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
        if not prompt:
            raise SurefootError("column 'messages' has nothing before the answer; begin with a message of the user")
    else:
        require_columns(row, ("prompt",), "a prompt is in the column prompt, or in messages")
        prompt = text_or_messages(row, "prompt")
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise SurefootError("column 'prompt' ends with a message of the assistant, and a response can't follow one")
    dialogue = _dialogue(row, prompt, tokens)
    return dialogue, tokens.encode_prompt(dialogue)


def _split_answer(prompt: Part, answer: Part, name: str) -> tuple[Part, Part]:
    """Prompt and answer without repetition: messages of the answer may repeat the last messages of the prompt, or all of them.

    A text prompt counts as the user's message, and a system message of the answer alone is moved to the prompt.
    """
    if isinstance(answer, str):
        check_same_kind({"prompt": prompt, name: answer})
        return prompt, answer
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if answer[0]["role"] in SYSTEM and messages[0]["role"] not in SYSTEM:
        messages = [answer[0], *messages]
    first, second = ([(m["role"], m.get("content", "").strip(), m.get(CALLS)) for m in part] for part in (messages, answer))
    shared = max(count for count in range(min(len(first), len(second)) + 1) if first[len(first) - count :] == second[:count])
    if shared == len(answer):
        raise SurefootError(f"column {name!r} has nothing after the prompt; end it with a message of the assistant")
    if not shared:
        check_same_kind({"prompt": prompt, name: answer})
        return prompt, answer
    return messages, answer[shared:]


def _dialogue(row: Row, part: Part, tokens: Tokens) -> Any:
    """Messages with the tools and settings of their row; text unchanged."""
    if isinstance(part, str):
        return part
    options = template_options(row, tokens)
    if any(CALLS in message for message in part) and not tokens.reads(CALLS, options):
        raise SurefootError(f"the chat template ignores {CALLS!r} of a message; remove the row, or use another model")
    return Dialogue(part, options) if options else part


def _common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- checks -----------------------------------------------------------------------------------------------------------


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
    unused: dict[str, None] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)
    """columns for reward functions"""

    def add(self, other: "Tally") -> None:
        """Add what was noticed in further rows."""
        self.split, self.literal = self.split + other.split, self.literal + other.literal
        self.unused |= other.unused
        self.columns |= other.columns

    def notes(self, control: ControlPolicy) -> tuple[str, ...]:
        """Lines about control tokens and labelled answers."""
        how = "text" if control == "split" else "control tokens"
        lines = (
            (self.split, f"rows with control tokens in messages, encoded as {how} (data.control_tokens={control!r})"),
            (self.literal, "rows with control tokens in plain text or answers, encoded as control tokens"),
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
        self.tokens = tokens if tokens.split == (control != "keep") else Tokens.like(tokens, split=control != "keep")
        self.chat = bool(tokens.tokenizer.chat_template)
        self.tally = Tally()
        self._read_keys: dict[str, bool] = {}

    def __call__(self, rows: list[Row]) -> tuple[list[Made], "Tally", str | None]:
        """The fields of some rows, the tally of these, and the error at the row after them, if there is one."""
        made: list[Made] = []
        self.tally = Tally()
        with quiet_transformers():  # the tokenizer warns of text longer than the context; such rows are counted here
            for row in rows:
                try:
                    made.append(MAKERS[self.kind](self, row))
                except SurefootError as error:
                    return made, self.tally, f"{row.where}: {error}"
        return made, self.tally, None

    def look(self, row: Row, columns: Sequence[str]) -> None:
        """Count a row's unused columns and control tokens. Raises SurefootError if control tokens are rejected."""
        used = _used_columns(row, tuple(columns))
        self.tally.unused |= dict.fromkeys(unused_columns([row], lambda _: used, self.tokens, self._read_keys))
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


class _Preparation:
    """Tokenises the rows of a source: those of a large one in several processes, with the same result.

    kind       what the rows become
    separator  of steps
    """

    def __init__(
        self,
        kind: str,
        rows: Iterable[Row],
        tokens: Tokens,
        max_length: int,
        limit_text: str,
        control: ControlPolicy,
        separator: str = "",
    ) -> None:
        self.kind, self.rows, self.max_length, self.limit_text, self.control = kind, rows, max_length, limit_text, control
        self.maker = _RowMaker(kind, tokens, max_length, control, separator)
        self.tally = Tally()

    def run(self) -> tuple[Mapping[str, Sequence[Any]], Tally, dict[str, Any]]:
        """The fields of all rows that are kept, a tally of all rows, and the fields of ``Tokenised``."""
        made, tally, facts = self._made()
        unused, notes = tuple(tally.unused), tally.notes(self.control)
        return made, tally, {"dropped": tally.dropped, "unused": unused, "notes": notes, "facts": facts}

    def _made(self) -> tuple[Mapping[str, Sequence[Any]], Tally, Facts]:
        """The fields in memory or, of a large source, in the cache."""
        kinds, processes = FIELDS[self.kind], 1

        def build(fields: Fields) -> dict[str, Any]:
            self.tally = Tally()
            self._add_rows(fields, processes)
            return asdict(self.tally)

        if isinstance(self.rows, Source) and self.rows.size >= LARGE:
            parts = self._parts(self.rows)
            processes = 1 if parts is None else usable_processes()  # a tokenizer in Python may have code of its own
            try:
                made, summary, facts = cached(parts, kinds, build)
                return made, Tally(**summary), facts
            except NotJson:  # values that only memory can hold
                pass
        fields = Fields(kinds)
        build(fields)
        return fields.columns, self.tally, Facts()

    def _parts(self, source: Source) -> list[object] | None:
        """All that the ids depend on; None if it can't be known."""
        fingerprint = self.maker.tokens.fingerprint()
        if fingerprint is None:
            return None
        parts = [VERSION, self.kind, source.content, sorted(source.columns.items()), fingerprint, self.max_length, self.control]
        return [*parts, self.maker.separator] if self.kind == "steps" else parts

    def _add_rows(self, fields: Fields, processes: int) -> None:
        tally, left_over = self.tally, list[int]()
        with closing(in_processes(self.maker, self._as_kind(left_over), processes)) as chunks:
            for rows, (made, noticed, error) in chunks:
                tally.add(noticed)
                for row, fields_of_row in zip(rows, made, strict=False):
                    tally.rows, tally.file = tally.rows + 1, row.file
                    if fields_of_row is None:
                        tally.equal += 1
                        continue
                    values, length = fields_of_row
                    tally.shortest = length if tally.shortest is None else min(tally.shortest, length)
                    if length > self.max_length:
                        tally.dropped += 1
                        continue
                    fields.append(values)
                    tally.kept += 1
                if error is not None:
                    raise SurefootError(error)
        tally.left_over = sum(left_over)
        self._check_any_kept()

    def _as_kind(self, left_over: list[int]) -> Iterable[Row]:
        """The rows, with labelled answers made into pairs where pairs are needed, and the other way round."""
        if self.kind == "pairs":
            return paired(self.rows, left_over)
        return unpaired(self.rows, self.maker.chat) if self.kind == "labelled" else self.rows

    def _check_any_kept(self) -> None:
        tally = self.tally
        if tally.left_over and not tally.rows:
            file = next(iter(self.rows)).file
            raise SurefootError(
                f"{file}: column 'label' labels single answers, and no prompt has one of each label to make a pair; set "
                "preference.loss = 'kto' for kind = 'dpo', or 'binary' for kind = 'reward'"
            )
        if tally.equal == tally.rows:
            raise SurefootError(
                f"{tally.file}: chosen and rejected are the same in all {tally.rows} rows; give answers that differ"
            )
        if not tally.kept:
            raise SurefootError(
                f"{tally.file}: all {tally.rows} rows are dropped: the shortest has {tally.shortest} tokens and "
                f"{self.limit_text or f'max_length={self.max_length}; raise it'}"
            )


def template_options(row: Row, tokens: Tokens) -> dict[str, Any]:
    """Arguments of a row for the chat template: ``tools`` and the entries of ``chat_template_kwargs``.

    Both may be JSON text, as files with a schema store them. Null and empty values are ignored.

    Raises SurefootError for other values, and for options that the chat template does not read.
    """
    options = dict(_json_column(row, SETTINGS, dict, "an object"))
    for name in options:
        if name in _reserved_names(tokens):
            raise SurefootError(f"column {SETTINGS!r}: {name!r} can't be set by a row; remove it")
    tools = _json_column(row, TOOLS, list, "a list of objects, each the JSON schema of a function")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise SurefootError(f"column {TOOLS!r}, tool {index + 1} is {json_type(tool)}; it must be an object")
    if tools:
        options[TOOLS] = tools
    for name in options:
        if not tokens.reads(name, options):
            column = repr(TOOLS) if name == TOOLS else f"{SETTINGS!r}: {name!r}"
            raise SurefootError(
                f"column {column} has no effect, because the chat template does not read it; remove it, or use another model"
            )
    return options


def unused_columns(
    rows: Iterable[Row], read: Callable[[Row], Sequence[str]], tokens: Tokens, known: dict[str, bool] | None = None
) -> tuple[str, ...]:
    """Columns with a value in some row but no effect: those not in ``read``, and keys of messages that the chat template does
    not read, as ``messages[].name``.

    known   whether the template reads a key, for keys of earlier rows; it grows
    """
    unused: dict[str, None] = {}
    known = {} if known is None else known
    known |= dict.fromkeys(("role", "content", WEIGHT), True)
    for row in rows:
        names = read(row)
        for name, value in row.columns.items():
            if name not in names and value not in (None, [], {}, ""):
                unused[name] = None
            elif name in names and name not in (TOOLS, SETTINGS) and isinstance(value, list):
                messages = [message for message in value if isinstance(message, dict)]
                for key in (key for message in messages for key, part in message.items() if part not in (None, [], {}, "")):
                    if key not in known:
                        known[key] = tokens.reads(key, {})
                    if not known[key]:
                        unused[f"{name}[].{key}"] = None
    return tuple(unused)


def _reserved_names(tokens: Tokens) -> set[str]:
    """Names of the renderer's own arguments."""
    return {*inspect.signature(tokens.tokenizer.apply_chat_template).parameters, "messages"} - {"documents"}


def _json_column(row: Row, name: str, wanted: type, words: str) -> Any:
    value = row.columns.get(name)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SurefootError(f"column {name!r} is text that is not JSON ({cause_of(error)}); it must be {words}") from None
    if not value:
        return wanted()
    if not isinstance(value, wanted):
        raise SurefootError(f"column {name!r} is {json_type(value)}; it must be {words}")
    return value
