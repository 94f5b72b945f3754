"""Tools: functions with a JSON Schema, and tool services with a separate server."""

from __future__ import annotations

import argparse
import dis
import inspect
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, overload, runtime_checkable

from pydantic_core import to_jsonable_python

from agentrl.core.tool_arguments import (
    Arguments,
    Convert,
    Function,
    Schema,
    arguments_fault,
    conversion,
    definition,
    function_name,
    function_schema,
    schema_problem,
    with_integers,
)
from agentrl.core.tool_docs import tool_description
from agentrl.core.types import CallStatus, ToolCall, ToolResult, ToolStatus
from agentrl.core.user_code import (
    MAX_SECONDS,
    TimeLimitExceeded,
    await_user_code,
    call_in_thread,
    describe,
    error_location,
    error_message,
    user_error,
)

if TYPE_CHECKING:
    from agentrl.core.task import TaskSet

_log = logging.getLogger(__name__)
_logged: set[tuple[str, int]] = set()
"""File and line of errors that were logged."""


class ToolClient(Protocol):
    """Client of one tool server."""

    async def call(self, call: ToolCall, *, episode_id: str) -> ToolResult:
        """Run one call. The tool's own failures are results with a status; a retry sends the same call id.

        Raises:
            ToolFailure: the server failed or could not be reached, after all retries.
        """

    async def close_session(self, episode_id: str) -> None:
        """End the episode's session: it makes no further call."""

    async def aclose(self) -> None:
        """Close connections."""


@runtime_checkable
class SessionlessClient(Protocol):
    """A `ToolClient` whose server may keep nothing of an episode between calls, or nothing that ends with it."""

    @property
    def keeps_sessions(self) -> bool:
        """Whether it does keep something that ends with it."""


@runtime_checkable
class SandboxImageClient(Protocol):
    """A `ToolClient` of a server that can run an episode's sandboxes from an image of the task."""

    async def open_session(self, episode_id: str, *, image: str) -> None:
        """Open the episode's session with sandboxes from ``image``, unless it is open.

        Raises:
            TaskError: the server does not allow the image.
            ToolFailure: see `ToolClient.call`.
        """


CallTool = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]
"""Runs a tool, by name and arguments, in the sessions of an episode that has ended."""


