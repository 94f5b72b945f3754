"""Checks of tasks, environment, tools and engine that need no running server."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from agentrl.algo.registry import make_estimator
from agentrl.batch.groups import GroupFilters
from agentrl.cluster.placement_layout import gpus_here
from agentrl.config.agent import CONTAINER
from agentrl.config.engine_checks import check_context
from agentrl.config.learner import LearnerConfig
from agentrl.config.obs import ObsConfig
from agentrl.config.schema import Config
from agentrl.config.secret_values import hide_secrets
from agentrl.config.tasks import EnvConfig
from agentrl.core.env import EnvBase
from agentrl.core.errors import ConfigError, MissingError, unknown_name
from agentrl.core.extras import install_command, is_installed, not_installed_error
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import env_class, env_class_fault, make_any_env
from agentrl.core.user_code import calling
from agentrl.data.buffer import load_buffer_filter
from agentrl.data.task_sources import errors_name_source
from agentrl.episode.seats import agent_roles
from agentrl.inference.fleet.sglang_router import require_router
from agentrl.inference.launch.interpreter import Interpreter
from agentrl.rewards.grader import check_reward
from agentrl.runtime.roles import make_lineup
from agentrl.runtime.run_tools import private_files, run_services
from agentrl.self_play.opponents import check_self_play


def check_episodes(config: Config) -> None:
    """Check environment, tools, multi-turn loop and reward function of every source, buffer filter, and filters on groups.

    Raises:
        UserError: one does not exist or is not valid.
    """
    for name, source_config in config.by_source().items():
        with errors_name_source(name):
            _check_episodes(source_config)
    load_buffer_filter(config.rollout)
    GroupFilters(config.rollout.filter_groups)


def _check_episodes(config: Config) -> None:
    env = _make_env(config.env)
    cls = type(env)
    check_self_play(config)
    check_roles(config)
    agent = config.rollout.agent
    is_scored = agent.setting is not None and agent.reward == "environment"
    if fault := env_class_fault(cls, needs_step=config.rollout.loop is None or is_scored):
        raise ConfigError(f"env.name={config.env.name}: {cls.__name__} {fault}")
    if is_scored and issubclass(cls, MultiAgentEnv):
        raise ConfigError(
            f"rollout.agent.reward=environment with env.name={config.env.name}, which has several agents: a final answer is that "
            "of one; set rollout.agent.reward=function or session"
        )
    if agent.sandbox == CONTAINER:
        _check_machine_program(config, cls)
    make_lineup(config)
    run_services(config)
    # The gateway's server takes a while to import.
    if agent.is_elsewhere:
        from agentrl.gateway.agents_elsewhere import agent_token

        agent_token(agent)
    elif agent.setting is not None:
        from agentrl.gateway.program import check_agent

        check_agent(agent, config.sandbox, private_files(config))
    for program in config.env.programs.values():
        from agentrl.gateway.program import check_agent

        check_agent(program, config.sandbox, private_files(config))
    if agent.setting is None:
        needs_reward = cls.needs_reward and config.rollout.generate is None
    else:
        needs_reward = cls.needs_reward if is_scored else agent.reward == "function"
    check_reward(config, needs_reward=needs_reward and config.algo.needs_reward)


def _check_machine_program(config: Config, cls: type[EnvBase]) -> None:
    """Check that a program which works in machines of tasks has one, and that this process can be reached from there."""
    setting = f"{config.rollout.agent.key}.sandbox={CONTAINER}"
    if not cls.opens_machine:
        raise ConfigError(
            f"{setting} with env.name={config.env.name}, which opens no machine for a task; set env.name=terminal, or another "
            f"{config.rollout.agent.key}.sandbox"
        )
    if config.containers.runtime is not None:
        raise ConfigError(
            f"{setting} with containers.runtime={config.containers.runtime}: a machine with its own kernel has its own loopback, "
            "on which the gateway cannot listen; leave out one of them"
        )
    if os.geteuid() != 0:
        raise MissingError(f"{setting} needs root, to enter the network namespaces of the machines")


def check_roles(config: Config) -> None:
    """Check that the agents of a run, or of one of its sources, have the roles that the advantage estimator names.

    Raises:
        ConfigError: there is no such role.
    """
    estimator = make_estimator(config.algo.advantage)
    if not estimator.role_options:
        return
    roles = set(agent_roles(config).values())
    episodes = config.rollout.agent.setting or f"env.name={config.env.name}"
    if not roles:
        raise ConfigError(
            f"algo.advantage.name={estimator.name}, and {episodes} has one agent, without roles; set "
            "algo.advantage.name=grpo"
        )
    for option in estimator.role_options:
        for role in getattr(estimator.options, option):
            if role not in roles:
                raise unknown_name(f"role of {episodes}", role, roles, f"algo.advantage.options.{option}")


def _make_env(section: EnvConfig) -> EnvBase:
    key = f"env.name={section.name} with env.options={section.options}"
    with calling(f"{key}: {env_class(section.name).__name__}'s constructor"):
        return make_any_env(section.name, section.options)


def check_packages(learner: LearnerConfig, obs: ObsConfig) -> None:
    """Check that the packages of a run's outputs, and of its adapters, are installed.

    Raises:
        MissingError: one is not; a line for each.
    """
    lines = []
    for package, is_used, key in (
        ("peft", learner.lora is not None, "learner.lora"),
        ("tensorboard", obs.tensorboard is True, "obs.tensorboard=true"),
        ("wandb", obs.wandb != "off", f"obs.wandb={obs.wandb}"),
        ("trackio", obs.trackio, "obs.trackio=true"),
        ("mlflow", obs.mlflow is not None, f"obs.mlflow={hide_secrets(str(obs.mlflow))}"),
        ("opentelemetry", obs.otlp is not None, f"obs.otlp={obs.otlp}"),
        ("pyarrow", obs.rollout_format == "parquet", "obs.rollout_format=parquet"),
    ):
        if is_used and not is_installed(package):
            lines.append(str(not_installed_error(package, key)))
    if lines:
        raise MissingError("\n".join(lines))


def check_engine(config: Config, *, on_cluster: bool = False) -> None:
    """Check that the engine can run here.

    Args:
        config: of the run.
        on_cluster: engines are started by a running Ray, whose machines may have GPUs if this one has none.

    Raises:
        MissingError: it is not installed, or there is no GPU; the message states what to install or set.
        ConfigError: it holds fewer tokens than an episode may have, or has options of another engine.
    """
    sampler = config.sampler
    if sampler.sglang and not sampler.uses_sglang:
        options = ", ".join(f"sampler.sglang.{name}" for name in sampler.sglang)
        raise ConfigError(
            f"{options} with sampler.backend={sampler.backend}, whose engines take no options of SGLang; leave them out, or set "
            "sampler.backend=sglang"
        )
    if sampler.uses_sglang and sampler.url is None:
        lacks = _lacks_sglang(sampler.python)
        if not lacks and sampler.renormalise == "engine":
            _check_support_version(sampler.python)
        gpu = sampler.device == "cpu" or on_cluster or gpus_here() > 0
        lacks += [] if gpu else ["there is no GPU here"]
        if lacks:
            raise MissingError(
                f"sampler.backend=sglang, but {' and '.join(lacks)}; set sampler.url to a running server, or "
                "sampler.backend=embedded"
            )
    if sampler.has_router_program:
        require_router()
    check_context(config)


_SUPPORT_VERSION = (0, 5, 23)
"""Version of SGLang, which returns the sampling support of tokens since."""


def _check_support_version(python: Path | None) -> None:
    version = Interpreter.probe(python or Path(sys.executable)).version
    numbers = re.findall(r"\d+", version)[:3]
    if numbers and tuple(map(int, numbers)) < _SUPPORT_VERSION:
        minimum = ".".join(map(str, _SUPPORT_VERSION))
        raise ConfigError(
            f"sampler.renormalise=engine with SGLang {version}: engines return what tokens were sampled from since {minimum}; "
            f"install {minimum}, or set sampler.renormalise=learner"
        )


def _lacks_sglang(python: Path | None) -> list[str]:
    if python is None:
        lack = f"SGLang is not installed here ({install_command('sglang')}, or sampler.sglang.python)"
        return [] if is_installed("sglang") else [lack]
    if not python.is_file():
        return [f"there is no sampler.sglang.python={python}"]
    return [] if Interpreter.probe(python).sglang else [f"SGLang is not installed in sampler.sglang.python={python}"]
