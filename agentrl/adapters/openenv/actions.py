"""Texts of turns as actions, by the schema of a server's actions; observations as texts; tools of MCP environments."""

from __future__ import annotations

import json
from collections.abc import Mapping

from agentrl.adapters.base import ActionError, Json, load_function, read_json, tagged_answer, value_text
from agentrl.core.errors import ConfigError, EnvironmentFailure
from agentrl.core.tool import Tool
from agentrl.core.tool_arguments import arguments_fault

_DIGITS = 6


def takes_tools(schema: Mapping[str, object]) -> bool:
    """Return whether actions of a schema are the calls of an MCP environment: they name a tool, or have no fields at all."""
    fields = _fields(schema)
    return {"tool_name", "arguments"} <= set(fields) or set(fields) <= {"type"}


def _fields(schema: Mapping[str, object]) -> Json:
    properties = schema.get("properties")
    fields = properties if isinstance(properties, dict) else {}
    return {name: field for name, field in fields.items() if name != "metadata"}


class TurnActions:
    """Texts of turns as actions.

    Args:
        schema: JSON schema of the server's actions.
        option: ``env.options.action``.

    Raises:
        ConfigError: the actions have no such field, or there is no such function.
    """

    def __init__(self, schema: Json, option: str | None) -> None:
        fields = _fields(schema)
        self._schema = {**schema, "properties": fields}
        self._function = load_function(option, "env.options.action") if option is not None and ":" in option else None
        self._field: str | None = None
        self.rule = ""
        """The sentence that explains how to write an action; empty if a turn's whole text is one."""
        if self._function is not None:
            return
        if option is not None and option not in fields:
            raise ConfigError(
                f"env.options.action={option}: actions have no such field; they have: {', '.join(fields)}"
            )
        self._field = option or _only_field(schema, fields)
        if self._field is None:
            description = json.dumps(_without_titles(fields), ensure_ascii=False)
            self.rule = f"End your answer with <action>…</action> around a JSON object with the fields {description}."
        elif not self._is_text:
            description = json.dumps(_without_titles(fields[self._field]), ensure_ascii=False)
            self.rule = f"End your answer with <action>…</action> around a JSON value: {description}."

    @property
    def _is_text(self) -> bool:
        field = None if self._field is None else _fields(self._schema)[self._field]
        return isinstance(field, dict) and _is_string(field)

    def parse(self, text: str) -> Json:
        """Return the action of a turn's text.

        Raises:
            ActionError: it is none.
        """
        if self._function is not None:
            action = self._function(text)
            if not isinstance(action, dict):
                raise TypeError(f"env.options.action must return the action as a dict, it returned {action!r:.100}")
        elif self._field is not None:
            action = {self._field: text if self._is_text else read_json(tagged_answer(text))}
        else:
            action = read_json(tagged_answer(text))
            if not isinstance(action, dict):
                raise ActionError(f"it is {action!r:.60}, and no JSON object")
        if fault := arguments_fault(self._schema, action):
            raise ActionError(fault.removeprefix(": "))
        return action


def _only_field(schema: Mapping[str, object], fields: Json) -> str | None:
    """Return the field that a text fills: the only required one, or the only one."""
    required = schema.get("required")
    names = [name for name in required if name in fields] if isinstance(required, list) else []
    candidates = names or list(fields)
    return candidates[0] if len(candidates) == 1 else None


def _is_string(field: Mapping[str, object]) -> bool:
    kinds = field.get("anyOf")
    if isinstance(kinds, list):
        return any(isinstance(kind, dict) and kind.get("type") == "string" for kind in kinds)
    return field.get("type") == "string"


def _without_titles(value: object) -> object:
    if isinstance(value, dict):
        return {
            name: _without_titles(member)
            for name, member in value.items()
            if name != "title" or not isinstance(member, str)
        }
    return [_without_titles(member) for member in value] if isinstance(value, list) else value


def observation_text(observation: Json, option: str | None) -> str:
    """Return what the policy reads of an observation.

    By default its only field with a value, or a line ``field: value`` for each.

    Raises:
        ConfigError: it has no field of the name ``option``.
    """
    if option is not None and ":" in option:
        return str(load_function(option, "env.options.observation")(observation))
    if option is not None:
        if option not in observation:
            raise ConfigError(
                f"env.options.observation={option}: the observation has no such field; it has: {', '.join(observation)}"
            )
        return value_text(observation[option], _DIGITS)
    fields = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    return value_text(next(iter(fields.values())) if len(fields) == 1 else fields, _DIGITS)


def read_tools(observation: Json) -> tuple[Tool, ...]:
    """Return the tools of an MCP environment from the reply to ``list_tools``.

    Raises:
        EnvironmentFailure: the observation lists none.
    """
    tools = observation.get("tools")
    if not isinstance(tools, list) or not tools:
        raise EnvironmentFailure(f"the server lists no tools: {observation!r:.200}")
    return tuple(
        Tool(
            str(tool["name"]),
            str(tool.get("description") or ""),
            tool.get("input_schema") or tool.get("inputSchema") or {},
        )
        for tool in tools
    )


def result_text(observation: Json) -> str:
    """Return what the policy reads of a tool's result: the text of its content, its structured content, or its error."""
    error = observation.get("error")
    if error:
        return f"Error: {error.get('message', error) if isinstance(error, dict) else error}"
    result = observation.get("result")
    if isinstance(result, dict):
        content = result.get("content")
        if isinstance(content, list) and content:
            return "\n".join(
                str(block.get("text", block)) if isinstance(block, dict) else str(block) for block in content
            )
        result = result.get("data", result)
    return value_text(result, _DIGITS)
