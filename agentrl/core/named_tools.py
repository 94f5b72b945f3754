"""Tools by name: functions that run in the process of the run, and registered tools that run at their servers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from agentrl.core.errors import ConfigError
from agentrl.core.imports import is_reference, load_object
from agentrl.core.registry import is_mcp, lookup_tool
from agentrl.core.tool import Tool, ToolService, tool
from agentrl.core.tool_arguments import Function


@dataclass(frozen=True, slots=True)
class NamedTools:
    """Tools by where they run. Example: of ``["calculator", "my_tools.py:lookup"]`` a function and a server."""

    functions: tuple[Tool, ...] = ()
    """Run in the process of the run."""
    servers: tuple[str, ...] = ()
    """Names of registered tools, which run at tool servers."""


def find_tools(names: str | Sequence[str], key: str) -> NamedTools:
    """Return the tools of names: registered ones, ``mcp:NAME``, or functions, tools and services as ``file.py:name``.

    Args:
        names: one name or several.
        key: the configuration key that holds them, for messages.

    Raises:
        UnknownNameError: no tool is registered under a name.
        ConfigError: a name is given twice, or refers to what is no tool, or to a function whose arguments JSON cannot say.
    """
    texts = [names] if isinstance(names, str) else names
    if not isinstance(texts, Sequence) or not all(isinstance(name, str) for name in texts):
        raise ConfigError(f"{key}={names!r:.100}: it must be a list of names, such as [calculator, my_tools.py:lookup]")
    functions: dict[str, Tool] = {}
    servers: list[str] = []
    for name in texts:
        target = load_object(name, key) if is_reference(name) and not is_mcp(name) else lookup_tool(name)
        is_service = isinstance(target, ToolService) or (inspect.isclass(target) and issubclass(target, ToolService))
        if is_service or not is_reference(name):
            if name in servers:
                raise ConfigError(f"{key} has {name} twice")
            servers.append(name)
            continue
        function = target if isinstance(target, Tool) else _function_tool(target, name, key)
        if function.name in functions:
            raise ConfigError(f"{key}: two of {', '.join(texts)} are tools of the name {function.name!r}")
        functions[function.name] = function
    return NamedTools(tuple(functions.values()), tuple(servers))


def _function_tool(target: object, name: str, key: str) -> Tool:
    if not callable(target) or inspect.isclass(target):
        raise ConfigError(
            f"{key}: {name} is {target!r:.100}, and neither a function nor an agentrl.Tool or ToolService"
        )
    try:
        return _make_tool(target)
    except TypeError as error:
        raise ConfigError(f"{key}: {name}: {error}") from error


@lru_cache(maxsize=256)
def _make_tool(function: Function) -> Tool:
    """Return the tool of a function; cached, because each episode has its own environment."""
    return tool(function)
