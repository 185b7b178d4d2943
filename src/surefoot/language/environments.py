"""Environments of other libraries, for ``turns.environment``: MCP servers, OpenEnv, verifiers and reasoning-gym.

They run in this process, with its rights. Not supported are harnesses that start servers of their own, containers and images.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from surefoot.calls import settled
from surefoot.errors import require_package
from surefoot.recipes.callables import import_object

Row = Mapping[str, Any]


@cache
def _shared(server: str) -> Any:
    """A client of an MCP server, which all conversations use; it ends with the process."""
    require_package("fastmcp", "mcp", f"turns.arguments.server={server!r}:")
    from fastmcp import Client

    in_memory, remote = ":" in server, "://" in server
    client = Client(server if remote else import_object("turns.arguments.server", server) if in_memory else Path(server))
    settled(client.__aenter__())
    return client


class MCP:
    """The tools of an MCP server, which has no rewards: set ``reward.terms``. Its state is shared by all conversations.

    server  ``file.py:name`` or ``module:name`` of a server in this process; ``file.py`` of one that is started, over stdio; or
            a URL
    """

    def __init__(self, server: str) -> None:
        self.client = _shared(server)
        self.schemas = [_schema(tool) for tool in settled(self.client.list_tools())]

    def reset(self) -> None:
        """Add nothing to the row's prompt."""

    async def call(self, name: str, arguments: Row) -> str:
        """The text of a tool's result."""
        return _text(await self.client.call_tool(name, dict(arguments)))


class OpenEnv:
    """An environment of OpenEnv with tools, an ``MCPEnvironment``; the conversation earns the sum of its rewards.

    environment  ``module:Class`` or ``file.py:Class``, made without arguments
    """

    def __init__(self, environment: str) -> None:
        require_package("openenv-core", "openenv", f"turns.arguments.environment={environment!r}:", "openenv")
        from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction

        self.made, self.action = import_object("turns.arguments.environment", environment)(), CallToolAction
        self.schemas = [_schema(tool) for tool in self.made.step(ListToolsAction()).tools]
        self.close = self.made.close

    def reset(self, seed: int, **row: Any) -> str | None:
        """Begin an episode; the text that its metadata has as ``prompt`` is added to the row's."""
        seen = self.made.reset(seed=seed % 2**31, **{name: value for name, value in row.items() if name != "prompt"})
        self.total = float(seen.reward or 0)
        prompt: str | None = seen.metadata.get("prompt")
        return prompt

    def call(self, name: str, arguments: Row) -> str:
        """The text of a tool's result."""
        seen = self.made.step(self.action(tool_name=name, arguments=dict(arguments)))
        self.total += float(seen.reward or 0)
        if seen.error is not None:
            raise RuntimeError(seen.error.message)
        return _text(seen.result)

    def get_reward(self) -> float:
        """The sum of the rewards."""
        return self.total


class OpenEnvText:
    """An environment of OpenEnv whose action is one text, and whose observation has one.

    environment, action  ``module:Class`` or ``file.py:Class``
    field, shown         of the action's and the observation's text
    """

    def __init__(self, environment: str, action: str, field: str = "message", shown: str = "message") -> None:
        self.made = import_object("turns.arguments.environment", environment)()
        self.action, self.field, self.shown = import_object("turns.arguments.action", action), field, shown
        self.close = self.made.close

    def reset(self, row: Row) -> list[dict[str, str]]:
        """The first observation."""
        return self._messages(self.made.reset(seed=row["seed"] % 2**31))

    def step(self, response: str) -> tuple[list[dict[str, str]], float, bool]:
        """Pass a turn on as an action."""
        seen = self.made.step(self.action(**{self.field: response}))
        return [] if seen.done else self._messages(seen), float(seen.reward or 0), bool(seen.done)

    def _messages(self, seen: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(getattr(seen, self.shown))}]


