"""Tools that a model calls during a conversation: functions, and the public methods of an environment.

A turn without a call is the answer and ends the conversation; ``get_reward`` then scores it.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from surefoot.calls import DeadlineExceeded, settled, with_deadline
from surefoot.errors import SurefootError, cause_of
from surefoot.language.data.chat import Dialogue, Messages
from surefoot.language.data.rows import CALLS, SETTINGS, TOOLS, fault_in
from surefoot.recipes.callables import Functions, load_function, tool_field
from surefoot.recipes.language import TurnSettings

RESERVED = ("reset", "step", "get_reward", "close", "schemas", "call")
"""names that are no tools"""
LONGEST = 100_000
"""characters of a result"""
FEW = 10
"""calls that may fail in any batch"""
TYPES: Mapping[str, Any] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
}
"""types of JSON"""
Tool = Callable[..., Any]


class Rows:
    """The environment of tools without one: the prompt is the row's."""

    def reset(self) -> None:
        """Add nothing to the prompt."""


class InvalidReply(Exception):
    """What an environment returned can't be used; in a few words."""


def load_tools(settings: TurnSettings, functions: Functions) -> dict[str, Tool]:
    """The functions of ``turns.tools`` by name. Raises SurefootError if one can't be used, or if two have the same name."""
    tools: dict[str, Tool] = {}
    for place, path in enumerate(settings.tools):
        field = tool_field(place)
        function = load_function(field, path, functions)
        name = getattr(function, "__name__", "")
        if not callable(function) or isinstance(function, type):
            raise SurefootError(f"{field}={path!r}: is no function; name one, or set turns.environment to a class")
        if name in tools or name in RESERVED:
            raise SurefootError(
                f"{field}={path!r}: {'is reserved' if name in RESERVED else 'two tools have this name'}; rename it"
            )
        schema_of(function, f"{field}={path!r}")
        tools[name] = function
    return tools


def methods_of(environment: Any) -> dict[str, Tool]:
    """The public methods of an environment, but for reserved ones."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isroutine)]
    return {name: getattr(environment, name) for name in names if not name.startswith("_") and name not in RESERVED}


def schema_of(tool: Tool, where: str) -> dict[str, Any]:
    """The JSON schema of a typed function with a docstring. Raises SurefootError, beginning with ``where``, without these."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:
        raise SurefootError(
            f"{where}: is no tool ({cause_of(error)}); give {tool.__name__} a type for each argument, and a docstring that "
            "describes it and, under Args:, each argument"
        ) from None
    return schema


