"""Tools: coroutines with a JSON Schema, and tool services with a separate server."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import typing
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, overload, runtime_checkable

from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python
from referencing.exceptions import Unresolvable

from agentrl.core.types import CallStatus, ToolCall, ToolResult, ToolStatus

if TYPE_CHECKING:
    from agentrl.core.task import TaskSet


MAX_NESTING = 100
"""Levels of lists and objects in the arguments of a call. Parsers and validators fail beyond several hundred."""


class ToolClient(Protocol):
    """Client of one tool server."""

    async def call(self, call: ToolCall, *, episode_id: str) -> ToolResult:
        """Run one call. The tool's own failures are results with a status; a retry sends the same call id.

        Raises:
            ToolFailure: the server failed or could not be reached, after all retries.
        """
        ...

    async def close_session(self, episode_id: str) -> None:
        """End the episode's session: it makes no further call."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


@runtime_checkable
class SessionlessClient(Protocol):
    """A `ToolClient` whose server may keep nothing of an episode between calls."""

    @property
    def keeps_sessions(self) -> bool:
        """Whether it does keep something."""
        ...


@runtime_checkable
class SandboxImageClient(Protocol):
    """A `ToolClient` of a server that can run an episode's sandboxes from an image of the task."""

    async def open_session(self, episode_id: str, *, image: str) -> None:
        """Open the episode's session with sandboxes from ``image``, unless it is open.

        Raises:
            TaskError: the server does not allow the image.
            ToolFailure: see `ToolClient.call`.
        """
        ...


CallTool = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]
"""Runs a tool, by name and arguments, in the sessions of an episode that has ended."""


