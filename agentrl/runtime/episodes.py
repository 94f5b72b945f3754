"""The episode runner of a run and what it needs, in whichever process it is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.config.schema import Config
from agentrl.core.chat_endpoint import ChatEndpoint
from agentrl.core.registry import env_class, make_any_env
from agentrl.core.sampler import Sampler
from agentrl.core.types import Prompt, SamplingParams, message_with_images
from agentrl.episode.context import EpisodeContext
from agentrl.episode.custom_loop import Generate, load_generate
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.participants import SeatProgram
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.inference.client.segments import Vocabulary
from agentrl.models.image_positions import read_image_positions
from agentrl.models.image_processor import image_processor_loader, probe_image
from agentrl.models.load import load_tokenizer, read_end_ids, read_routing, read_vocab_size
from agentrl.models.reference_policy import resolve_frozen
from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.rewards.grader import make_grader
from agentrl.runtime.judges import OtherModels, source_judges
from agentrl.runtime.roles import make_lineup
from agentrl.runtime.tool_servers import ToolServers

if TYPE_CHECKING:
    from agentrl.gateway.agents_elsewhere import AgentsElsewhere


def open_renderer(config: Config, model: Path) -> tuple[ChatRenderer, Vocabulary]:
    """Return the renderer of the policy's chat format, and what clients of engines must know of its tokens.

    Args:
        config: of the run.
        model: folder of the tokenizer.
    """
    end_ids = [index for path in (model, *resolve_frozen(config).values()) for index in read_end_ids(path)]
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(model, trust_remote_code=trust)
    load_images = image_processor_loader(model, trust_remote_code=trust)
    renderer = make_renderer(tokenizer, config.render, end_ids, load_images=load_images)
    routing = read_routing(model) if config.algo.replays_routing else None
    images = read_image_positions(model)
    image_token = None if images is None else images.image_token_id
    image_prompt = _image_prompt(renderer) if image_token is not None and renderer.reads_images else None
    return renderer, Vocabulary(read_vocab_size(model), renderer.decode, routing, image_token, image_prompt)


def _image_prompt(renderer: ChatRenderer) -> Prompt:
    """Return a prompt with two images of different shapes, which engines must expand as the policy's processor does."""
    return renderer.render((message_with_images("user", probe_image(96, 64), probe_image(40, 72)),))


def make_runner(
    config: Config,
    renderer: ChatRenderer | None,
    sampler: Sampler | None,
    tools: ToolServers,
    models: OtherModels,
    slots: EpisodeSlots,
    agents: AgentsElsewhere | None = None,
    *,
    endpoint: ChatEndpoint | None = None,
) -> EpisodeRunner:
    """Return a runner with the sampling parameters of training; `EpisodeRunner.with_sampling` changes them.

    Args:
        config: of the run.
        renderer: of the policy's chat format; None with an endpoint.
        sampler: samples the policy; None with an endpoint.
        tools: have the clients of the tools.
        models: frozen weights and judges.
        slots: limit the concurrent episodes.
        agents: the address at which agents that run elsewhere start sessions, if the run has one.
        endpoint: plays the policy in place of a sampler.
    """
    settings = {}
    for name, source_config in config.by_source().items():
        loop = load_loop(source_config, name, agents)
        source_settings = _settings(name, source_config, loop, renderer, sampler, tools, models)
        context = replace(source_settings.context, endpoint=endpoint)
        settings[name] = replace(source_settings, context=context)
    return EpisodeRunner(settings, FailurePolicy(config.rollout.failure), slots)


def load_loop(config: Config, source: str, agents: AgentsElsewhere | None) -> Generate | None:
    """Return what plays the episodes in place of the environment; None if the environment does.

    Args:
        config: of the source.
        source: its name; empty in a run with one environment.
        agents: see `make_runner`.

    Raises:
        ConfigError: it cannot be used.
    """
    rollout = config.rollout
    if rollout.agent.setting is None:
        generate = rollout.generate or env_class(config.env.name).generate
        return None if generate is None else load_generate(generate)
    # The gateway's server takes a while to import.
    if rollout.agent.is_elsewhere:
        from agentrl.gateway.agents_elsewhere import AgentElsewhere

        assert agents is not None, "open_services has opened the address"
        return AgentElsewhere(rollout.agent, source, agents, rollout.n_samples_per_prompt)
    from agentrl.gateway.program import AgentProgram

    return AgentProgram(rollout.agent, config.sandbox)


def _settings(
    source: str,
    config: Config,
    loop: Generate | None,
    renderer: ChatRenderer | None,
    sampler: Sampler | None,
    tools: ToolServers,
    models: OtherModels,
) -> EpisodeSettings:
    rollout, options = config.rollout, config.sampler
    sampling = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        stop=tuple(options.stop),
        seed=config.run.seed,
        experts_from=0 if config.algo.routing_replay else None,
        support=_requested_support(config),
    )
    limits = Limits(
        max_turns=rollout.max_turns,
        max_tokens=rollout.max_tokens,
        max_seconds=rollout.max_seconds,
        max_new_tokens=options.max_new_tokens,
    )
    context = EpisodeContext(
        env_factory=partial(make_any_env, config.env.name, config.env.options),
        renderer=renderer,
        sampler=sampler,
        tool_clients=tools.source_clients(source),
        limits=limits,
        sampling=sampling,
        served=tools.offered[source],
    )
    return EpisodeSettings(
        context,
        loop,
        make_grader(config.reward, source_judges(config, models.judges, renderer, sampler)),
        make_lineup(config, models.frozen),
        _load_programs(config),
    )


def _requested_support(config: Config) -> Literal["ids", "logprobs"] | None:
    """Return what engines return of the tokens that top-k and top-p leave."""
    if config.sampler.renormalise != "engine":
        return None
    return "logprobs" if config.algo.score_centering else "ids"


def _load_programs(config: Config) -> dict[str, SeatProgram]:
    """Return the programs that play agents of the environment, by agent or role."""
    programs = config.env.programs
    if not programs:
        return {}
    # The gateway's server takes a while to import.
    from agentrl.gateway.program import ProgramLauncher
    from agentrl.gateway.program_player import GatewaySeatProgram

    return {
        name: GatewaySeatProgram(program, ProgramLauncher(program, config.sandbox))
        for name, program in programs.items()
    }
