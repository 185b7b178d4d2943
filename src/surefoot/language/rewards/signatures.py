"""The signatures of reward functions: Surefoot's, TRL's and that of ``verifiers``, recognised by the names of parameters.

| takes | style | called | returns |
|---|---|---|---|
| ``responses`` | surefoot | once, with lists | a number for each response |
| ``completions`` | trl | once, with lists | a number for each; None adds 0 |
| ``completion``, or ``state`` | verifiers | for each response | a number |

Where prompts are messages, ``completions`` and ``completion`` are lists of messages: all after the prompt, the last of them the
response. ``tools``, the schemas, is a column if the prompts have tools. A function of any style may be asynchronous. Functions
may change what they get: every call has its own copies.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.calls import settled, wait_for
from surefoot.language.data.chat import Dialogue, options_of
from surefoot.language.data.rows import TOOLS
from surefoot.language.rewards.scores import Columns, Prompt

Style = Literal["surefoot", "trl", "verifiers"]
RESERVED: dict[Style, tuple[str, ...]] = {
    "surefoot": ("prompts", "responses"),
    "trl": ("prompts", "completions"),
    "verifiers": ("prompt", "completion", "state"),
}
"""what a function of each style gets besides columns"""
DEFAULTS: dict[str, Any] = {"info": {}, "task": ""}
"""what a function of verifiers gets for columns that the rows lack"""


@dataclass(frozen=True)
class Signature:
    """How a reward function is called.

    parameters  the names that it takes; None: any
    required    those without a default
    """

    style: Style
    parameters: tuple[str, ...] | None
    required: tuple[str, ...]

    def arguments(self, prompts: Sequence[Prompt], responses: Sequence[str], columns: Columns) -> dict[str, list[Any]]:
        """Every argument that the function may take, as lists with an entry for each response."""
        tools = [options_of(prompt).get(TOOLS) for prompt in prompts]
        own = {TOOLS: tools, **columns} if any(tools) else columns
        lists = {name: _copies(column) for name, column in own.items()}
        plain = _copies(prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts)
        if self.style == "surefoot":
            return {**lists, "prompts": plain, "responses": list(responses)}
        completions: list[Any] = list(responses)
        for row, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                asked = prompt.asked if isinstance(prompt, Dialogue) else len(prompt)
                completions[row] = [*plain[row][asked:], {"role": "assistant", "content": responses[row]}]
                plain[row] = plain[row][:asked]
        if self.style == "trl":
            return {**lists, "prompts": plain, "completions": completions}
        lists = {name: _copies([default] * len(plain)) for name, default in DEFAULTS.items()} | lists
        rows = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
        state = [
            {"answer": "", **row, "prompt": prompt, "completion": completion, "input": {**row, "prompt": prompt}}
            for row, prompt, completion in zip(rows, plain, completions, strict=True)
        ]
        return {**lists, "prompt": plain, "completion": completions, "state": state}

    def call(self, function: Callable[..., Any], lists: Mapping[str, list[Any]], constants: Mapping[str, Any]) -> Any:
        """What the function returns, a list or an array; awaitables are awaited, all rows of a function at once.

        lists      arguments with an entry for each response
        constants  arguments that are the same for each
        """
        chosen = {name: x for name, x in lists.items() if self._takes(name)}
        others = {name: x for name, x in constants.items() if self._takes(name)}
        if self.style == "verifiers":
            count = len(next(iter(lists.values())))
            return _call_rows(function, [{name: x[row] for name, x in chosen.items()} | others for row in range(count)])
        returned = settled(function(**chosen, **others))
        if self.style == "trl" and isinstance(returned, (list, tuple)):  # None: the function does not apply to the row
            return [0.0 if value is None else value for value in returned]
        return returned

    def _takes(self, name: str) -> bool:
        return self.parameters is None or name in self.parameters


def _copies(values: Iterable[Any]) -> list[Any]:
    """A copy of each value by itself: those of the samples of one prompt are the same object."""
    return [deepcopy(value) for value in values]


def signature_of(function: Callable[..., Any]) -> Signature:
    """The signature of a reward function.

    Raises ValueError, with what is wrong, if it takes arguments by position only or its style is ambiguous.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return Signature("surefoot", RESERVED["surefoot"], ())
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if any(p.kind is p.POSITIONAL_ONLY for p in required):
        raise ValueError("takes arguments by position only; take them by name: prompts, responses, columns")
    named = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Signature(_style(named, takes_all), None if takes_all else named, tuple(p.name for p in required))


def _style(names: Sequence[str], takes_all: bool) -> Style:
    if "responses" in names:
        return "surefoot"
    if "completions" in names and "completion" in names:
        raise ValueError("takes completions, as in TRL, and completion, as in verifiers; take one of them")
    if "completions" in names:
        return "trl"
    if "completion" in names:
        return "verifiers"
    if "state" not in names or "prompts" in names:
        return "surefoot"
    if takes_all:
        raise ValueError(
            "takes state and ** without responses, completions or completion, so its style is ambiguous; add responses for "
            "lists of texts, or completion for one row, as in verifiers"
        )
    return "verifiers"


def _call_rows(function: Callable[..., Any], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The results of one call per row."""
    returned: list[Any] = []
    try:
        for arguments in rows:
            returned.append(function(**arguments))
    except BaseException:
        for value in returned:
            if inspect.iscoroutine(value):
                value.close()  # otherwise Python warns that it was never awaited
        raise
    waiting = [row for row, value in enumerate(returned) if inspect.isawaitable(value)]
    for row, value in zip(waiting, wait_for([returned[row] for row in waiting]) if waiting else [], strict=True):
        returned[row] = value
    return returned
