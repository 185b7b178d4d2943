"""Turn rows into token ids: demonstrations, pairs of answers, prompts.

Demonstrations are ``{"messages"}``, ``{"prompt", "completion"}`` or ``{"text"}``. Pairs are ``{"prompt", "chosen",
"rejected"}``, or ``{"chosen", "rejected"}`` with the prompt as their common beginning. Each column is text, or messages with a
role and a content; ``tools`` and ``chat_template_kwargs`` are passed to the chat template. Answers may repeat the messages of
their prompt, or its text as the user's message. Rows that are too long and pairs of equal answers are dropped and counted. Any
other error is one line with file and line.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from surefoot.errors import SurefootError, cause_of
from surefoot.language import quiet_transformers
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

T = TypeVar("T")
Part = str | list[dict[str, Any]]
SYSTEM = ("system", "developer")
"""roles that may precede the user"""


@dataclass(frozen=True)
class Demonstrations:
    """Tokenised demonstrations for supervised fine-tuning."""

    ids: list[list[int]]
    trained: list[list[bool]]
    """which ids are trained, row by row; never the first"""
    dropped: int
    """number of rows dropped as too long"""
    unused: tuple[str, ...] = ()
    """columns that are not used"""


@dataclass(frozen=True)
class Pairs:
    """Tokenised pairs for a reward model or DPO: each side is prompt and answer."""

    chosen: list[list[int]]
    rejected: list[list[int]]
    prompt_lengths: list[int]
    """number of the prompt's ids at the beginning of both sides"""
    dropped: int
    """number of pairs dropped because a side was too long"""
    chosen_trained: list[list[bool]]
    """which ids of the chosen side the assistant wrote"""
    rejected_trained: list[list[bool]]
    equal: int = 0
    """number of pairs dropped because both answers are the same"""
    unused: tuple[str, ...] = ()
    """columns that are not used"""


@dataclass(frozen=True)
class Prompts:
    """Tokenised prompts for sampling."""

    prompts: list[str | Messages]
    """as in the file"""
    ids: list[list[int]]
    columns: dict[str, list[Any]]
    """every other column, for reward functions; None for rows without it"""
    dropped: int
    """number of prompts dropped as too long"""
    unused: tuple[str, ...] = ()
    """columns that only reward functions read"""


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


def drop_notes(path: str, limit: int, dropped: int, *, unused: Sequence[str] = (), rows: str = "rows") -> list[str]:
    """Lines about dropped rows and unused columns of a file."""
    return [
        *([f"{path}: dropped, because longer than {limit} tokens: {dropped} {rows}"] if dropped else []),
        *([f"{path}: not used: {', '.join(map(repr, unused))}"] if unused else []),
    ]


def pair_drop_notes(path: str, limit: int, pairs: Pairs) -> list[str]:
    """The same for pairs."""
    equal = [f"{path}: dropped, because both answers are the same: {pairs.equal} rows"] if pairs.equal else []
    return equal + drop_notes(path, limit, pairs.dropped, unused=pairs.unused)


def token_limit(max_length: int, context: int | None, answer: int = 0) -> tuple[int, str]:
    """The token limit of a row, by ``data.max_length`` or the model's context; and its text with a remedy for errors.

    answer   tokens of the context reserved for a response
    """
    if context is None or max_length <= context - answer:
        return max_length, f"data.max_length={max_length}; raise it"
    less = f", less sampling.max_tokens={answer}" if answer else ""
    return context - answer, f"the model's context is {context}{less}; shorten them"


def demonstrations(rows: Sequence[Row], tokens: Tokens, max_length: int, limit_text: str = "") -> Demonstrations:
    """Tokenise the rows of at most ``max_length`` ids, and mark trained ids; see ``Tokens.demonstration``.

    ``limit_text`` describes ``max_length`` and its remedy in errors; see ``token_limit``.

    Raises SurefootError, with file and line, for a row of another shape, and if every row is too long.
    """
    made = _map_rows(rows, lambda row: tokens.demonstration(_demonstration(row, tokens)))
    kept = [(ids, trained) for ids, trained in made if len(ids) <= max_length]
    _check_any_kept(rows, len(kept), max_length, min(len(ids) for ids, _ in made), limit_text)
    unused = unused_columns(rows, lambda row: _used_columns(row, _demonstration_columns(row)), tokens)
    return Demonstrations([ids for ids, _ in kept], [trained for _, trained in kept], len(made) - len(kept), unused)


