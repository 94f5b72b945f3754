"""The tools that a run needs: their services, their options, and what a policy may call. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.base import Section
from agentrl.config.schema import Config
from agentrl.config.toolserver import ToolConfig
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.imports import is_reference
from agentrl.core.registry import TOOLS, env_class, is_mcp, make_any_env, names, reference_paths
from agentrl.core.tool import Tool, ToolService
from agentrl.data.hub import PREFIX
from agentrl.episode.context import offered_tools
from agentrl.episode.custom_loop import required_tools
from agentrl.rewards.grader import reward_tools
from agentrl.sandbox.base import unsafe_warning
from agentrl.sandbox.registry import backend_class
from agentrl.sandbox.shown_folders import check_shown, is_program
from agentrl.toolserver.service import find_service

_log = logging.getLogger(__name__)


def run_services(config: Config) -> dict[str, ToolService]:
    """Return the services of the tools that a run needs, of all of its sources, by their registered names.

    Raises:
        UserError: one does not exist.
    """
    names = [name for source_config in config.by_source().values() for name in _source_tools(source_config)]
    return {name: find_service(name) for name in names}


def _source_tools(config: Config) -> tuple[str, ...]:
    """Return the tools of a source's episodes, and those that its reward function calls (``tool_names``)."""
    scoring, env = reward_tools(config.reward), env_class(config.env.name)
    if config.rollout.agent.setting is not None:  # the program has its own
        named = env.registered_tools(config.env.options) if config.rollout.agent.reward == "environment" else ()
    else:
        named = required_tools(config.rollout.generate, env, config.env.options)
    return tuple(dict.fromkeys((*named, *scoring)))


def served_tools(config: Config, services: Mapping[str, ToolService]) -> dict[str, Tool]:
    """Return what a policy may call at the servers of a run, or of one source, by the tool's name, with the run's options.

    Raises:
        ConfigError: options that do not fit, or two servers with tools of one name.
    """
    served: dict[str, Tool] = {}
    for name, service in services.items():
        for tool in service.tools(service_options(config, name, service)):
            if tool.name in served:
                raise ConfigError(
                    f"the servers of {served[tool.name].server!r} and {name!r} both have a tool {tool.name!r}; a run can "
                    "have one of them"
                )
            served[tool.name] = tool
    return served


def policy_tools(config: Config) -> tuple[Tool, ...]:
    """Return the tools that the environment of a run, or of one source, offers to the policy, with the run's options.

    Raises:
        UserError: the environment or a tool cannot be made.
    """
    env = make_any_env(config.env.name, config.env.options)
    return offered_tools(env, served_tools(config, run_services(config)))


def check_tools(config: Config) -> None:
    """Check the options of a run's tools, what the servers need that it would start, and that the others answer.

    Raises:
        UserError: with the value and the key to change.
    """
    services = run_services(config)
    tool_names = {*names(TOOLS), *services}
    for name in config.tools:  # of a registered tool that this run does not use: a file may be for several runs
        if name not in tool_names and not is_reference(name):
            raise unknown_name("tool", name, tool_names, f"tools.{name}")
    backend_class(config.sandbox.backend)  # also if no tool has a sandbox: a name that does not exist is a mistake
    for source_config in config.by_source().values():
        served_tools(source_config, run_services(source_config))
    for name, service in services.items():
        options, url = service_options(config, name, service), tool_url(config.tools, name)
        if url is not None:
            service.check_server(url, options)
        else:
            service.check(options)
            if service.sandboxed:
                for source_config in config.by_source().values():
                    check_shown(config.sandbox, private_files(source_config))


def private_files(config: Config) -> dict[Path, str]:
    """Return the files of a run that code must not read, with what they are."""
    files = {"data.path": config.data.path, "data.eval_path": config.data.eval_path, "run.dir": config.run.dir}
    files |= {f"eval.sets.{name}.path": eval_set.path for name, eval_set in config.eval.sets.items()}
    files["eval.path"] = config.eval.path
    paths = {path.resolve(): f"run's {key}" for key, path in files.items() if path is not None}
    for key, path in files.items():
        if path is not None and str(path).startswith(PREFIX):
            paths |= dict.fromkeys(_hub_caches(str(path).removeprefix(PREFIX).partition(":")[0]), f"run's {key}={path}")
    for key, options in {"env.options": config.env.options, "tasks.options": config.tasks.options}.items():
        for name, value in options.items():
            if isinstance(value, str | Path) and Path(value).is_file() and not is_program(Path(value)):
                paths[Path(value).resolve()] = f"run's {key}.{name}"
    references = {
        "env.name": config.env.name,
        "tasks.name": config.tasks.name,
        "tasks.data_source.name": config.tasks.data_source.name,
        **{f"reward.function of {name}": term.function for name, term in config.reward.by_name.items()},
        "data.convert": config.data.convert,
        "rollout.generate": config.rollout.generate,
    }
    named_tools = config.env.options.get("tools")
    tool_names = [named_tools] if isinstance(named_tools, str) else named_tools
    for number, name in enumerate(tool_names if isinstance(tool_names, list) else ()):
        references[f"env.options.tools.{number}"] = name if isinstance(name, str) and not is_mcp(name) else None
    for key, reference in references.items():
        if reference is not None and is_reference(reference):
            paths |= dict.fromkeys(reference_paths(reference), f"run's {key}")
    return paths


def _hub_caches(dataset: str) -> list[Path]:
    """Return the folders in which the Hugging Face libraries keep a dataset of the hub, as it is and as they have read it."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    downloads = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub") / f"datasets--{dataset.replace('/', '--')}"
    read = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets")
    return [path.expanduser().resolve() for path in (downloads, read)]


def warn_unsandboxed(config: Config, services: Mapping[str, ToolService]) -> None:
    """Log a warning in red if tools that the run starts would run code without isolation."""
    bare = [name for name, service in services.items() if service.sandboxed and tool_url(config.tools, name) is None]
    if bare and not backend_class(config.sandbox.backend).isolated:
        _log.critical("\033[31m%s (%s)\033[0m", unsafe_warning(config.sandbox.backend), ", ".join(bare))


def service_options(config: Config, name: str, service: ToolService) -> dict[str, Any]:
    """Return ``tools.NAME.options``; for a tool that runs code, with the run's section ``sandbox`` or ``containers``.

    Raises:
        ConfigError: the options of such a tool have another such section.
    """
    options = dict(config.tools[name].options) if name in config.tools else {}
    sections: dict[str, Section] = {"sandbox": config.sandbox} if service.sandboxed else {}
    sections |= {"containers": config.containers} if service.uses_containers else {}
    for section_name in sections:
        if section_name in options:
            raise ConfigError(
                f"tools.{name}.options.{section_name}: all tools share the section {section_name}; set its keys there"
            )
    return {**options, **{key: section.model_dump(mode="json") for key, section in sections.items()}}


def tool_url(tools: Mapping[str, ToolConfig], name: str) -> str | None:
    """Return the address of a running tool server, or None if the configuration names none."""
    return tools[name].url if name in tools else None
