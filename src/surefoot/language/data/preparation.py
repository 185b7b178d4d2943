"""All rows of a source as token ids: in memory, or in the cache by several processes, with a tally of what was dropped.

Rows are read one at a time. Those of a large source are tokenised by several processes, into a cache on disk. Training begins
after the last row: rows are shuffled over all that are kept, and how many are kept is known only then.
"""

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from surefoot.errors import SurefootError, cause_of
from surefoot.language import quiet_transformers
from surefoot.language.data.cache import Facts, NotJson, cached
from surefoot.language.data.chat import Dialogue, options_of
from surefoot.language.data.processes import in_processes, usable_processes
from surefoot.language.data.rows import (
    CALLS,
    SETTINGS,
    TOOLS,
    WEIGHT,
    Row,
    check_same_kind,
    common_length,
    json_type,
    messages_column,
    require_columns,
    text_column,
    text_or_messages,
)
from surefoot.language.data.shapes import as_demonstration, as_pair, as_prompt, label_of, paired, steps_of, unpaired
from surefoot.language.data.sources import Source
from surefoot.language.data.steps import split_steps, step_tokens
from surefoot.language.data.tokens import Edits, Tokens

VERSION = 6
"""of what rows become; caches of another version are not read"""
LARGE = 32 * 10**6
"""bytes of rows from which on their ids are on disk instead of in memory"""
ControlPolicy = Literal["split", "keep", "reject"]
Part = str | list[dict[str, Any]]
NOTHING: tuple[Any, ...] = (None, [], {}, "")
"""values of columns and keys that are not there"""
SYSTEM = ("system", "developer")
"""roles that may precede the user"""


# ---- one row as its fields --------------------------------------------------------------------------------------------


def _make_demonstration(work: "_RowMaker", row: Row) -> tuple[Sequence[Any], int]:
    row = as_demonstration(row, work.chat)
    label = [[label_of(row)]] if work.kind == "labelled" else []
    names = demonstration_columns(row)
    work.look(row, (*names, *["label"] * len(label)))
    ids, trained = work.tokens.demonstration(demonstration_of(row, names, work.tokens))
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
    column = "messages" if "prompt" not in row.columns and "messages" in row.columns else "prompt"
    work.look(row, (column,))
    require_columns(row, (column,), "a prompt is in the column prompt, or in messages")
    prompt: Any = text_or_messages(row, "prompt") if column == "prompt" else messages_column(row, column)
    while column == "messages" and prompt and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt and column == "messages":
        raise SurefootError("column 'messages' has nothing before the answer; begin with a message of the user")
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise SurefootError("column 'prompt' ends with a message of the assistant, and a response can't follow one")
    prompt = dialogue_of(row, prompt, work.tokens)
    ids = work.tokens.encode_prompt(prompt)
    others = {name: value for name, value in row.columns.items() if name != column}
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
    plain: int = 0
    """rows of text in place of messages"""
    unknown: int = 0
    """rows with characters that the tokenizer does not know"""
    unused: dict[str, None] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)
    """columns for reward functions"""

    def add(self, other: "Tally") -> None:
        """Add what was noticed in further rows."""
        for name in ("split", "literal", "omitted", "other_prompt", "plain", "unknown"):
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
                self.tally.plain += edits.plain
        return made, self.tally, None

    def look(self, row: Row, columns: Sequence[str]) -> None:
        """Count a row's unused columns and control tokens. Raises SurefootError if control tokens are rejected."""
        chat = any(isinstance(row.columns.get(name), list) for name in columns)
        used = (*columns, *([TOOLS, SETTINGS] if chat else []))
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
    common["plain"] = {0: False, tally.rows: True}.get(tally.plain)
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


# ---- one row ----------------------------------------------------------------------------------------------------------


def demonstration_columns(row: Row) -> tuple[str, ...]:
    """The columns of a demonstration."""
    if "messages" in row.columns:
        return ("messages",)
    return ("text",) if "text" in row.columns and "completion" not in row.columns else ("prompt", "completion")


def demonstration_of(row: Row, names: tuple[str, ...], tokens: Tokens) -> Mapping[str, Any]:
    """The columns of a demonstration, checked."""
    if names == ("messages",):
        return {"messages": dialogue_of(row, messages_column(row, "messages"), tokens)}
    if names == ("text",):
        return {"text": text_column(row, "text")}
    require_columns(row, names, "a demonstration has prompt and completion, or messages, or text")
    prompt, completion = _split_answer(text_or_messages(row, "prompt"), text_or_messages(row, "completion"), "completion")
    return {"prompt": dialogue_of(row, prompt, tokens), "completion": dialogue_of(row, completion, tokens)}


def pair_of(row: Row, tokens: Tokens) -> tuple[list[int], list[int], int, list[bool], list[bool]]:
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
        length = min(max(common_length(*whole), 1), len(whole[0]) - 1, len(whole[1]) - 1)
        first, second = ([i >= length for i in range(len(ids))] for ids in whole)
        return whole[0], whole[1], length, first, second
    else:
        count = min(common_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
        if not prompt:
            raise SurefootError("chosen and rejected begin differently, so there is no prompt; begin both with it")
    prompt = dialogue_of(row, prompt, tokens)
    sides = ({"prompt": prompt, "completion": dialogue_of(row, answer, tokens)} for answer in (chosen, rejected))
    (ids, trained), (other, trained_too) = map(tokens.demonstration, sides)
    own = tokens.encode_prompt(prompt)
    return ids, other, min(common_length(own, ids), common_length(own, other)), trained, trained_too


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


def dialogue_of(row: Row, part: Part, tokens: Tokens) -> Any:
    """Messages with the tools and settings of their row; text unchanged."""
    if isinstance(part, str):
        return part
    options = template_options(row, tokens)
    if any(CALLS in message for message in part) and not tokens.reads(CALLS, options):
        raise SurefootError(f"the chat template ignores {CALLS!r} of a message; remove the row, or use another model")
    return Dialogue(part, options) if options else part


def template_options(row: Row, tokens: Tokens) -> dict[str, Any]:
    """Arguments of a row for the chat template: ``tools`` and the entries of ``chat_template_kwargs``.

    Both may be JSON text, as files with a schema store them. Null and empty values are ignored.

    Raises SurefootError for other values, and for options that the chat template does not read.
    """
    options = dict(_json_column(row, SETTINGS, dict, "an object"))
    if options:
        own = {*inspect.signature(tokens.tokenizer.apply_chat_template).parameters, "messages"} - {"documents"}
        if fixed := [name for name in options if name in own]:
            raise SurefootError(f"column {SETTINGS!r}: {fixed[0]!r} can't be set by a row; remove it")
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


def unused_columns(row: Row, used: Sequence[str], tokens: Tokens, known: dict[str, bool]) -> dict[str, None]:
    """Columns with a value but no effect: those not in ``used``, and keys of messages that the chat template does not read, as
    ``messages[].name``.

    known   whether the template reads a key, for keys of earlier rows; it grows
    """
    unused: dict[str, None] = {}
    known |= dict.fromkeys(("role", "content", WEIGHT), True)
    for name, value in row.columns.items():
        if name not in used and value not in NOTHING:
            unused[name] = None
        elif name in used and name not in (TOOLS, SETTINGS) and isinstance(value, list):
            messages = [message for message in value if isinstance(message, dict)]
            for key in (key for message in messages for key, part in message.items() if part not in NOTHING):
                if key not in known:
                    known[key] = tokens.reads(key, {})
                if not known[key]:
                    unused[f"{name}[].{key}"] = None
    return unused


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
