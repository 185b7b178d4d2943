"""Messages, with what a chat template reads beside them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
TOOLS, SETTINGS = "tools", "chat_template_kwargs"
"""columns that belong to the messages of their row"""
CALLS, WEIGHT = "tool_calls", "weight"
"""keys of a message: what may stand in place of its content, and whether the loss is on it, 1 or 0"""


class Dialogue(list[Mapping[str, Any]]):
    """A list of messages that brings its own tools and settings to the chat template, wherever it is rendered.

    options   what the template gets by name, ``tools`` among them
    """

    def __init__(self, messages: Iterable[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        super().__init__(messages)
        self.options = options


def options_of(prompt: str | Messages) -> Mapping[str, Any]:
    """What the chat template gets beside the messages; nothing for plain lists and for text."""
    return prompt.options if isinstance(prompt, Dialogue) else {}


def columns_of(prompt: str | Messages) -> dict[str, Any]:
    """The columns that a row with this prompt needs, so that it is rendered again as it was."""
    settings = dict(options_of(prompt))
    tools = settings.pop(TOOLS, None)
    return {name: value for name, value in ((TOOLS, tools), (SETTINGS, settings)) if value}
