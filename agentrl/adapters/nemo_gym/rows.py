"""Rows of NeMo Gym as tasks, with messages and tools, and episodes as responses that its servers verify."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from typing_extensions import override

from agentrl.adapters.base import Json
from agentrl.core.errors import ConfigError, TaskError
from agentrl.core.task import MadeTasks, Task
from agentrl.core.tool import Tool
from agentrl.core.types import Message, Role, ToolCall

PARAMETERS = "responses_create_params"
ROW = "row"
"""Where a task's metadata has its row."""
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class RowTasks(MadeTasks):
    """The rows of a JSONL file; each is parsed when its task is made.

    Args:
        split: the split's name.
        path: of the file.

    Raises:
        ConfigError: there is no such file, or its first row is none of NeMo Gym.
    """

    def __init__(self, split: str, path: Path) -> None:
        key = f"env.options.rows={{{split}: {path}}}"
        try:
            self._lines = [line for line in path.expanduser().read_bytes().splitlines() if line.strip()]
        except OSError as error:
            raise ConfigError(f"{key}: {error.strerror}") from None
        super().__init__(split, len(self._lines))
        if not self._lines:
            raise ConfigError(f"{key} has no rows")
        try:
            self.make(0)
        except TaskError as error:
            raise ConfigError(f"{key}: {error}") from None

    @override
    def make(self, index: int) -> Task:
        name = f"nemo_gym/{self.split}/{index}"
        try:
            row = json.loads(self._lines[index])
        except ValueError as error:
            raise TaskError(f"row {index + 1} is no JSON: {error}") from None
        return row_task(name, row)


def row_task(name: str, row: object) -> Task:
    """Return the task of a row.

    Raises:
        TaskError: it has no ``responses_create_params`` with an input that is a text or messages.
    """
    parameters = row.get(PARAMETERS) if isinstance(row, dict) else None
    items = parameters.get("input") if isinstance(parameters, dict) else None
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise TaskError(
            f"task {name}: the row has no {PARAMETERS}.input that is a text or a list of messages: {row!r:.200}"
        )
    instructions = cast("Json", parameters).get("instructions")
    prompt = [Message("system", instructions)] if isinstance(instructions, str) and instructions else []
    return Task(name, (*prompt, *(_message(name, item) for item in items)), metadata={ROW: row})


def _message(name: str, item: object) -> Message:
    role = item.get("role") if isinstance(item, dict) else None
    if not isinstance(item, dict) or role not in _ROLES:
        raise TaskError(f"task {name}: an input that is no message of a system, user or assistant: {item!r:.200}")
    content = item.get("content")
    if isinstance(content, list):
        texts = [block.get("text") if isinstance(block, dict) else None for block in content]
        if not all(isinstance(text, str) for text in texts):
            raise TaskError(f"task {name}: a message with something else than text: {item!r:.200}")
        content = "".join(cast("list[str]", texts))
    if not isinstance(content, str):
        raise TaskError(f"task {name}: a message without content: {item!r:.200}")
    return Message(_ROLES[str(role)], content)


def row_tools(row: Json) -> tuple[Tool, ...]:
    """Return the functions that a row offers.

    Raises:
        TaskError: it offers a tool that is no function.
    """
    tools = []
    for tool in row[PARAMETERS].get("tools") or ():
        if not isinstance(tool, dict) or tool.get("type", "function") != "function" or "name" not in tool:
            raise TaskError(f"a row offers a tool that is no function: {tool!r:.200}")
        tools.append(Tool(str(tool["name"]), str(tool.get("description") or ""), tool.get("parameters") or {}))
    return tuple(tools)


class Response:
    """The response of an episode, in the form of OpenAI's Responses, with the results of its calls.

    Args:
        row: of the task.
        model: name of the policy.
    """

    def __init__(self, row: Json, model: str = "policy") -> None:
        self._row = row
        self._model = model
        self._output: list[Json] = []

    def add_turn(self, text: str) -> None:
        """Add the text of a turn."""
        content = [{"type": "output_text", "text": text, "annotations": []}]
        self._output.append(
            {"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed", "content": content}
        )

    def add_call(self, call: ToolCall, result: str) -> None:
        """Add a call and its result."""
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        self._output.append(
            {
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": arguments,
                "status": "completed",
            }
        )
        self._output.append({"type": "function_call_output", "call_id": call.id, "output": result})

    def verification(self, is_cut: bool) -> Json:
        """Return the body of the request that verifies the episode.

        Args:
            is_cut: a limit ended the episode.
        """
        parameters = self._row[PARAMETERS]
        response = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": self._model,
            "output": self._output,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "parallel_tool_calls": parameters.get("parallel_tool_calls", True),
            "tool_choice": parameters.get("tool_choice", "auto"),
            "tools": parameters.get("tools") or [],
        }
        return {**self._row, "response": response}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
