"""One row as token ids: its columns, checked, its answer without what repeats the prompt, and its options for the template."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.errors import SurefootError, cause_of
from surefoot.language.data.chat import Dialogue, Messages
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
from surefoot.language.data.tokens import Tokens

Part = str | list[dict[str, Any]]
NOTHING: tuple[Any, ...] = (None, [], {}, "")
"""values of columns and keys that are not there"""
SYSTEM = ("system", "developer")
"""roles that may precede the user"""


def demonstration_columns(row: Row) -> tuple[str, ...]:
    """The columns of a demonstration."""
    if "messages" in row.columns:
        return ("messages",)
    return ("text",) if "text" in row.columns and "completion" not in row.columns else ("prompt", "completion")


def prompt_columns(row: Row) -> tuple[str, ...]:
    """The column of a prompt."""
    return ("messages",) if "prompt" not in row.columns and "messages" in row.columns else ("prompt",)


def used_columns(row: Row, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those columns; for messages also the columns for the chat template."""
    return (*names, TOOLS, SETTINGS) if any(isinstance(row.columns.get(name), list) for name in names) else names


def demonstration_of(row: Row, tokens: Tokens) -> Mapping[str, Any]:
    """The columns of a demonstration, checked."""
    names = demonstration_columns(row)
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


def prompt_of(row: Row, tokens: Tokens) -> tuple[str | Messages, list[int]]:
    """A prompt as in the file, and its ids."""
    prompt: str | list[dict[str, Any]]
    if prompt_columns(row) == ("messages",):
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
    dialogue = dialogue_of(row, prompt, tokens)
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
