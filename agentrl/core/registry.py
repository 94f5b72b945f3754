"""Registries of environments, tools, tasksets, models, rewards, sandbox and learner backends, and weight
transports.

Names come from entry points, or are registered in the process. agentrl's own are entry points too, except learner
backends (`agentrl.learner.registry`) and transports (`agentrl.weight_sync.registry`). Objects are imported on lookup.
"""

from __future__ import annotations

import glob
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any, TypeVar

from agentrl.core.env import AsyncEnv, Env, EnvBase
from agentrl.core.errors import ConfigError, UnknownNameError, unknown_name
from agentrl.core.extras import DISTRIBUTION, missing_extra_error
from agentrl.core.imports import importing, is_loaded_file, is_reference, load_object
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.task import TaskSet
from agentrl.core.tool import Tool, ToolService
from agentrl.core.user_code import calling, describe, is_library

E = TypeVar("E", bound=type[EnvBase])
P = TypeVar("P")
T = TypeVar("T", bound=Tool | type[ToolService])

ENVS = "agentrl.envs"
TOOLS = "agentrl.tools"
TASKS = "agentrl.tasks"
MODELS = "agentrl.models"
REWARDS = "agentrl.rewards"
SANDBOXES = "agentrl.sandboxes"
LEARNERS = "agentrl.learners"
TRANSPORTS = "agentrl.transports"

GROUPS = (ENVS, TOOLS, TASKS, MODELS, REWARDS, SANDBOXES, LEARNERS, TRANSPORTS)
"""The entry point groups."""

_registered: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
_tool_modules: dict[str, str] = {}
"""By tool, the module that registered it."""


def register_env(name: str) -> Callable[[E], E]:
    """Register an environment class under ``name`` for this process; use as a decorator.

    Raises:
        ConfigError: another class has the name.
    """

    def wrap(cls: E) -> E:
        registered = _registered[ENVS].get(name)
        if registered is not None and registered.__qualname__ != cls.__qualname__:
            raise ConfigError(
                f"environment name {name!r} is taken by {registered.__module__}.{registered.__qualname__}"
            )
        _registered[ENVS][name] = cls
        return cls

    return wrap


def register_tool(name: str) -> Callable[[T], T]:
    """Register a `Tool` or a `ToolService` under ``name`` for this process; use as a decorator, above ``@tool``.

    Raises:
        ConfigError: another tool has the name.
    """

    def wrap(tool: T) -> T:
        registered = _registered[TOOLS].get(name)
        if registered is not None and _qualified_name(registered) != _qualified_name(tool):
            raise ConfigError(f"tool name {name!r} is taken by {_qualified_name(registered)}")
        _registered[TOOLS][name] = tool
        _tool_modules[name] = sys._getframe(1).f_globals["__name__"]
        return tool

    return wrap


def tool_definition(name: str) -> str | None:
    """Return the file or module that has registered a tool in this process, for ``agentrl tools serve NAME --from``.

    None if another process finds the tool by its name: an entry point, or ``path/to/file.py:name``.
    """
    module = _tool_modules.get(name)
    if module is None:
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if file is not None and (module == "__main__" or is_loaded_file(module)) else module


def _qualified_name(tool: Tool | type[ToolService]) -> str:
    """Return the name that identifies a definition: a file that is run and imported defines an object twice."""
    return tool.function.__qualname__ if isinstance(tool, Tool) else tool.__qualname__


def names(group: str) -> list[str]:
    """Return all registered names of a group, such as ``agentrl.envs``."""
    return sorted({*_registered[group], *_entry_points(group)})


def definition_paths(group: str) -> dict[str, set[Path]]:
    """Return where the registered objects of a group are defined, by name: folders of top-level packages, or files.

    Imports no plugin. A file's compiled ones are among them; packages that are not installed as files are left out.
    """
    paths = {name: _module_paths(point.module) for name, point in _entry_points(group).items()}
    for name, registered in _registered[group].items():
        file = getattr(sys.modules.get(registered.__module__), "__file__", None)
        if file is not None:
            paths[name] = _source_paths(Path(file))
    return paths


def reference_paths(reference: str) -> set[Path]:
    """Return where the object of ``path/to/file.py:name`` or ``module:name`` is defined; see `definition_paths`."""
    location = reference.partition(":")[0]
    return _source_paths(Path(location).expanduser()) if location.endswith(".py") else _module_paths(location)