@cache
def _tasks(path: str) -> list[Any]:
    require_package("verifiers", "verifiers-tasks", f"turns.arguments.taskset={path!r}:")
    tasks = import_object("turns.arguments.taskset", path)
    return list(tasks() if callable(tasks) else tasks)


class Verifiers:
    """Tasks of verifiers 0.4 (``verifiers.v1``), without its harness: their tools and rewards run here. Rows have ``index``.

    taskset  ``module:name`` or ``file.py:name`` of a Taskset, or of a function that returns one
    """

    def __init__(self, taskset: str) -> None:
        self.tasks = _tasks(taskset)
        self.schemas: list[dict[str, Any]] = []

    def reset(self, index: int) -> list[dict[str, Any]]:
        """The prompt of a task."""
        from mcp.server.mcpserver import MCPServer

        self.task, self.server = self.tasks[index], MCPServer("tools")
        for tools in type(self.task).toolsets(self.task.config):
            settled(tools.setup())
            settled(tools.setup_task(self.task.data))
            tools.register(self.server)
        self.schemas = [_schema(tool) for tool in settled(self.server.list_tools())]
        data = self.task.data
        self.start = [{"role": "system", "content": data.system_prompt}] * bool(data.system_prompt)
        if isinstance(data.prompt, str):
            self.start.append({"role": "user", "content": data.prompt})
        else:
            self.start += [message.model_dump(exclude_none=True) for message in data.prompt]
        return self.start

    async def call(self, name: str, arguments: Row) -> str:
        """The text of a tool's result."""
        return _text(await self.server.call_tool(name, dict(arguments)))

    def get_reward(self, messages: list[Any]) -> float:
        """The weighted sum of the task's rewards for the conversation."""
        import verifiers.v1 as vf
        from pydantic import TypeAdapter
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.trace import AgentInfo, TraceTask
        from verifiers.v1.types import Message

        agent = AgentInfo(config=vf.AgentConfig())
        trace = vf.Trace(task=TraceTask(type=type(self.task).__name__, data=self.task.data), agent=agent)
        for place, message in enumerate([*self.start, *map(_wire, messages)]):
            node = TypeAdapter(Message).validate_python(message)
            parent = place - 1 if place else None
            trace.nodes.append(MessageNode(parent=parent, message=node, sampled=message["role"] == "assistant"))
        settled(self.task.score(trace))
        return float(trace.reward)


@cache
def _problems(task: str, seed: int) -> Any:
    from surefoot.language.tasks import reasoning_gym_problems

    return reasoning_gym_problems(task, seed=seed, size=1_000_000)


class ReasoningGym:
    """A problem of reasoning-gym, which its package scores, between 0 and 1. Rows have ``index``.

    task  its name there, such as "leg_counting"
    seed  of the problems
    """

    def __init__(self, task: str, seed: int = 1) -> None:
        self.problems = _problems(task, seed)

    def reset(self, row: Row) -> list[dict[str, str]]:
        """The question."""
        self.problem = self.problems[int(row["index"])]
        return [{"role": "user", "content": self.problem["question"]}]

    def step(self, response: str) -> tuple[list[dict[str, str]], float, bool]:
        """Score the answer."""
        return [], float(self.problems.score_answer(response.strip(), self.problem)), True


def _schema(tool: Any) -> dict[str, Any]:
    parameters = getattr(tool, "input_schema", None) or tool.inputSchema
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": parameters},
    }


def _text(result: Any) -> str:
    return "\n".join(part.text for part in result.content if hasattr(part, "text"))


def _wire(message: Row) -> dict[str, Any]:
    """A message as verifiers has it: arguments of calls are text."""
    calls = [
        {"id": call["id"], "name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}
        for call in message.get("tool_calls", ())
    ]
    kept = {name: message[name] for name in ("role", "content", "tool_call_id") if name in message}
    return kept | ({"tool_calls": calls} if calls else {})
