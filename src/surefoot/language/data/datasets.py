"""Rows in the shapes of the ecosystem become token ids: demonstrations, pairs of answers, prompts.

Demonstrations are ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``; pairs ``{"prompt", "chosen", "rejected"}``,
or ``{"chosen", "rejected"}``, whose common beginning is the prompt. Each is text, or messages with a role and a content; beside
messages, ``tools`` and ``chat_template_kwargs`` are for the chat template. Answers may repeat the messages of their prompt, or
its text as the user's message. Rows that are too long, and pairs of equal answers, are left out and counted; anything else that
is wrong is one line with file and line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from surefoot.errors import SurefootError, did_you_mean
from surefoot.language.data.columns import check_weight, template_options, unused_columns
from surefoot.language.data.dialogue import CALLS, SETTINGS, TOOLS, Dialogue
from surefoot.language.data.rows import Row as Row
from surefoot.language.data.rows import kind_of
from surefoot.language.data.rows import read_rows as read_rows
from surefoot.language.data.tokens import Messages, Tokens
from surefoot.language.optional import quiet

T = TypeVar("T")
Part = str | list[dict[str, Any]]
SYSTEM = ("system", "developer")
"""roles that speak before the user does"""


@dataclass(frozen=True)
class Demonstrations:
    """What supervised fine-tuning learns from."""

    ids: list[list[int]]
    trained: list[list[bool]]
    """which ids the loss is on, row by row; never the first"""
    dropped: int
    """rows that were too long"""
    unused: tuple[str, ...] = ()
    """columns that nothing is made of"""


@dataclass(frozen=True)
class Pairs:
    """What a reward model learns from: two answers to one prompt, as the whole of prompt and answer."""

    chosen: list[list[int]]
    rejected: list[list[int]]
    prompt_lengths: list[int]
    """how many ids, at the beginning of both, are the prompt's"""
    dropped: int
    """pairs of which one was too long"""
    chosen_trained: list[list[bool]]
    """which ids of the chosen answer the assistant wrote"""
    rejected_trained: list[list[bool]]
    equal: int = 0
    """pairs that were left out because both answers are the same"""
    unused: tuple[str, ...] = ()
    """columns that nothing is made of"""


@dataclass(frozen=True)
class Prompts:
    """What responses are sampled to."""

    prompts: list[str | Messages]
    """as the file has them"""
    ids: list[list[int]]
    columns: dict[str, list[Any]]
    """every other column, for reward functions; None where a row has none"""
    dropped: int
    """prompts that were too long"""
    unused: tuple[str, ...] = ()
    """columns that only reward functions may read"""


def repeated(prompts: Prompts, rows: Sequence[int], samples: int = 1) -> Prompts:
    """Some of the prompts, each as often as it is answered."""
    rows = [row for row in rows for _ in range(samples)]
    columns = {name: [column[row] for row in rows] for name, column in prompts.columns.items()}
    return replace(
        prompts,
        prompts=[prompts.prompts[row] for row in rows],
        ids=[prompts.ids[row] for row in rows],
        columns=columns,
    )


def notes(path: str, limit: int, dropped: int, *, unused: Sequence[str] = (), rows: str = "rows") -> list[str]:
    """What is not learned from in a file: a line for each reason."""
    return [
        *([f"{path}: dropped, because longer than {limit} tokens: {dropped} {rows}"] if dropped else []),
        *([f"{path}: not used: {', '.join(map(repr, unused))}"] if unused else []),
    ]


def pair_notes(path: str, limit: int, pairs: Pairs) -> list[str]:
    """The same of pairs."""
    equal = [f"{path}: dropped, because both answers are the same: {pairs.equal} rows"] if pairs.equal else []
    return equal + notes(path, limit, pairs.dropped, unused=pairs.unused)


def room(max_length: int, context: int | None, answer: int = 0) -> tuple[int, str]:
    """How many tokens a row may have, and how a message says it: by ``data.max_length``, or by what a model's context leaves.

    answer   tokens of the context that ``sampling.max_tokens`` keeps for a response
    """
    if context is None or max_length <= context - answer:
        return max_length, f"data.max_length={max_length}; raise it"
    less = f", less sampling.max_tokens={answer}" if answer else ""
    return context - answer, f"the model's context is {context}{less}; shorten them"


