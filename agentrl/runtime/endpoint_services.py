"""The services of episodes that a model at an endpoint plays: tool servers and the endpoint. No engine, no tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.clients.chat_completions import ChatCompletions, open_chat_model
from agentrl.clients.http import read_token
from agentrl.config.schema import Config
from agentrl.core.child_process import raise_file_limit
from agentrl.core.errors import ConfigError
from agentrl.data.task_sources import TaskSources
from agentrl.episode.runner import EpisodeRunner, EpisodeSlots
from agentrl.runtime.episodes import make_runner
from agentrl.runtime.judges import OtherModels
from agentrl.runtime.tool_servers import ToolServers

KEY = "model.endpoint"


@dataclass(slots=True)
class EndpointServices:
    """A model at an endpoint, and running tool servers."""

    config: Config
    endpoint: ChatCompletions
    """The model."""
    tools: ToolServers
    exits: ExitStack
    """What ends with the services."""

    def runner(self) -> EpisodeRunner:
        """Return a runner with the sampling parameters of training; `EpisodeRunner.with_sampling` changes them."""
        slots = EpisodeSlots(self.config.rollout.concurrency)
        self.exits.callback(slots.close)
        return make_runner(self.config, None, None, self.tools, OtherModels(), slots, endpoint=self.endpoint)

    def check(self) -> None:
        """Raise if a tool server is lost for good."""
        self.tools.check()


def check_endpoint(config: Config) -> None:
    """Check that a model at an endpoint can play the episodes of a configuration with ``model.endpoint``.

    Raises:
        ConfigError: it cannot, or its key is missing; the message has the key to change.
    """
    endpoint = config.model.endpoint
    assert endpoint is not None, "it is called with one"
    read_token(endpoint, KEY)
    played = f"{KEY}.url={endpoint.url}"
    if config.sampler.url is not None:
        raise ConfigError(f"sampler.url={config.sampler.url} and {played}: two policies; leave out one")
    for name, source in config.by_source().items():
        prefix = f"sources.{name}." if name else ""
        if source.rollout.agent.setting is not None:
            raise ConfigError(
                f"{prefix}{source.rollout.agent.setting} with {played}: an agent program gets its turns from the gateway, which "
                "records them token by token. Point the program itself at the endpoint, or leave out one"
            )
        if not source.data.apply_chat_template:
            raise ConfigError(
                f"{prefix}data.apply_chat_template=false with {played}: a prompt without the chat format is no conversation; "
                "leave it out"
            )
        for reward, term in source.reward.by_name.items():
            if term.judge is not None and term.judge.model is not None:
                key = f"{prefix}{source.reward.section_key(reward)}.judge"
                raise ConfigError(
                    f"{key}.model={term.judge.model} with {played}: there are no engines; set {key}.endpoint"
                )
        for program in source.env.programs.values():
            raise ConfigError(
                f"{prefix}{program.setting} with {played}: a program gets its turns from the gateway, which records them token "
                "by token; leave out one"
            )
        for role, settings in source.env.roles.items():
            if settings.frozen is not None:
                raise ConfigError(
                    f"{prefix}env.roles.{role}.frozen={settings.frozen} with {played}: frozen weights need an engine; set "
                    f"env.roles.{role}.endpoint or env.roles.{role}.player"
                )


@asynccontextmanager
async def open_endpoint(config: Config, tasks: TaskSources, folder: Path) -> AsyncIterator[EndpointServices]:
    """Start the tool servers of a configuration with ``model.endpoint``, and stop them on exit.

    Args:
        config: of the evaluation.
        tasks: of each source, passed to the tool servers.
        folder: gets the logs, and the files of tool servers.

    Raises:
        ConfigError: the endpoint refuses a first request, or does not answer.
        ToolServerError: a tool server does not start; the message has its last log lines.
    """
    assert config.model.endpoint is not None, "it is called with one"
    raise_file_limit()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    endpoint = open_chat_model(config.model.endpoint, KEY)
    async with endpoint.client:
        plans = config.eval.named_sets(config.sources).values()
        await endpoint.check([(plan.temperature, plan.top_p, plan.top_k) for plan in plans])
        tools = ToolServers(config, tasks, folder, logs)
        try:
            await tools.start()
            with ExitStack() as exits:
                yield EndpointServices(config, endpoint, tools, exits)
        finally:
            await tools.aclose()