def plugin_code(group: str, name: str) -> tuple[str, list[Path]]:
    """Return the distribution with its version that registers a name, and the source files of an object's package.

    Files of an installed package are left out: the version stands for them. Both are empty for what agentrl registers.
    """
    point = _entry_points(group).get(name)
    if name in _registered[group] or point is None or point.dist is None:
        file = getattr(sys.modules.get(getattr(_registered[group].get(name), "__module__", "")), "__file__", None)
        return "", [Path(file)] if file is not None else []
    if point.dist.name == DISTRIBUTION:
        return "", []
    paths = sorted(path for path in _module_paths(point.module) if not is_library(f"{path}{os.sep}"))
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return f"{point.dist.name} {point.dist.version}", [file for file in files if file.suffix == ".py"]


def _module_paths(module: str) -> set[Path]:
    name = module.partition(".")[0]
    spec = find_spec(name) or PathFinder.find_spec(name, [os.getcwd()])
    if spec is None:
        return set()
    if spec.submodule_search_locations:
        return {Path(location).resolve() for location in spec.submodule_search_locations}
    return _source_paths(Path(spec.origin)) if spec.has_location and spec.origin else set()


def _source_paths(file: Path) -> set[Path]:
    """Return a source file, and its compiled files wherever Python keeps them."""
    file = file.resolve()
    folders = {file.with_name("__pycache__"), Path(cache_from_source(str(file))).parent}
    return {file, *(path for folder in folders for path in folder.glob(f"{glob.escape(file.stem)}.*.py[co]"))}


def installed_paths(group: str) -> dict[str, set[Path]]:
    """Return what the distributions with registered objects of a group have installed, by name; not their scripts.

    For what is in a folder of ``site-packages``, that folder.
    """
    distributions = {name: point.dist for name, point in _entry_points(group).items()}
    return {name: _files(distribution) for name, distribution in distributions.items() if distribution is not None}


@cache
def _files(distribution: Distribution) -> set[Path]:
    site, scripts = Path(str(distribution.locate_file(""))).resolve(), Path(sysconfig.get_path("scripts")).resolve()
    paths = set()
    for file in distribution.files or ():
        path = Path(os.path.normpath(site / file))
        if path.is_relative_to(site) and len(file.parts) > 1 and file.parts[0] != "__pycache__":
            path = site / file.parts[0]
        if path.parent != scripts:
            paths.add(path)
    return paths


def lookup(group: str, name: str, kind: str, key: str) -> Any:
    """Return the object of a registered name, of ``path/to/file.py:name`` or ``module:name``.

    Args:
        group: such as ``agentrl.envs``.
        name: registered, or a reference.
        kind: kind of object, for the message.
        key: the configuration key that holds ``name``, for the message.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: the file or module, or the name in it, does not exist.
        MissingError: it needs a package that only an extra of agentrl installs.
    """
    return load_object(name, key) if is_reference(name) else _registered_object(group, name, kind, key)


def _registered_object(group: str, name: str, kind: str, key: str) -> Any:
    if name in _registered[group]:
        return _registered[group][name]
    point = _entry_points(group).get(name)
    if point is None:
        registered = names(group)
        error = unknown_name(kind, name, registered, key)
        if not registered:  # agentrl has entry points in every group that is looked up here alone
            raise UnknownNameError(f"{error} The installation is older than the code: install agentrl again.")
        raise error
    setting = key if key.endswith(f".{name}") else f"{key}={name}"
    if packages := _shared_names(group).get(name):
        raise ConfigError(f"{setting}: {packages} register this name in {group}; uninstall all but one of them")
    call = f"{setting}: importing {point.value}"
    try:
        with importing(call):
            return point.load()
    except ModuleNotFoundError as error:
        missing_error = missing_extra_error(error, setting)
        if missing_error is None:
            raise ConfigError(f"{call} of {_package(point)} fails: {describe(error)}") from error
        raise missing_error from None


def _package(point: EntryPoint) -> str:
    """Return the name of the package that has an entry point, and its version."""
    return "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


@cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    """Cached, as an environment is made every episode."""
    return {point.name: point for point in _all_entry_points().select(group=group)}


@cache
def _shared_names(group: str) -> dict[str, str]:
    """Return the packages of each name that several register for different objects."""
    points: dict[str, dict[str, EntryPoint]] = {}
    for point in _all_entry_points().select(group=group):
        points.setdefault(point.name, {})[point.value] = point
    return {
        name: " and ".join(map(_package, by_value.values())) for name, by_value in points.items() if len(by_value) > 1
    }