def demonstrations(rows: Sequence[Row], tokens: Tokens, max_length: int, said: str = "") -> Demonstrations:
    """The ids of every row of at most ``max_length`` of them, and which are trained; see ``Tokens.demonstration``.

    ``said`` is how a message says ``max_length`` and its remedy; see ``room``.

    Raises SurefootError, with file and line, for a row of another shape, and when every row is too long.
    """
    made = _each(rows, lambda row: tokens.demonstration(_demonstration(row, tokens)))
    kept = [(ids, trained) for ids, trained in made if len(ids) <= max_length]
    _check_left(rows, len(kept), max_length, min(len(ids) for ids, _ in made), said)
    unused = unused_columns(rows, lambda row: _read(row, _demonstrated(row)), tokens)
    return Demonstrations([ids for ids, _ in kept], [trained for _, trained in kept], len(made) - len(kept), unused)


def pairs(rows: Sequence[Row], tokens: Tokens, max_length: int, said: str = "") -> Pairs:
    """The ids of both answers of every row, with their prompt and EOS, where they differ and have at most ``max_length``.

    Raises SurefootError, with file and line, for a row of another shape, and when no row is left.
    """
    made = _each(rows, lambda row: _pair(row, tokens))
    differ = [pair for pair in made if pair[0] != pair[1]]
    if not differ:
        raise SurefootError(
            f"{rows[0].file}: in every one of its {len(rows)} rows chosen and rejected are the same, so none is better; give "
            "answers that differ"
        )
    kept = [pair for pair in differ if max(len(pair[0]), len(pair[1])) <= max_length]
    _check_left(rows, len(kept), max_length, min(max(len(pair[0]), len(pair[1])) for pair in differ), said)
    chosen, rejected, prompt_lengths, chosen_trained, rejected_trained = map(list, zip(*kept, strict=True))
    return Pairs(
        chosen,
        rejected,
        prompt_lengths,
        len(differ) - len(kept),
        chosen_trained,
        rejected_trained,
        len(made) - len(differ),
        unused_columns(rows, lambda row: _read(row, ("prompt", "chosen", "rejected")), tokens),
    )


def prompts(rows: Sequence[Row], tokens: Tokens, max_length: int, said: str = "") -> Prompts:
    """The prompts of at most ``max_length`` ids: the column ``prompt``, or ``messages`` without the last answer.

    Raises SurefootError, with file and line, for a row of another shape, and when every prompt is too long.
    """
    made = _each(rows, lambda row: _prompt(row, tokens))
    kept = [(prompt, ids, row) for (prompt, ids), row in zip(made, rows, strict=True) if len(ids) <= max_length]
    _check_left(rows, len(kept), max_length, min(len(ids) for _, ids in made), said)
    names = dict.fromkeys(name for _, _, row in kept for name in row.columns if name not in _asked(row))
    columns = {name: [row.columns.get(name) for _, _, row in kept] for name in names}
    unused = unused_columns(rows, lambda row: _read(row, _asked(row)), tokens)
    return Prompts([p for p, _, _ in kept], [ids for _, ids, _ in kept], columns, len(made) - len(kept), unused)


def bare(rows: Sequence[Row]) -> Prompts:
    """Rows as they are, whose prompts an environment makes: every column is kept, and there are no ids yet."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    return Prompts(["" for _ in rows], [[] for _ in rows], columns, 0)


# ---- one row ----------------------------------------------------------------------------------------------------------


def _demonstrated(row: Row) -> tuple[str, ...]:
    """The columns that hold a demonstration."""
    if "messages" in row.columns:
        return ("messages",)
    return ("text",) if "text" in row.columns and "completion" not in row.columns else ("prompt", "completion")


def _asked(row: Row) -> tuple[str, ...]:
    """The column that holds a prompt."""
    return ("messages",) if "prompt" not in row.columns and "messages" in row.columns else ("prompt",)


def _read(row: Row, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those columns, and what is rendered with them where they hold messages."""
    return (*names, TOOLS, SETTINGS) if any(isinstance(row.columns.get(name), list) for name in names) else names


