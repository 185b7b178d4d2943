"""Rows in the shapes of the ecosystem become token ids: demonstrations, pairs of answers, prompts.

Demonstrations are ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``; pairs ``{"prompt", "chosen", "rejected"}``,
or ``{"chosen", "rejected"}``, whose common beginning is the prompt. Each is text, or messages with a role and a content; beside
messages, ``tools`` and ``chat_template_kwargs`` are for the chat template. Answers may repeat the messages of their prompt, or
its text as the user's message. Rows that are too long, and pairs of equal answers, are left out and counted; anything else that
is wrong is one line with file and line."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from surefoot.errors import SurefootError, cause_of
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
from surefoot.language.data.rows import read_rows as read_rows
from surefoot.language.data.tokens import Dialogue, Messages, Tokens
from surefoot.language.extras import quiet_transformers

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


def repeat_prompts(prompts: Prompts, rows: Sequence[int], samples: int = 1) -> Prompts:
    """Some of the prompts, each as often as it is answered."""
    rows = [row for row in rows for _ in range(samples)]
    columns = {name: [column[row] for row in rows] for name, column in prompts.columns.items()}
    return replace(
        prompts,
        prompts=[prompts.prompts[row] for row in rows],
        ids=[prompts.ids[row] for row in rows],
        columns=columns,
    )


def drop_notes(path: str, limit: int, dropped: int, *, unused: Sequence[str] = (), rows: str = "rows") -> list[str]:
    """What is not learned from in a file: a line for each reason."""
    return [
        *([f"{path}: dropped, because longer than {limit} tokens: {dropped} {rows}"] if dropped else []),
        *([f"{path}: not used: {', '.join(map(repr, unused))}"] if unused else []),
    ]


def pair_drop_notes(path: str, limit: int, pairs: Pairs) -> list[str]:
    """The same of pairs."""
    equal = [f"{path}: dropped, because both answers are the same: {pairs.equal} rows"] if pairs.equal else []
    return equal + drop_notes(path, limit, pairs.dropped, unused=pairs.unused)


def token_limit(max_length: int, context: int | None, answer: int = 0) -> tuple[int, str]:
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
    made = _map_rows(rows, lambda row: tokens.demonstration(_demonstration(row, tokens)))
    kept = [(ids, trained) for ids, trained in made if len(ids) <= max_length]
    _check_any_kept(rows, len(kept), max_length, min(len(ids) for ids, _ in made), said)
    unused = unused_columns(rows, lambda row: _used_columns(row, _demonstration_columns(row)), tokens)
    return Demonstrations([ids for ids, _ in kept], [trained for _, trained in kept], len(made) - len(kept), unused)


def pairs(rows: Sequence[Row], tokens: Tokens, max_length: int, said: str = "") -> Pairs:
    """The ids of both answers of every row, with their prompt and EOS, where they differ and have at most ``max_length``.

    Raises SurefootError, with file and line, for a row of another shape, and when no row is left.
    """
    made = _map_rows(rows, lambda row: _pair(row, tokens))
    differ = [pair for pair in made if pair[0] != pair[1]]
    if not differ:
        raise SurefootError(
            f"{rows[0].file}: in every one of its {len(rows)} rows chosen and rejected are the same, so none is better; give "
            "answers that differ"
        )
    kept = [pair for pair in differ if max(len(pair[0]), len(pair[1])) <= max_length]
    _check_any_kept(rows, len(kept), max_length, min(max(len(pair[0]), len(pair[1])) for pair in differ), said)
    chosen, rejected, prompt_lengths, chosen_trained, rejected_trained = map(list, zip(*kept, strict=True))
    return Pairs(
        chosen,
        rejected,
        prompt_lengths,
        len(differ) - len(kept),
        chosen_trained,
        rejected_trained,
        len(made) - len(differ),
        unused_columns(rows, lambda row: _used_columns(row, ("prompt", "chosen", "rejected")), tokens),
    )


def prompts(rows: Sequence[Row], tokens: Tokens, max_length: int, said: str = "") -> Prompts:
    """The prompts of at most ``max_length`` ids: the column ``prompt``, or ``messages`` without the last answer.

    Raises SurefootError, with file and line, for a row of another shape, and when every prompt is too long.
    """
    made = _map_rows(rows, lambda row: _prompt(row, tokens))
    kept = [(prompt, ids, row) for (prompt, ids), row in zip(made, rows, strict=True) if len(ids) <= max_length]
    _check_any_kept(rows, len(kept), max_length, min(len(ids) for _, ids in made), said)
    names = dict.fromkeys(name for _, _, row in kept for name in row.columns if name not in _prompt_columns(row))
    columns = {name: [row.columns.get(name) for _, _, row in kept] for name in names}
    unused = unused_columns(rows, lambda row: _used_columns(row, _prompt_columns(row)), tokens)
    return Prompts([p for p, _, _ in kept], [ids for _, ids, _ in kept], columns, len(made) - len(kept), unused)


def prompts_without_ids(rows: Sequence[Row]) -> Prompts:
    """Rows as they are, whose prompts an environment makes: every column is kept, and there are no ids yet."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    return Prompts(["" for _ in rows], [[] for _ in rows], columns, 0)


