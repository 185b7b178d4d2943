"""Rows in the shapes of the ecosystem become token ids: demonstrations, pairs of answers, prompts.

Demonstrations are ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``; pairs ``{"prompt", "chosen", "rejected"}``,
or ``{"chosen", "rejected"}``, whose common beginning is the prompt. Each is text, or messages with a role and a content.
Rows that are too long are left out and counted; anything else that is wrong is one line with file and line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from surefoot.errors import SurefootError, did_you_mean
from surefoot.language.optional import quiet
from surefoot.language.rows import Row as Row
from surefoot.language.rows import kind_of
from surefoot.language.rows import read_rows as read_rows
from surefoot.language.tokens import Messages, Tokens

T = TypeVar("T")


@dataclass(frozen=True)
class Demonstrations:
    """What supervised fine-tuning learns from."""

    ids: list[list[int]]
    trained: list[list[bool]]
    """which ids the loss is on, row by row; never the first"""
    dropped: int
    """rows that were too long"""


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


def repeated(prompts: Prompts, rows: Sequence[int], samples: int = 1) -> Prompts:
    """Some of the prompts, each as often as it is answered."""
    rows = [row for row in rows for _ in range(samples)]
    columns = {name: [column[row] for row in rows] for name, column in prompts.columns.items()}
    return Prompts([prompts.prompts[row] for row in rows], [prompts.ids[row] for row in rows], columns, prompts.dropped)


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
    made = _each(rows, lambda row: tokens.demonstration(_demonstration(row)))
    kept = [(ids, trained) for ids, trained in made if len(ids) <= max_length]
    _check_left(rows, len(kept), max_length, min(len(ids) for ids, _ in made), said)
    return Demonstrations([ids for ids, _ in kept], [trained for _, trained in kept], len(made) - len(kept))


def pairs(rows: Sequence[Row], tokens: Tokens, max_length: int, said: str = "") -> Pairs:
    """The ids of both answers of every row, with their prompt and EOS, where both have at most ``max_length``.

    Raises SurefootError, with file and line, for a row of another shape, and when every row is too long.
    """
    made = _each(rows, lambda row: _pair(row, tokens))
    kept = [pair for pair in made if max(len(pair[0]), len(pair[1])) <= max_length]
    _check_left(rows, len(kept), max_length, min(max(len(pair[0]), len(pair[1])) for pair in made), said)
    chosen, rejected, prompt_lengths, chosen_trained, rejected_trained = map(list, zip(*kept, strict=True))
    return Pairs(chosen, rejected, prompt_lengths, len(made) - len(kept), chosen_trained, rejected_trained)


def prompts(rows: Sequence[Row], tokens: Tokens, max_length: int, said: str = "") -> Prompts:
    """The prompts of at most ``max_length`` ids: the column ``prompt``, or ``messages`` without the last answer.

    Raises SurefootError, with file and line, for a row of another shape, and when every prompt is too long.
    """
    made = _each(rows, lambda row: _prompt(row, tokens))
    kept = [(prompt, ids, row) for (prompt, ids), row in zip(made, rows, strict=True) if len(ids) <= max_length]
    _check_left(rows, len(kept), max_length, min(len(ids) for _, ids in made), said)
    names = dict.fromkeys(name for _, _, row in kept for name in row.columns if name not in ("prompt", "messages"))
    columns = {name: [row.columns.get(name) for _, _, row in kept] for name in names}
    return Prompts([p for p, _, _ in kept], [ids for _, ids, _ in kept], columns, len(made) - len(kept))


def bare(rows: Sequence[Row]) -> Prompts:
    """Rows as they are, whose prompts an environment makes: every column is kept, and there are no ids yet."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    return Prompts(["" for _ in rows], [[] for _ in rows], columns, 0)


# ---- one row ----------------------------------------------------------------------------------------------------------


def _demonstration(row: Row) -> Mapping[str, Any]:
    """The columns of a demonstration, checked."""
    if "messages" in row.columns:
        return {"messages": _messages(row, "messages")}
    if "text" in row.columns and "completion" not in row.columns:
        return {"text": _text(row, "text")}
    _need(row, ("prompt", "completion"), "a demonstration has prompt and completion, or messages, or text")
    prompt, completion = (_either(row, name) for name in ("prompt", "completion"))
    _check_alike(row, {"prompt": prompt, "completion": completion})
    return {"prompt": prompt, "completion": completion}


def _pair(row: Row, tokens: Tokens) -> tuple[list[int], list[int], int, list[bool], list[bool]]:
    """Ids of chosen and rejected, the length of their prompt, and which ids of each are the answer's."""
    _need(row, ("chosen", "rejected"), "a pair has chosen and rejected, and prompt beside them or within them")
    chosen, rejected = (_either(row, name) for name in ("chosen", "rejected"))
    _check_alike(row, {"chosen": chosen, "rejected": rejected})
    if "prompt" in row.columns:
        prompt = _either(row, "prompt")
        _check_alike(row, {"prompt": prompt, "chosen": chosen})
    elif isinstance(chosen, str):
        # Cut by ids and not by letters: a token may reach over the place where the texts part.
        both = [[*tokens.encode_prompt(text), tokens.eos_id] for text in (chosen, rejected)]
        length = min(max(_common(*both), 1), len(both[0]) - 1, len(both[1]) - 1)
        first, second = ([i >= length for i in range(len(ids))] for ids in both)
        return both[0], both[1], length, first, second
    else:
        count = min(_common(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
        if not prompt:
            raise SurefootError("chosen and rejected begin differently, so there is no prompt; begin both with it")
    (ids, trained), (other, trained_too) = (
        tokens.demonstration({"prompt": prompt, "completion": answer}) for answer in (chosen, rejected)
    )
    return ids, other, len(tokens.encode_prompt(prompt)), trained, trained_too


def _prompt(row: Row, tokens: Tokens) -> tuple[str | Messages, list[int]]:
    """A prompt as it stands in the file, and its ids."""
    prompt: str | Messages
    if "prompt" not in row.columns and "messages" in row.columns:
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
    return prompt, tokens.encode_prompt(prompt)


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
    """A conversation: objects with a role and a content. Keys that are null (Parquet fills them in) are left out."""
    value = row.columns[name]
    if not isinstance(value, list):
        raise SurefootError(f"column {name!r} is {kind_of(value)}; it must be a list of messages")
    if not value:
        raise SurefootError(f"column {name!r} is an empty list; it must hold at least one message")
    for index, message in enumerate(value):
        place = f"column {name!r}, message {index + 1}"
        if not isinstance(message, dict):
            raise SurefootError(f"{place} is {kind_of(message)}; a message is an object with a role and a content")
        for key in ("role", "content"):
            if key not in message:
                raise SurefootError(f"{place} has no {key!r}; a message is an object with a role and a content")
            if not isinstance(message[key], str):
                raise SurefootError(f"{place}: {key!r} is {kind_of(message[key])}; it must be text")
    return [{key: part for key, part in message.items() if part is not None} for message in value]


def _check_alike(row: Row, parts: Mapping[str, str | list[dict[str, Any]]]) -> None:
    """All text, or all messages."""
    if len({isinstance(part, str) for part in parts.values()}) > 1:
        kinds = ", ".join(f"{name!r} is {'text' if isinstance(part, str) else 'messages'}" for name, part in parts.items())
        raise SurefootError(f"columns differ: {kinds}; make all text, or all messages")