_all_entry_points = cache(entry_points)
"""Read once for all groups: 30 milliseconds for an environment of 250 packages, however few of them are selected."""


def plugin_class(group: str, name: str, kind: str, key: str, base: type[P], own: Mapping[str, type[P]]) -> type[P]:
    """Return the class of one of ``own`` names, of a registered name, of ``path/to/file.py:Class`` or ``module:Class``.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: the file, or the class in it, does not exist, is no subclass of ``base``, or is abstract.
    """
    if name in own:
        return own[name]
    if own and not is_reference(name) and name not in names(group):
        raise unknown_name(kind, name, [*own, *names(group)], key)
    cls = lookup(group, name, kind, key)
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        raise ConfigError(f"{key}={name}: {cls!r:.100} is no subclass of {base.__module__}.{base.__qualname__}")
    if abstract := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(f"{key}={name}: {cls.__name__} does not implement {', '.join(abstract)}")
    return cls


def env_class(name: str, key: str = "env.name") -> type[Env] | type[MultiAgentEnv]:
    """Return the environment class of a registered name, of ``path/to/file.py:Class`` or ``module:Class``.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: the file, or the class in it, does not exist or is no environment.
    """
    cls = lookup(ENVS, name, "environment", key)
    if not (inspect.isclass(cls) and issubclass(cls, Env | MultiAgentEnv)):
        raise ConfigError(f"{name} ({key}) is no subclass of agentrl.Env or agentrl.MultiAgentEnv")
    return cls


def make_any_env(name: str, options: Mapping[str, Any] | None = None, key: str = "env.options") -> Env | MultiAgentEnv:
    """Build an environment of one or of several agents; see `make_env`."""
    env = build(env_class(name), options, key)
    assert isinstance(env, Env | MultiAgentEnv)
    return env


def make_env(name: str, options: Mapping[str, Any] | None = None, key: str = "env.options") -> Env:
    """Build an environment by name; ``options`` are its constructor's keyword arguments, and ``key`` their name in messages.

    Raises:
        ConfigError: the constructor does not take one of the options, or lacks one, or the environment has several agents.
    """
    env = make_any_env(name, options, key)
    if isinstance(env, MultiAgentEnv):
        raise ConfigError(f"env.name={name} has several agents ({', '.join(env.possible_agents)}), and this needs one")
    return env


_SYNCHRONOUS = (
    *("registered_tools", "example_task", "tasks", "configured_tasks"),
    *("reset", "step", "truncate", "forfeit", "get_state", "set_state", "close"),
)
"""Methods of environments that nothing awaits."""


def env_class_fault(cls: type[EnvBase], *, needs_step: bool = True) -> str:
    """Return what is wrong with the methods of an environment class, such as ``defines no step(action)``; empty if nothing.

    Args:
        cls: the class.
        needs_step: whether its steps are taken; a multi-turn loop may take none.
    """
    for name in _SYNCHRONOUS:
        if inspect.iscoroutinefunction(getattr(cls, name, None)):
            remedy = "write it without async"
            if hasattr(AsyncEnv, f"a{name}") and issubclass(cls, Env):
                remedy = f"define async a{name} in a subclass of agentrl.AsyncEnv"
            return f"defines {name} as a coroutine, which is not awaited; {remedy}"
    for name in ("registered_tools", "tasks", "configured_tasks"):
        if inspect.isfunction(inspect.getattr_static(cls, name)):
            return f"defines {name} without @classmethod"
    for name in ("areset", "astep", "atruncate", "aclose"):
        if issubclass(cls, AsyncEnv) and not inspect.iscoroutinefunction(inspect.unwrap(getattr(cls, name))):
            return f"defines {name} as no coroutine, and it is awaited; write async def {name}, without yield"
    if not needs_step:
        return ""
    if issubclass(cls, AsyncEnv):
        return "defines no astep(action)" if cls.astep is AsyncEnv.astep else ""
    if issubclass(cls, Env):
        return "defines no step(action)" if cls.step is Env.step else ""
    assert issubclass(cls, MultiAgentEnv), "there are no other environments"
    return "defines no step(actions)" if cls.step is MultiAgentEnv.step else ""


def tool_service(name: str) -> ToolService:
    """Return the tool service registered under ``name``.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: it is a plain `Tool`; ``agentrl.toolserver.service.find_service`` makes a service of one.
    """
    tool = lookup_tool(name)
    if isinstance(tool, Tool):
        raise ConfigError(f"tools.{name}: {name} is a plain agentrl.Tool and no service")
    return tool