def _demonstration(row: Row, tokens: Tokens) -> Mapping[str, Any]:
    """The columns of a demonstration, checked."""
    names = _demonstrated(row)
    if names == ("messages",):
        return {"messages": _dialogue(row, _messages(row, "messages"), tokens)}
    if names == ("text",):
        return {"text": _text(row, "text")}
    _need(row, names, "a demonstration has prompt and completion, or messages, or text")
    prompt, completion = _parted(_either(row, "prompt"), _either(row, "completion"), "completion")
    return {"prompt": _dialogue(row, prompt, tokens), "completion": _dialogue(row, completion, tokens)}


def _pair(row: Row, tokens: Tokens) -> tuple[list[int], list[int], int, list[bool], list[bool]]:
    """Ids of chosen and rejected, the length of their prompt, and which ids of each are the answer's."""
    _need(row, ("chosen", "rejected"), "a pair has chosen and rejected, and prompt beside them or within them")
    chosen, rejected = (_either(row, name) for name in ("chosen", "rejected"))
    _check_alike({"chosen": chosen, "rejected": rejected})
    if "prompt" in row.columns:
        given, both = _either(row, "prompt"), {"chosen": chosen, "rejected": rejected}
        (prompt, chosen), (again, rejected) = (_parted(given, answer, name) for name, answer in both.items())
        if prompt != again:
            raise SurefootError("chosen and rejected have different messages before the prompt; begin both alike")
    elif isinstance(chosen, str):
        # Cut by ids and not by letters: a token may reach over the place where the texts part.
        whole = [[*tokens.encode_prompt(text), tokens.eos_id] for text in (chosen, rejected)]
        length = min(max(_common(*whole), 1), len(whole[0]) - 1, len(whole[1]) - 1)
        first, second = ([i >= length for i in range(len(ids))] for ids in whole)
        return whole[0], whole[1], length, first, second
    else:
        count = min(_common(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
        if not prompt:
            raise SurefootError("chosen and rejected begin differently, so there is no prompt; begin both with it")
    prompt = _dialogue(row, prompt, tokens)
    (ids, trained), (other, trained_too) = (
        tokens.demonstration({"prompt": prompt, "completion": _dialogue(row, answer, tokens)}) for answer in (chosen, rejected)
    )
    return ids, other, len(tokens.encode_prompt(prompt)), trained, trained_too


def _prompt(row: Row, tokens: Tokens) -> tuple[str | Messages, list[int]]:
    """A prompt as it stands in the file, and its ids."""
    prompt: str | list[dict[str, Any]]
    if _asked(row) == ("messages",):
        prompt = _messages(row, "messages")
        while prompt and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
        if not prompt:
            raise SurefootError("column 'messages' has nothing before the answer; begin with a message of the user")
    else:
        _need(row, ("prompt",), "a prompt is in the column prompt, or in messages")
        prompt = _either(row, "prompt")
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise SurefootError("column 'prompt' ends with a message of the assistant, and a response can't follow one")
    dialogue = _dialogue(row, prompt, tokens)
    return dialogue, tokens.encode_prompt(dialogue)


def _parted(prompt: Part, answer: Part, name: str) -> tuple[Part, Part]:
    """Prompt and answer, where messages of the answer may repeat the prompt: its last messages, or all of them.

    Then text is a message of the user, and a system message that only the answer has is the prompt's.
    """
    if isinstance(answer, str):
        _check_alike({"prompt": prompt, name: answer})
        return prompt, answer
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if answer[0]["role"] in SYSTEM and asked[0]["role"] not in SYSTEM:
        asked = [answer[0], *asked]
    first, second = ([(m["role"], m.get("content", "").strip(), m.get(CALLS)) for m in part] for part in (asked, answer))
    again = max(count for count in range(min(len(first), len(second)) + 1) if first[len(first) - count :] == second[:count])
    if again == len(answer):
        raise SurefootError(f"column {name!r} has nothing after the prompt; end it with a message of the assistant")
    if not again:
        _check_alike({"prompt": prompt, name: answer})
        return prompt, answer
    return asked, answer[again:]


def _dialogue(row: Row, part: Part, tokens: Tokens) -> Any:
    """Messages with the tools and settings of their row, where it has any; text as it is."""
    if isinstance(part, str):
        return part
    options = template_options(row, tokens)
    if any(CALLS in message for message in part) and not tokens.reads(CALLS, options):
        raise SurefootError(
            f"the chat template does not write {CALLS!r}, which a message has; remove the row, or use another model"
        )
    return Dialogue(part, options) if options else part


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many elements two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- checks -----------------------------------------------------------------------------------------------------------


def _each(rows: Sequence[Row], make: Callable[[Row], T]) -> list[T]:
    """Something of every row; an error says where."""
    made = []
    with quiet():  # a tokenizer warns of text longer than the context, and such rows are counted here
        for row in rows:
            try:
                made.append(make(row))
            except SurefootError as error:
                raise SurefootError(f"{row.where}: {error}") from None
    return made


def _check_left(rows: Sequence[Row], kept: int, max_length: int, shortest: int, said: str) -> None:
    if not kept:
        raise SurefootError(
            f"{rows[0].file}: every one of its {len(rows)} rows is dropped: the shortest has {shortest} tokens and "
            f"{said or f'max_length={max_length}; raise it'}"
        )


def _need(row: Row, names: Sequence[str], shape: str) -> None:
    for name in names:
        if name not in row.columns:
            there = ", ".join(map(repr, row.columns)) or "none"
            raise SurefootError(f"missing column {name!r}{did_you_mean(name, row.columns)}; {shape}; columns here: {there}")


def _either(row: Row, name: str) -> str | list[dict[str, Any]]:
    """Text, or messages."""
    value = row.columns[name]
    return _messages(row, name) if isinstance(value, list) else _text(row, name, "text or a list of messages")


def _text(row: Row, name: str, wanted: str = "text") -> str:
    value = row.columns[name]
    if not isinstance(value, str):
        raise SurefootError(f"column {name!r} is {kind_of(value)}; it must be {wanted}")
    return value


def _messages(row: Row, name: str) -> list[dict[str, Any]]:
    """A conversation: objects with a role and a content, in place of which tools may be called.

    Keys that are null (Parquet fills them in) are left out.
    """
    value = row.columns[name]
    if not isinstance(value, list):
        raise SurefootError(f"column {name!r} is {kind_of(value)}; it must be a list of messages")
    if not value:
        raise SurefootError(f"column {name!r} is an empty list; it must hold at least one message")
    for index, message in enumerate(value):
        place = f"column {name!r}, message {index + 1}"
        if not isinstance(message, dict):
            raise SurefootError(f"{place} is {kind_of(message)}; a message is an object with a role and a content")
        calls = message.get(CALLS) or []
        if not isinstance(calls, list):
            raise SurefootError(f"{place}: {CALLS!r} is {kind_of(calls)}; it must be a list")
        for key in ("role", "content"):
            if key == "content" and message.get(key) is None and calls and message["role"] == "assistant":
                continue
            if key not in message:
                raise SurefootError(f"{place} has no {key!r}; a message is an object with a role and a content")
            if not isinstance(message[key], str):
                raise SurefootError(f"{place}: {key!r} is {kind_of(message[key])}; it must be text")
        check_weight(message, place)
    return [{key: part for key, part in message.items() if part is not None and (key != CALLS or part)} for message in value]


def _check_alike(parts: Mapping[str, str | list[dict[str, Any]]]) -> None:
    """All text, or all messages."""
    if len({isinstance(part, str) for part in parts.values()}) > 1:
        kinds = ", ".join(f"{name!r} is {'text' if isinstance(part, str) else 'messages'}" for name, part in parts.items())
        raise SurefootError(f"columns differ: {kinds}; make all text, or all messages")
