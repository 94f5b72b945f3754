"""Options of hosted tools in a run's configuration or a server's file, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentrl.config.base import Section
from agentrl.config.load import parse_override, read_yaml
from agentrl.config.merging import Tree, merge
from agentrl.config.sandbox import SandboxConfig
from agentrl.config.toolserver import ClientConfig, ServerConfig, ToolServerConfig
from agentrl.config.validation import parse_section
from agentrl.core.errors import ConfigError
from agentrl.core.registry import TOOLS, names

S = TypeVar("S", bound=Section)

SHARED: dict[str, type[Section]] = {"server": ServerConfig, "client": ClientConfig, "sandbox": SandboxConfig}
"""Sections that the options of every hosted tool may have, besides its own keys."""


@dataclass(frozen=True, slots=True)
class RunOptions(Generic[S]):
    """``tools.NAME.options`` of a run, by section."""

    tool: S
    """The keys of the tool itself."""
    server: ServerConfig
    """Options of a server that the run starts."""
    client: ClientConfig
    """Options of the run's calls."""
    sandbox: SandboxConfig
    """The run's ``sandbox`` section."""


def read_options(section: type[S], options: Mapping[str, Any], name: str) -> RunOptions[S]:
    """Check ``tools.NAME.options``.

    Raises:
        ConfigError: an unknown option or an invalid value, with its key.
    """
    key = f"tools.{name}.options."
    tool_options = {option: value for option, value in options.items() if option not in SHARED}
    return RunOptions(
        read_section(section, tool_options, key, [*SHARED]),
        read_section(ServerConfig, options.get("server"), f"{key}server."),
        read_section(ClientConfig, options.get("client"), f"{key}client."),
        read_section(SandboxConfig, options.get("sandbox"), "sandbox."),
    )


def read_section(section: type[S], values: Mapping[str, Any] | None, key: str, other_keys: Sequence[str] = ()) -> S:
    """Return ``values`` as a section, see `parse_section`; None is an empty one.

    Raises:
        ConfigError: no mapping, or one line for every fault, each with its key.
    """
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"{key.rstrip('.')}={values!r}: this is a section and needs keys")
    return parse_section(section, values or {}, key, other_keys)


def make_server_config(file: Path | None, overrides: Sequence[str], tools: Sequence[str] = ()) -> ToolServerConfig:
    """Return the configuration of a tool server: those of ``file``, with ``tools`` added and settings on top.

    Args:
        file: YAML with the sections ``server``, ``sandbox`` and ``tools``; options of tools by their names.
        overrides: ``key=value``; ``python.stateful=true`` is short for ``tools.python.stateful=true``.
        tools: served whether or not the file names them.

    Raises:
        ConfigError: a key is unknown, a value is invalid, or there is no tool to serve. Options of the tools are
            checked when the tools are made.
    """
    tree: Tree = read_yaml(file) if file is not None else {}
    for name in tools:
        tree = merge(tree, {"tools": {name: {}}})
    for override in overrides:
        if override in names(TOOLS):
            raise ConfigError(
                f"{override}: name one tool; several are served by --config FILE with a key for each in tools"
            )
        tree = merge(tree, _with_tool(parse_override(override), tree))
    if isinstance(tree.get("tools"), dict):
        tree["tools"] = {name: {} if options is None else options for name, options in tree["tools"].items()}
    config = read_section(ToolServerConfig, tree, "")
    if not config.tools:
        raise ConfigError(f"there is no tool to serve; name one in tools: {', '.join(names(TOOLS))}")
    return config


def _with_tool(setting: Tree, tree: Tree) -> Tree:
    (key,) = setting
    tools = tree.get("tools")
    tool_names = [*tools] if isinstance(tools, dict) else []
    return {"tools": setting} if key not in ToolServerConfig.model_fields and key in tool_names else setting
