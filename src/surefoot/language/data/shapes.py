"""Rows as public data sets write them, as rows of Surefoot: ShareGPT, Alpaca, messages that answer text, labelled answers."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from surefoot.errors import SurefootError
from surefoot.language.data.rows import CALLS, WEIGHT, Row, joined_parts, json_list, json_type, require_columns, text_column

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""ShareGPT's ``from`` -> role"""
ALPACA, ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n",
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
)
"""prompts of models without a chat template (Taori et al. 2023)"""
OURS = ("messages", "prompt", "text")
LABELS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


def shape_of(columns: Mapping[str, Any]) -> str:
    """The name of a foreign shape, by its columns; "" for Surefoot's own."""
    if "conversations" in columns and not any(name in columns for name in OURS):
        return "ShareGPT"
    if "instruction" in columns and not any(name in columns for name in OURS):
        return "Alpaca"
    return "labelled answers" if is_labelled(columns) else ""


def as_demonstration(row: Row, chat: bool) -> Row:
    """A row whose demonstration is in Surefoot's columns.

    chat   whether the model has a chat template; without one, Alpaca's prompts are text
    """
    row = as_prompt(row, chat)
    if "output" in row.columns and "completion" not in row.columns and row.columns.get("prompt") is not None:
        columns = dict(row.columns)
        answer = columns.pop("output")
        columns["completion"] = answer if isinstance(columns["prompt"], str) else _answer(answer)
        return Row(columns, row.where, row.file)
    if isinstance(row.columns.get("prompt"), str) and _is_answer(row.columns.get("completion")):
        prompt = [{"role": "user", "content": row.columns["prompt"]}]
        return Row({**row.columns, "prompt": prompt}, row.where, row.file)
    return row


def as_pair(row: Row, chat: bool) -> Row:
    """A row whose pair is in Surefoot's columns: a single message as an answer becomes a list."""
    foreign = shape_of(row.columns)
    row = as_prompt(row, chat)
    columns = dict(row.columns)
    for name in ("chosen", "rejected"):
        if isinstance(columns.get(name), dict):
            columns[name] = _sharegpt([columns[name]], name) if "from" in columns[name] else [columns[name]]
        elif isinstance(columns.get(name), list) and columns[name] and "from" in (columns[name][0] or ()):
            columns[name] = _sharegpt(columns[name], name)
        elif foreign and isinstance(columns.get(name), str) and not isinstance(columns.get("prompt"), str):
            columns[name] = _answer(columns[name])
    if foreign == "ShareGPT" and {"chosen", "rejected"} <= columns.keys():
        columns["prompt"] = columns.pop("messages")
    prompt, answers = columns.get("prompt"), [columns.get(name) for name in ("chosen", "rejected")]
    if isinstance(prompt, str) and all(_is_answer(answer) for answer in answers):
        columns["prompt"] = [{"role": "user", "content": prompt}]
    return Row(columns, row.where, row.file)


def is_labelled(columns: Mapping[str, Any], numbers: bool = False) -> bool:
    """Whether a row has one answer and whether it is good: ``prompt``, ``completion`` and ``label``.

    numbers   take 0 and 1 for labels; elsewhere they may be classes
    """
    return (
        {"prompt", "completion", "label"} <= columns.keys()
        and not {"chosen", "rejected"} & columns.keys()
        and _label(columns["label"], numbers) is not None
    )


def paired(rows: Iterable[Row], left_over: list[int]) -> Iterator[Row]:
    """Rows with both answers, of rows with one labelled answer each: to the same prompt, the first good answer with the first
    bad one, and so on. Other rows stay.

    left_over   gets the number of rows without a partner, at the end
    """
    waiting: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        if not is_labelled(row.columns, numbers=True):
            yield row
            continue
        label = _label(row.columns["label"], numbers=True)
        assert label is not None
        prompt = json.dumps(row.columns["prompt"], sort_keys=True, default=str)
        key = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()
        partners = waiting.get((key, not label))
        if not partners:
            waiting.setdefault((key, label), []).append(row)
            continue
        partner = partners.pop(0)
        good, bad = (row, partner) if label else (partner, row)
        columns = {name: value for name, value in row.columns.items() if name not in ("completion", "label")}
        columns |= {"chosen": good.columns["completion"], "rejected": bad.columns["completion"]}
        yield Row(columns, row.where, row.file)
    left_over.append(sum(map(len, waiting.values())))


def unpaired(rows: Iterable[Row], chat: bool) -> Iterator[Row]:
    """Rows with one labelled answer each, of rows with two: the chosen answer is good, the rejected one bad. Other rows stay.

    chat   whether the model has a chat template

    Raises SurefootError, with file and line, for answers of an unknown shape.
    """
    for row in rows:
        if not {"chosen", "rejected"} <= row.columns.keys():
            yield row
            continue
        try:
            pair = as_pair(row, chat)
        except SurefootError as error:
            raise SurefootError(f"{row.where}: {error}") from None
        others = {name: value for name, value in pair.columns.items() if name not in ("chosen", "rejected")}
        for name, label in (("chosen", True), ("rejected", False)):
            yield Row({**others, "completion": pair.columns[name], "label": label}, row.where, row.file)