async def _only_in_its_server(**arguments: Any) -> str:
    raise NotImplementedError("this tool runs in its server only; the runner calls it through its client")


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Validator:
    """Return a cached validator for a schema, given as JSON: checking the schema itself takes most of the time."""
    parsed = json.loads(schema)
    cls = validator_for(parsed)
    cls.check_schema(parsed)
    return cls(parsed)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the policy may call. Made by `tool`, it runs in the runner's process; with ``server``, in that server."""

    name: str
    """Name for the policy."""
    description: str
    """The docstring's first paragraph; part of what the policy reads."""
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments."""
    function: Callable[..., Awaitable[Any]] = _only_in_its_server
    """The coroutine."""
    timeout_s: float = 30.0
    """Seconds before a call counts as timed out."""
    server: str = ""
    """The registered tool (``agentrl.tools``) whose server runs it; empty if `function` does."""

    def schema_fault(self, arguments: Mapping[str, Any]) -> str:
        """Return where and how arguments violate the schema, in jsonschema's words; empty if they do not."""
        if is_too_deep(arguments):
            return f"{self.name}: the arguments are nested more than {MAX_NESTING} levels deep"
        try:
            error = best_match(_validator(json.dumps(self.parameters, default=dict)).iter_errors(dict(arguments)))
            if error is not None:
                location = "".join(f"[{key!r}]" for key in error.absolute_path)
                return f"{self.name}{location}: {error.message}"
        except Unresolvable as error:
            return f"{self.name}: its schema has an unresolvable reference: {error}"
        except RecursionError:
            return f"{self.name}: its schema refers to itself without end"
        except (ArithmeticError, ValueError) as error:  # of numbers such as NaN and 1e999, which Python reads in JSON
            return f"{self.name}: the arguments hold a number that cannot be checked: {error}"
        return ""

    async def run(self, call: ToolCall) -> ToolResult:
        """Run the coroutine on checked arguments. Its errors are results with a status; nothing is raised."""
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self.function(**call.arguments)
            return answer if isinstance(answer, ToolResult) else self._as_result(call, answer)
        except TimeoutError:
            return ToolResult(call.id, ToolStatus.TIMEOUT, f"{self.name} did not answer in {self.timeout_s:g} s")
        except Exception as error:
            return ToolResult(call.id, ToolStatus.ERROR, f"{type(error).__name__}: {error}")

    def _as_result(self, call: ToolCall, answer: object) -> ToolResult:
        """Return a text as it is, and anything else as JSON."""
        if isinstance(answer, str):
            return ToolResult(call.id, ToolStatus.OK, answer)
        try:
            content = json.dumps(to_jsonable_python(answer), ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise TypeError(
                f"{self.name} must return a str, a ToolResult or what JSON can say, not {answer!r:.100}"
            ) from error
        return ToolResult(call.id, ToolStatus.OK, content, json.loads(content))


def is_too_deep(arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments are nested more than `MAX_NESTING` levels deep."""
    level: list[object] = [arguments]
    for _ in range(MAX_NESTING):
        level = [child for value in level for child in _children(value)]
        if not level:
            return False
    return any(isinstance(value, Mapping | list | tuple) for value in level)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def validate_call(call: ToolCall, tools: Sequence[Tool]) -> ToolCall:
    """Return a call that could be parsed with its status among ``tools``: ``OK``, ``UNKNOWN_TOOL`` or ``SCHEMA_VIOLATION``."""
    if call.status is not CallStatus.OK:
        return call
    tools_by_name = {tool.name: tool for tool in tools}
    if call.name not in tools_by_name:
        return replace(call, status=CallStatus.UNKNOWN_TOOL, fault=unknown_tool_message(call.name, tools_by_name))
    fault = tools_by_name[call.name].schema_fault(call.arguments)
    return replace(call, status=CallStatus.SCHEMA_VIOLATION, fault=fault) if fault else call


def unknown_tool_message(name: str, names: Iterable[str]) -> str:
    """Return the message for a call of a tool that does not exist."""
    return f"there is no tool {name!r}; there are: {', '.join(sorted(set(names))) or 'none'}"


@overload
def tool(function: Callable[..., Awaitable[Any]], /) -> Tool: ...
@overload
def tool(
    *, timeout_s: float = 30.0, name: str | None = None, parameters: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., Awaitable[Any]]], Tool]: ...
def tool(
    function: Callable[..., Awaitable[Any]] | None = None,
    /,
    *,
    timeout_s: float = 30.0,
    name: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Tool | Callable[[Callable[..., Awaitable[Any]]], Tool]:
    """Turn a coroutine into a `Tool`; the JSON Schema comes from its type hints, or from ``parameters``.

    The policy reads a ``str`` as it is, the content of a `ToolResult`, and anything else as JSON.

    Example::

        @tool(timeout_s=5)  # or a bare @tool
        async def add(a: int, b: int) -> str:
            "Add two numbers."
            return str(a + b)

    Raises:
        TypeError: the function is no coroutine, or a parameter has no type hint.
    """

    def wrap(function: Callable[..., Awaitable[Any]]) -> Tool:
        if not callable(function):
            raise TypeError(f"@tool wants a coroutine (async def), not {function!r:.100}; settings are keywords")
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"@tool wants a coroutine (async def), {function.__name__} is not one")
        schema = dict(parameters) if parameters is not None else _schema_from_hints(function)
        doc = inspect.getdoc(function) or ""
        return Tool(name or function.__name__, doc.split("\n\n")[0], schema, function, timeout_s)

    return wrap if function is None else wrap(function)


def _schema_from_hints(function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints:
            raise TypeError(f"{function.__name__}: parameter {parameter.name!r} has no type hint")
        properties[parameter.name] = TypeAdapter(hints[parameter.name]).json_schema()
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


class ToolService(ABC):
    """A tool with a separate server, registered under the entry-point group ``agentrl.tools``.

    ``agentrl tools serve NAME`` runs `serve`; ``agentrl train`` starts the same in a separate process if
    ``tools.NAME.url`` is not set, waits until ``GET /health`` answers 200, and calls it through `client`.
    """

    name: ClassVar[str]
    """The registered name, and the name in `ToolCall`."""
    sandboxed: ClassVar[bool] = False
    """Whether the run's ``sandbox`` section is given to `check` and `launch_arguments`, as ``options["sandbox"]``."""

    def tools(self, options: Mapping[str, Any]) -> tuple[Tool, ...]:
        """Return what a policy may call on the server, each with ``server`` set to `name`; empty if it may call none."""
        return ()

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the server's options; ``--host`` and ``--port`` exist already."""

    @abstractmethod
    def serve(self, arguments: argparse.Namespace) -> None:
        """Run the server until SIGTERM or SIGINT."""

    def check(self, options: Mapping[str, Any]) -> None:  # noqa: B027  most tools need nothing
        """Check the options of a server that the run would start, before anything is started.

        Raises:
            ConfigError: they are not valid; the message names the key.
            MissingError: this machine lacks something that they name, such as a file; a dry run lists it.
        """

    def check_server(self, url: str, options: Mapping[str, Any]) -> None:  # noqa: B027  it may speak another protocol
        """Check the running servers at the configured addresses, before anything is started. Outside of event loops.

        Raises:
            ConfigError: one does not serve what the run needs; the message names the key.
            MissingError: one does not answer; a dry run lists it.
        """

    @abstractmethod
    def launch_arguments(self, options: Mapping[str, Any], tasks: TaskSet, folder: Path) -> Sequence[str]:
        """Prepare what the server needs under ``folder`` and return the options for ``agentrl tools serve NAME``.

        Raises:
            ConfigError: an option is missing; the message names its key.
        """

    @abstractmethod
    def client(self, url: str, options: Mapping[str, Any]) -> ToolClient:
        """Return a client for the server at ``url``."""

    def local_client(
        self, corpora: Mapping[str, Iterable[Mapping[str, str]]], options: Mapping[str, Any]
    ) -> ToolClient:
        """Return a client that runs the tool in this process over a taskset's ``corpora``; used for demonstrations.

        Raises:
            NotImplementedError: the tool cannot run without its server.
        """
        raise NotImplementedError(f"tool {self.name!r} has no local_client(): it runs in its server only")