async def _only_in_its_server(**arguments: Any) -> str:
    raise NotImplementedError("this tool runs in its server only; the runner calls it through its client")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the policy may call. Made by `tool`, it runs in the runner's process; with ``server``, in that server."""

    name: str
    """Name for the policy."""
    description: str
    """The docstring's first paragraph; part of what the policy reads."""
    parameters: Schema
    """JSON Schema of the arguments."""
    function: Function = _only_in_its_server
    """The function or coroutine."""
    timeout_s: float = 30.0
    """Seconds before a call counts as timed out."""
    server: str = ""
    """The registered tool (``agentrl.tools``) whose server runs it; empty if `function` does."""
    convert: Convert = field(default=dict, repr=False, compare=False)
    """Converts the arguments to the types that the function names."""

    def schema_fault(self, arguments: Arguments) -> str:
        """Return where and how arguments violate the schema or the function's types; empty if they do not."""
        fault = arguments_fault(self.parameters, arguments)
        if not fault:
            try:
                self.convert(arguments)
            except ValueError as error:
                fault = str(error)
        return f"{self.name}{fault}" if fault else ""

    def with_integers(self, call: ToolCall) -> ToolCall:
        """Return a checked call with 2.0, which JSON Schema takes for an integer, as 2 where the schema has an integer."""
        return replace(call, arguments=with_integers(self.parameters, call.arguments))

    @property
    def runs_in_thread(self) -> bool:
        """Whether the function never awaits, so that it would block the event loop: a plain function, and a coroutine without
        an ``await``.
        """
        function = _coroutine_function(self.function)
        return function is None or not _awaits(function.__code__)

    async def run(self, call: ToolCall) -> ToolResult:
        """Run the function on checked arguments. Its errors are results with a status; nothing is raised.

        A plain function, or a coroutine without an ``await``, runs in a thread.
        """
        try:
            arguments = self.convert(self.with_integers(call).arguments)
        except ValueError as error:
            return ToolResult(call.id, ToolStatus.INVALID, f"{self.name}{error}")
        try:
            return await await_user_code(self._call(call, arguments), self.timeout_s)
        except TimeLimitExceeded as error:
            _log.warning("tool %s: %s", self.name, error)
            return ToolResult(call.id, ToolStatus.TIMEOUT, f"{self.name} did not answer in {self.timeout_s:g} s")
        except BaseException as error:
            return self._error_result(call, user_error(error))

    async def _call(self, call: ToolCall, arguments: Arguments) -> ToolResult:
        function = partial(self.function, **arguments)
        if not self.runs_in_thread:
            return self._as_result(call, await function())
        is_coroutine = _coroutine_function(self.function) is not None

        def work() -> ToolResult | Awaitable[object]:
            answer = _run_to_end(function()) if is_coroutine else function()
            return answer if inspect.isawaitable(answer) else self._as_result(call, answer)

        result = await call_in_thread(work, f"tool-{self.name}")
        return result if isinstance(result, ToolResult) else self._as_result(call, await result)

    def _error_result(self, call: ToolCall, error: BaseException) -> ToolResult:
        """Return an error of the function as what the policy reads, and log it, once a line."""
        if (line := error_location(error)) not in _logged:
            _logged.add(line)
            _log.warning(
                "tool %s raised %s; the policy reads it. This is logged once a line", self.name, describe(error)
            )
        return ToolResult(call.id, ToolStatus.ERROR, f"{type(error).__name__}: {error_message(error)}")

    def _as_result(self, call: ToolCall, answer: object) -> ToolResult:
        """Return a result or a text as it is, and anything else as JSON."""
        if isinstance(answer, ToolResult):
            if not isinstance(answer.content, str):
                raise TypeError(f"{self.name} must return a ToolResult with a str as its content, not {answer!r:.100}")
            return replace(answer, status=ToolStatus(answer.status))
        if isinstance(answer, str):
            return ToolResult(call.id, ToolStatus.OK, answer)
        if isinstance(answer, Iterator):  # it may never end, or wait
            raise TypeError(f"{self.name} must return its result, such as a list, not the iterator {answer!r:.100}")
        try:
            content = json.dumps(to_jsonable_python(answer), ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise TypeError(
                f"{self.name} must return a str, a ToolResult or what JSON can say, not {answer!r:.100}"
            ) from error
        return ToolResult(call.id, ToolStatus.OK, content, json.loads(content))


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
def tool(function: Function, /) -> Tool: ...
@overload
def tool(
    *, timeout_s: float = 30.0, name: str | None = None, parameters: Schema | None = None
) -> Callable[[Function], Tool]: ...
def tool(
    function: Function | None = None,
    /,
    *,
    timeout_s: float = 30.0,
    name: str | None = None,
    parameters: Schema | None = None,
) -> Tool | Callable[[Function], Tool]:
    """Turn a function into a `Tool`; the JSON Schema comes from its type hints and docstring, or from ``parameters``.

    Arguments reach the function as the types that it names: models, dataclasses, enums. A plain function runs in a thread,
    a coroutine that awaits in the event loop, which it must not block.

    The policy reads a ``str`` as it is, the content of a `ToolResult`, and anything else as JSON.

    Example::

        @tool(timeout_s=5)  # or a bare @tool
        async def add(a: int, b: int) -> str:
            "Add two numbers."
            return str(a + b)

    Raises:
        TypeError: ``timeout_s`` is no time, or no call could fit: a parameter has no type hint, or a type or a schema that JSON
            cannot say.
    """
    if parameters is not None and not isinstance(parameters, Mapping):
        raise TypeError(f"@tool: parameters={parameters!r:.100} is no JSON Schema, which is a dict")
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s <= MAX_SECONDS):
        raise TypeError(f"@tool: timeout_s={timeout_s!r} is no number of seconds above 0, and at most {MAX_SECONDS:g}")

    def wrap(function: Function) -> Tool:
        if not callable(function) or inspect.isclass(function):
            raise TypeError(f"@tool wants a function, not {function!r:.100}; settings are keywords")
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"@tool wants a function that returns its result, {function_name(function)} yields")
        if parameters is None:
            schema, convert = function_schema(function)
        else:
            schema, convert = dict(parameters), conversion(function)
        function_label = function_name(function)
        tool_name = function_label if name is None else name
        if not isinstance(tool_name, str) or not re.fullmatch(r"[\w.:/-]+", tool_name):
            raise TypeError(
                f"@tool: the name {tool_name!r:.100} of {function_label} must be letters, digits and _ - . : / alone: formats of "
                "calls write names without quotes"
            )
        if problem := schema_problem(schema):
            raise TypeError(f"{function_label}: {problem}")
        _check_names(function, schema)
        description = tool_description(inspect.getdoc(definition(function)) or "")
        return Tool(tool_name, description, schema, function, timeout_s, convert=convert)

    return wrap if function is None else wrap(function)


def _check_names(function: Function, schema: Schema) -> None:
    """Check that a function takes the arguments of a schema written by hand."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(schema.get("properties", {})))
    except TypeError as error:
        raise TypeError(
            f"{function_name(function)}: its parameters are not those of its JSON Schema: {error}"
        ) from None


def _coroutine_function(function: Function) -> Function | None:
    """Return the ``async def`` behind a tool's function; None if it is a plain one."""
    function = definition(function)
    return function if inspect.iscoroutinefunction(function) else None


@lru_cache(maxsize=1024)
def _awaits(code: CodeType) -> bool:
    return any(instruction.opname in ("GET_AWAITABLE", "GET_ANEXT") for instruction in dis.get_instructions(code))


def _run_to_end(coroutine: Coroutine[object, None, object]) -> object:
    """Return the result of a coroutine that never awaits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it awaits nothing")


class ToolService(ABC):
    """A tool with a separate server, registered under the entry-point group ``agentrl.tools``.

    ``agentrl tools serve NAME`` runs `serve`; ``agentrl train`` starts the same in a separate process if
    ``tools.NAME.url`` is not set, waits until ``GET /health`` answers 200, and calls it through `client`.
    """

    name: ClassVar[str]
    """The registered name, and the name in `ToolCall`."""
    sandboxed: ClassVar[bool] = False
    """Whether the run's ``sandbox`` section is given to `check` and `launch_arguments`, as ``options["sandbox"]``."""
    uses_containers: ClassVar[bool] = False
    """Likewise the section ``containers``, as ``options["containers"]``."""

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

    def remove_left(
        self, options: Mapping[str, object], folder: Path, find_resumed: Callable[[Collection[str]], Collection[str]]
    ) -> int:
        """Remove what the server of an earlier process of the run has left for episodes that do not continue.

        Called before the first episode of a run, whose server has started already.

        Args:
            options: of the run.
            folder: the one that `launch_arguments` got.
            find_resumed: returns those of some words that the states of resumed episodes have.

        Returns:
            how much was removed.
        """
        return 0

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