MCP = "mcp:"
"""Begins the name of an MCP server that ``tools.NAME.options`` configure: ``mcp:files``."""


def is_mcp(name: str) -> bool:
    """Return whether the name of a tool is that of an MCP server without a definition in code."""
    return name.startswith(MCP) and len(name) > len(MCP)


def lookup_tool(name: str) -> ToolService | Tool:
    """Return the tool or tool service registered under ``name``, or what ``path/to/file.py:name`` refers to.

    ``mcp:NAME`` is the registered ``mcp`` under this name, so that a run may have several.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: the file, or the name in it, does not exist or is no tool.
    """
    key = f"tools.{name}"
    definition = lookup(TOOLS, "mcp" if is_mcp(name) else name, "tool", key)
    is_service = inspect.isclass(definition) and issubclass(definition, ToolService)
    if is_service and (is_mcp(name) or is_reference(name)):
        definition = type(definition.__name__, (definition,), {"name": name})  # its server looks it up by this name
    tool = definition() if is_service else definition
    if not isinstance(tool, ToolService | Tool):
        raise ConfigError(f"{key}: {name} is {tool!r:.100}, and neither an agentrl.Tool nor an agentrl.ToolService")
    return tool


def served_tools(name: str, options: Mapping[str, Any] | None = None) -> tuple[Tool, ...]:
    """Return the tools of a registered tool's server, for `Env.tools`: the policy calls them, the runner runs them at the server.

    In a run each is replaced by the tool that the run's ``tools.NAME.options`` configure, with its description and schema.

    Example::

        class CodeEnv(Env):
            tool_names = ("python",)

            def __init__(self) -> None:
                self.tools = served_tools("python")
    """
    tool = lookup_tool(name)
    if isinstance(tool, Tool):
        return (replace(tool, server=name),)
    return tool.tools(options or {})


def make_tasks(name: str, options: Mapping[str, Any] | None = None) -> TaskSet:
    """Build a taskset by its registered name (or ``file.py:Class``) with ``tasks.options``.

    Raises:
        ConfigError: it is no taskset, or its constructor raises or does not take one of the options.
    """
    cls = lookup(TASKS, name, "taskset", "tasks.name")
    if not (inspect.isclass(cls) and issubclass(cls, TaskSet)):
        raise ConfigError(f"tasks.name={name} is {cls!r:.100}, and no subclass of agentrl.TaskSet")
    with calling(f"tasks.name={name}: {cls.__name__}'s constructor"):
        tasks: TaskSet = build(cls, options, "tasks.options")
    return tasks


def model_folder(name: str) -> Path | None:
    """Return the folder of a shipped model, or None where no model is registered under ``name``.

    Raises:
        ConfigError: what is registered cannot be imported, or is no path.
    """
    try:
        folder = _registered_object(MODELS, name, "model", "model.path")
    except UnknownNameError:
        return None
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"model.path={name} is registered as {folder!r:.100}, and no path of a folder")
    return Path(folder)


def reward_function(name: str) -> Callable[..., Any]:
    """Return the reward function of a registered name, of ``path/to/file.py:function`` or ``module:function``.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: the file, module or function does not exist, or is not callable.
    """
    key = "reward.function"
    try:
        function = lookup(REWARDS, name, "reward function", key)
    except UnknownNameError as error:
        raise UnknownNameError(f"{error} A function of your own is file.py:function or module:function.") from None
    if not callable(function):
        raise ConfigError(f"{key}={name} is a {type(function).__name__}, and no function")
    return function  # type: ignore[no-any-return]


def build(cls: Callable[..., Any], options: Mapping[str, Any] | None, key: str, *arguments: Any) -> Any:
    """Return ``cls(*arguments, **options)``.

    Args:
        cls: a class, or a function that returns an object.
        options: keyword arguments, which the user sets.
        key: their configuration key, for messages.
        arguments: that come before the options.

    Raises:
        ConfigError: it does not take one of the options, or lacks one.
    """
    try:
        return cls(*arguments, **(options or {}))
    except TypeError:
        _check_options(cls, options or {}, key, arguments)
        raise


def _check_options(cls: Callable[..., Any], options: Mapping[str, Any], key: str, arguments: Sequence[Any]) -> None:
    signature = inspect.signature(cls)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        parameters = [*signature.parameters][len(arguments) :]
        raise ConfigError(
            f"{key}: {error}; {getattr(cls, '__name__', cls)} takes: {', '.join(parameters) or 'nothing'}"
        ) from None