class ToolEnvironment:
    """An environment whose methods are tools, and functions beside them, for one conversation.

    made       the user's object: ``reset(**row)``, tools, and perhaps ``get_reward()``, which may
               take the ``messages`` after the prompt, and ``close()``. Tools are its public
               methods, or what ``call(name, arguments)`` calls, with their ``schemas``
    functions  further tools
    schemas    of methods and functions
    """

    def __init__(
        self, made: Any, functions: Mapping[str, Tool], schemas: Sequence[dict[str, Any]], settings: TurnSettings
    ) -> None:
        self.made, self.settings = made, settings
        self.tools = {**methods_of(made), **functions}
        self.own_schemas, self.close = schemas, getattr(made, "close", None)
        self.calls = self.failed = 0
        """calls that were answered, and those answered with an error"""
        self.faults: list[str] = []
        """why tools failed with arguments that fit"""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of all tools."""
        return [*getattr(self.made, "schemas", ()), *self.own_schemas]

    def reset(self, row: Mapping[str, Any]) -> Messages:
        """The row's prompt, with what ``reset`` returns at the end of its last message; or the messages that it returns."""
        takes = inspect.signature(self.made.reset).parameters
        every = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        seen = self.made.reset(**{name: value for name, value in row.items() if every or name in takes})
        prompt = row.get("prompt", row.get("messages")) or ()
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        if isinstance(seen, str) and messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += seen
        elif isinstance(seen, str):
            messages.append({"role": "user", "content": seen})
        elif isinstance(seen, Sequence):
            messages = [dict(one) for one in seen]
        elif seen is not None:
            raise InvalidReply(f"reset returned a {type(seen).__name__} instead of text, messages or None")
        return Dialogue(messages, {**(row.get(SETTINGS) or {}), TOOLS: self.schemas})

    def step(self, message: Mapping[str, Any], last: bool) -> tuple[Messages, float, bool]:
        """Run the calls of a turn, one after another. Return the results, no reward, and whether the conversation is over.

        last  no turn can follow, so that nothing is called
        """
        calls = message.get(CALLS, ())
        return [] if last else [self._result(call["id"], **call["function"]) for call in calls], 0.0, not calls

    def _result(self, number: str, name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
        """The message with the result of a call, or with the error that it ended in."""
        self.calls += 1
        schema = next((one["function"] for one in self.schemas if one["function"]["name"] == name), None)
        fits, fault, text = schema is not None and fit(schema["parameters"], arguments), "", None
        try:
            if schema is None:
                raise ValueError(f"Tool {name} not found.")
            if self.calls > self.settings.max_calls:
                fits = False
                raise ValueError(f"No more than {self.settings.max_calls} calls are allowed.")
            text, fault = with_deadline(self.settings.tool_deadline, lambda: as_text(self._call(name, arguments)), name)
        except DeadlineExceeded:
            fault = f"{name} took longer than {self.settings.tool_deadline:g} s"
        except SurefootError:
            raise
        except (Exception, SystemExit) as error:
            fault = f"{name} raised {cause_of(error)}"
            with suppress(Exception):  # making the text of an exception may fail
                text = as_text(str({"error": str(error)}))[0]
        self.failed += bool(fault)
        self.faults += [fault] * (bool(fault) and fits)
        content = str({"error": fault}) if text is None else text
        return {"role": "tool", "name": name, "content": content, "tool_call_id": number}

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return settled(self.tools[name](**arguments) if name in self.tools else self.made.call(name, arguments))

    def get_reward(self, messages: Messages) -> float:
        """The reward of the whole conversation, ended or not; 0 if the environment has none.

        messages  after the prompt, for an environment whose ``get_reward`` takes them
        """
        judge = getattr(self.made, "get_reward", None)
        reward = 0.0 if judge is None else settled(judge(list(messages)) if inspect.signature(judge).parameters else judge())
        number = math.nan if isinstance(reward, (str, bytes)) else float(reward)
        if not abs(number) < 1e38:
            raise InvalidReply(f"get_reward returned no finite number ({reward!r:.40})")
        return number


def as_text(value: Any) -> tuple[str | None, str]:
    """A result as text, None if it can't be used, and what is wrong with it."""
    text = "" if value is None else str(value)
    fault = fault_in(text) if len(text) <= LONGEST else f"{len(text):,} characters and at most {LONGEST:,} are read"
    fault = "nothing" if value is None else fault
    return (text, "") if fault is None else (None, f"the tool returned {fault}")


def checked_schemas(made: Any, functions: Mapping[str, Tool], where: str) -> list[dict[str, Any]]:
    """The schemas of an environment's methods and of functions. Raises SurefootError if these can't be tools."""
    if inspect.iscoroutinefunction(made.reset):
        raise SurefootError(f"{where}: reset is a coroutine; write def reset, and await in tools")
    methods, listed = methods_of(made), getattr(made, "schemas", None)
    if callable(listed) or hasattr(made, "call") != (listed is not None):
        raise SurefootError(f"{where}: has a method call or schemas, which are reserved; rename it")
    names = [*methods, *(one["function"]["name"] for one in listed or ())]
    if both := [name for name in names if name in functions]:
        raise SurefootError(f"{where}: has a method {both[0]}, as turns.tools has; rename one")
    if not methods and not functions and listed is None:
        raise SurefootError(f"{where}: has no method step, and none that is a tool; add step(response), or tools")
    tools = {**methods, **functions}
    return [schema_of(tool, where) for tool in tools.values()]


def check_faults(environments: Sequence[ToolEnvironment], tolerated: float) -> None:
    """Raise SurefootError if too many calls with fitting arguments failed."""
    faults, calls = Counter(fault for one in environments for fault in one.faults), sum(one.calls for one in environments)
    if faults.total() > max(FEW, tolerated * calls):
        raise SurefootError(
            f"turns.tolerated={tolerated:g}: tools failed in {faults.total()} of {calls} calls; most often: "
            f"{faults.most_common(1)[0][0]}; fix them or raise turns.tolerated, then resume from the last checkpoint"
        )


def fit(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether arguments have the names and the types of a tool's schema."""
    known: Mapping[str, Any] = schema.get("properties", {})
    if not set(schema.get("required", ())) <= set(arguments) <= set(known):
        return False
    return all(isinstance(value, TYPES.get(str(known[name].get("type")), object)) for name, value in arguments.items())