# ---- one row ----------------------------------------------------------------------------------------------------------


def _demonstration_columns(row: Row) -> tuple[str, ...]:
    """The columns that hold a demonstration."""
    if "messages" in row.columns:
        return ("messages",)
    return ("text",) if "text" in row.columns and "completion" not in row.columns else ("prompt", "completion")


def _prompt_columns(row: Row) -> tuple[str, ...]:
    """The column that holds a prompt."""
    return ("messages",) if "prompt" not in row.columns and "messages" in row.columns else ("prompt",)


def _used_columns(row: Row, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those columns, and what is rendered with them where they hold messages."""
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
        given, both = text_or_messages(row, "prompt"), {"chosen": chosen, "rejected": rejected}
        (prompt, chosen), (again, rejected) = (_split_answer(given, answer, name) for name, answer in both.items())
        if prompt != again:
            raise SurefootError("chosen and rejected have different messages before the prompt; begin both alike")
    elif isinstance(chosen, str):
        # Cut by ids and not by letters: a token may reach over the place where the texts part.
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
    """A prompt as it stands in the file, and its ids."""
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
    """Prompt and answer, where messages of the answer may repeat the prompt: its last messages, or all of them.

    Then text is a message of the user, and a system message that only the answer has is the prompt's.
    """
    if isinstance(answer, str):
        check_same_kind({"prompt": prompt, name: answer})
        return prompt, answer
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if answer[0]["role"] in SYSTEM and asked[0]["role"] not in SYSTEM:
        asked = [answer[0], *asked]
    first, second = ([(m["role"], m.get("content", "").strip(), m.get(CALLS)) for m in part] for part in (asked, answer))
    again = max(count for count in range(min(len(first), len(second)) + 1) if first[len(first) - count :] == second[:count])
    if again == len(answer):
        raise SurefootError(f"column {name!r} has nothing after the prompt; end it with a message of the assistant")
    if not again:
        check_same_kind({"prompt": prompt, name: answer})
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


def _common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many elements two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- checks -----------------------------------------------------------------------------------------------------------


def _map_rows(rows: Sequence[Row], make: Callable[[Row], T]) -> list[T]:
    """Something of every row; an error says where."""
    made = []
    with quiet_transformers():  # a tokenizer warns of text longer than the context, and such rows are counted here
        for row in rows:
            try:
                made.append(make(row))
            except SurefootError as error:
                raise SurefootError(f"{row.where}: {error}") from None
    return made


def _check_any_kept(rows: Sequence[Row], kept: int, max_length: int, shortest: int, said: str) -> None:
    if not kept:
        raise SurefootError(
            f"{rows[0].file}: every one of its {len(rows)} rows is dropped: the shortest has {shortest} tokens and "
            f"{said or f'max_length={max_length}; raise it'}"
        )


def template_options(row: Row, tokens: Tokens) -> dict[str, Any]:
    """What the messages of a row bring to the chat template: ``tools``, and what ``chat_template_kwargs`` holds.

    Both may be JSON in text, as files with a schema store them. Null and empty ones are as good as none.

    Raises SurefootError where they are something else, or the chat template has no use for them: they would have no effect.
    """
    found = dict(_json_column(row, SETTINGS, dict, "an object"))
    for name in found:
        if name in _reserved_names(tokens):
            raise SurefootError(f"column {SETTINGS!r}: {name!r} is not for a row to set; remove it")
    tools = _json_column(row, TOOLS, list, "a list of objects, each the JSON schema of a function")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise SurefootError(f"column {TOOLS!r}, tool {index + 1} is {json_type(tool)}; it must be an object")
    if tools:
        found[TOOLS] = tools
    for name in found:
        if not tokens.reads(name, found):
            column = repr(TOOLS) if name == TOOLS else f"{SETTINGS!r}: {name!r}"
            raise SurefootError(
                f"column {column} has no effect, because the chat template does not read it; remove it, or use another model"
            )
    return found


def unused_columns(rows: Iterable[Row], read: Callable[[Row], Sequence[str]], tokens: Tokens) -> tuple[str, ...]:
    """What has a value in some row and no effect: columns other than those that are ``read``, and keys of messages that the
    chat template does not have, as ``messages[].name``.
    """
    found: dict[str, None] = {}
    known: dict[str, bool] = dict.fromkeys(("role", "content", WEIGHT), True)
    for row in rows:
        names = read(row)
        for name, value in row.columns.items():
            if name not in names and value not in (None, [], {}, ""):
                found[name] = None
            elif name in names and name not in (TOOLS, SETTINGS) and isinstance(value, list):
                for key in (key for message in value for key, part in message.items() if part not in (None, [], {}, "")):
                    if key not in known:
                        known[key] = tokens.reads(key, {})
                    if not known[key]:
                        found[f"{name}[].{key}"] = None
    return tuple(found)


def _reserved_names(tokens: Tokens) -> set[str]:
    """Names that mean something else where messages are rendered."""
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