def pairs(rows: Sequence[Row], tokens: Tokens, max_length: int, limit_text: str = "") -> Pairs:
    """Tokenise both answers of every row, with prompt and EOS, if they differ and have at most ``max_length`` ids.

    Raises SurefootError, with file and line, for a row of another shape, and if no row remains.
    """
    made = _map_rows(rows, lambda row: _pair(row, tokens))
    differ = [pair for pair in made if pair[0] != pair[1]]
    if not differ:
        raise SurefootError(
            f"{rows[0].file}: chosen and rejected are the same in all {len(rows)} rows; give answers that differ"
        )
    kept = [pair for pair in differ if max(len(pair[0]), len(pair[1])) <= max_length]
    _check_any_kept(rows, len(kept), max_length, min(max(len(pair[0]), len(pair[1])) for pair in differ), limit_text)
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


def prompts(rows: Sequence[Row], tokens: Tokens, max_length: int, limit_text: str = "") -> Prompts:
    """Tokenise the prompts of at most ``max_length`` ids: column ``prompt``, or ``messages`` without the last answer.

    Raises SurefootError, with file and line, for a row of another shape, and if every prompt is too long.
    """
    made = _map_rows(rows, lambda row: _prompt(row, tokens))
    kept = [(prompt, ids, row) for (prompt, ids), row in zip(made, rows, strict=True) if len(ids) <= max_length]
    _check_any_kept(rows, len(kept), max_length, min(len(ids) for _, ids in made), limit_text)
    names = dict.fromkeys(name for _, _, row in kept for name in row.columns if name not in _prompt_columns(row))
    columns = {name: [row.columns.get(name) for _, _, row in kept] for name in names}
    unused = unused_columns(rows, lambda row: _used_columns(row, _prompt_columns(row)), tokens)
    return Prompts([p for p, _, _ in kept], [ids for _, ids, _ in kept], columns, len(made) - len(kept), unused)


def prompts_without_ids(rows: Sequence[Row]) -> Prompts:
    """Rows for an environment, which makes the prompts: every column is kept, and there are no ids."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    return Prompts(["" for _ in rows], [[] for _ in rows], columns, 0)


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


def _map_rows(rows: Sequence[Row], make: Callable[[Row], T]) -> list[T]:
    """Apply a function to every row; errors begin with the row's location."""
    results = []
    with quiet_transformers():  # the tokenizer warns of text longer than the context; such rows are counted here
        for row in rows:
            try:
                results.append(make(row))
            except SurefootError as error:
                raise SurefootError(f"{row.where}: {error}") from None
    return results


def _check_any_kept(rows: Sequence[Row], kept: int, max_length: int, shortest: int, limit_text: str) -> None:
    if not kept:
        raise SurefootError(
            f"{rows[0].file}: all {len(rows)} rows are dropped: the shortest has {shortest} tokens and "
            f"{limit_text or f'max_length={max_length}; raise it'}"
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


def unused_columns(rows: Iterable[Row], read: Callable[[Row], Sequence[str]], tokens: Tokens) -> tuple[str, ...]:
    """Columns with a value in some row but no effect: those not in ``read``, and keys of messages that the chat template does
    not read, as ``messages[].name``.
    """
    unused: dict[str, None] = {}
    known: dict[str, bool] = dict.fromkeys(("role", "content", WEIGHT), True)
    for row in rows:
        names = read(row)
        for name, value in row.columns.items():
            if name not in names and value not in (None, [], {}, ""):
                unused[name] = None
            elif name in names and name not in (TOOLS, SETTINGS) and isinstance(value, list):
                for key in (key for message in value for key, part in message.items() if part not in (None, [], {}, "")):
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