def steps_of(row: Row, separator: str) -> tuple[list[str], list[bool]]:
    """The steps of an answer and whether each is good: ``completions`` and ``labels``, as in TRL's stepwise supervision.

    Raises SurefootError unless they are lists of the same length, and joining and splitting the steps gives the same steps.
    """
    require_columns(row, ("prompt", "completions", "labels"), "an answer in steps has prompt, completions and labels")
    steps, labels = (
        json_list(value) if isinstance(value, str) else value for value in (row.columns["completions"], row.columns["labels"])
    )
    for name, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list) or not value:
            raise SurefootError(f"column {name!r} is {'an empty list' if value == [] else json_type(value)}; it must be a list")
    if len(steps) != len(labels):
        raise SurefootError(f"column 'labels' has {len(labels)} labels for {len(steps)} completions; label every step")
    good = [_label(value, numbers=True) for value in labels]
    for index, (step, label) in enumerate(zip(steps, good, strict=True), start=1):
        if not isinstance(step, str) or not step.strip():
            raise SurefootError(
                f"column 'completions', step {index} is {'empty' if step == '' else f'{step!r:.40}'}; it must be text"
            )
        if label is None:
            raise SurefootError(f"column 'labels', step {index} is {labels[index - 1]!r:.40}; it must be true or false")
        if not separator and len(step) != 1:
            raise SurefootError(f"column 'completions', step {index} is {step!r:.40}; without a separator it is one character")
    if separator and separator.join(steps).split(separator) != steps:
        raise SurefootError(
            f"column 'completions' has steps that contain {separator!r}, by which runs split answers into steps; set another "
            "preference.separator"
        )
    return steps, [bool(label) for label in good]


def label_of(row: Row) -> bool:
    """Whether the answer of a row is good, by its column ``label``. Raises SurefootError if that is not true or false."""
    require_columns(row, ("label",), "a labelled answer has prompt, completion and label")
    value = row.columns["label"]
    label = _label(value, numbers=True)
    if label is None:
        raise SurefootError(f"column 'label' is {value!r:.40}; it must be true or false")
    return label


def _label(value: Any, numbers: bool = False) -> bool | None:
    """A boolean, or what CSV makes of one; with ``numbers`` also 0, 1, 0.0, 1.0; None for any other value, such as a class."""
    if isinstance(value, str):
        return LABELS.get(value.strip().lower())
    return LABELS.get(value) if isinstance(value, bool) or (numbers and isinstance(value, (int, float))) else None


def as_prompt(row: Row, chat: bool) -> Row:
    """A row whose prompt is in Surefoot's columns; all others stay, for rewards.

    ShareGPT's conversation becomes messages; Alpaca's instruction and input become a prompt.
    """
    shape = shape_of(row.columns)
    columns = dict(row.columns)
    if shape == "ShareGPT":
        messages = _sharegpt(columns.pop("conversations"), "conversations")
        system = columns.get("system")
        if isinstance(system, str) and system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": columns.pop("system")}, *messages]
        return Row({"messages": messages, **columns}, row.where, row.file)
    if shape == "Alpaca":
        return Row(_alpaca(row, columns, chat), row.where, row.file)
    return row


def _alpaca(row: Row, columns: dict[str, Any], chat: bool) -> dict[str, Any]:
    instruction = text_column(row, "instruction")
    context = columns.get("input") or ""
    if not isinstance(context, str):
        raise SurefootError(f"column 'input' is {json_type(context)}; it must be text")
    if columns.get("history"):
        raise SurefootError("column 'history' has earlier turns; write the conversation as messages")
    for name in ("instruction", "input", "history"):
        columns.pop(name, None)
    if not chat:
        template = ALPACA_WITH_INPUT if context.strip() else ALPACA
        return {"prompt": template.format(instruction=instruction, input=context), **columns}
    messages = [{"role": "user", "content": f"{instruction}\n\n{context}" if context.strip() else instruction}]
    if isinstance(columns.get("system"), str) and columns["system"]:
        messages.insert(0, {"role": "system", "content": columns.pop("system")})
    return {"prompt": messages, **columns}


def _sharegpt(value: Any, name: str) -> list[dict[str, Any]]:
    """Messages of ``{"from", "value"}``; those that have a role already stay."""
    value = json_list(value) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else json_type(value)
        raise SurefootError(f"column {name!r} is {what}; it must be a list of messages")
    messages = []
    for index, turn in enumerate(value, start=1):
        place = f"column {name!r}, message {index}"
        if not isinstance(turn, dict) or ("from" not in turn and "role" not in turn):
            raise SurefootError(f"{place} has no 'from'; a message is {{'from': 'human', 'value': …}}")
        if "from" not in turn:
            messages.append(turn)
            continue
        speaker = turn["from"]
        role = ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise SurefootError(f"{place}: 'from' is {speaker!r:.40}; known: {', '.join(ROLES)}")
        rest = {key: part for key, part in turn.items() if key not in ("from", "value")}
        if rest.get(WEIGHT) is None:
            rest.pop(WEIGHT, None)
        content = joined_parts(turn.get("value"), place)
        if speaker == "function_call":
            messages.append({"role": role, CALLS: [_function_call(content, place)], **rest})
        else:
            messages.append({"role": role, "content": content, **rest})
    return messages


def _function_call(text: Any, place: str) -> dict[str, Any]:
    """``{"name", "arguments"}`` as JSON text, as a tool call."""
    try:
        call = json.loads(text)
        return {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SurefootError(f"{place}: is a function_call without name and arguments as JSON; write both") from None


def _answer(text: Any) -> Any:
    return [{"role": "assistant", "content": text}]


def _is_answer(value: Any) -> bool:
    """Whether a value is messages that begin with the assistant's."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and value[0].get("role") == "assistant"
