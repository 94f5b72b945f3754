"""The judge models that engines of the run serve (``judge.model``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from agentrl.clients.chat_completions import open_chat_model
from agentrl.config.judges import judge_configs, judge_sampler, time_shared_judges
from agentrl.config.rewards import POLICY, JudgeConfig
from agentrl.config.schema import Config
from agentrl.core.chat_endpoint import ChatEndpoint
from agentrl.core.sampler import Sampler
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.fleet.reserved_engines import reserved_fleet
from agentrl.inference.launch.launcher import EngineSpec, Launcher
from agentrl.models.load import read_vocab_size
from agentrl.models.resolve import resolve_model
from agentrl.render.registry import load_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.rewards.engine_judge import EngineJudge

JudgeLauncher = Callable[[str, EngineSpec], Launcher]
"""Makes what starts the engines of a judge, by ``judge.model``."""


@dataclass(frozen=True, slots=True)
class JudgeModel:
    """A model that judges, on its own engines."""

    folder: Path
    renderer: ChatRenderer
    config: JudgeConfig
    """The first judge that names it."""

    @property
    def vocabulary(self) -> Vocabulary:
        """What clients of its engines must know of its tokens."""
        return Vocabulary(read_vocab_size(self.folder), self.renderer.decode)


@dataclass(frozen=True, slots=True)
class OtherModels:
    """Models of a run next to its policy, as episodes use them."""

    frozen: Mapping[str, Sampler] = field(default_factory=lambda: MappingProxyType({}))
    """Samplers of weights that never change, by `RoleConfig.frozen`."""
    judges: Mapping[str, ChatEndpoint] = field(default_factory=lambda: MappingProxyType({}))
    """By ``judge.model``."""


def resolve_judges(config: Config, *, fetch: bool = True) -> dict[str, Path]:
    """Return the folders of the judges with their own engines, by ``judge.model``.

    Raises:
        MissingError: ``fetch`` is False and a model would have to be downloaded.
        ModelError: a model does not exist; the message names the key.
    """
    folders: dict[str, Path] = {}
    for source_name, source in config.by_source().items():
        prefix = f"sources.{source_name}." if source_name else ""
        for name, term in source.reward.by_name.items():
            model = None if term.judge is None else term.judge.model
            if model is not None and model != POLICY and model not in folders:
                folders[model] = resolve_model(
                    model, f"{prefix}{source.reward.section_key(name)}.judge.model", fetch=fetch
                )
    return folders


async def check_judge_endpoints(config: Config) -> None:
    """Request one token of each judge at an endpoint, so that a wrong address, key or model is named before anything is sampled.

    Raises:
        ConfigError: an endpoint refuses the request, or does not answer; the message has the key to change.
    """
    for source in config.by_source().values():
        for name, term in source.reward.by_name.items():
            if term.judge is not None and term.judge.endpoint is not None:
                judge = open_chat_model(term.judge.endpoint, f"{source.reward.section_key(name)}.judge.endpoint")
                await judge.check([(term.judge.temperature, 1.0, -1)])


def open_judge_models(config: Config) -> dict[str, JudgeModel]:
    """Return the judges with their own engines, by ``judge.model``. Their chat format is that of their tokenizer."""
    trusted, judges = config.model.trust_remote_code, judge_configs(config)
    return {
        name: JudgeModel(folder, load_renderer(folder, trust_remote_code=trusted), judges[name])
        for name, folder in resolve_judges(config).items()
    }


def judge_fleets(
    config: Config,
    models: Mapping[str, JudgeModel],
    logs: Path,
    first: int,
    launcher: JudgeLauncher | None = None,
) -> dict[str, Fleet]:
    """Return the engines of judges, not started, by ``judge.model``.

    Args:
        config: of the run.
        models: of `open_judge_models`.
        logs: folder of the run's logs.
        first: number of the first engine among those that are reserved.
        launcher: makes what starts the engines; by default on this machine.
    """
    fleets: dict[str, Fleet] = {}
    shared = time_shared_judges(config)
    for name, model in models.items():
        folder = logs / f"judge-{len(fleets)}"
        fleets[name] = reserved_fleet(
            config,
            model.folder,
            folder,
            first,
            model.vocabulary,
            engines=model.config.engines,
            sampler=judge_sampler(config, model.config),
            launcher=None if launcher is None else partial(launcher, name),
            restores_weights=name in shared,
        )
        first += model.config.engines
    return fleets


def engine_judges(models: Mapping[str, JudgeModel], samplers: Mapping[str, Sampler]) -> dict[str, ChatEndpoint]:
    """Return the judges of a process, by ``judge.model``.

    Args:
        models: of `open_judge_models`.
        samplers: of their engines.
    """
    return {name: EngineJudge(name, model.renderer, samplers[name]) for name, model in models.items()}


def source_judges(
    config: Config, judges: Mapping[str, ChatEndpoint], renderer: ChatRenderer | None, sampler: Sampler | None
) -> dict[str, ChatEndpoint]:
    """Return the judges of a source that engines serve, by the name of their reward.

    Args:
        config: of the source.
        judges: by ``judge.model``.
        renderer: of the policy; None with a policy at an endpoint.
        sampler: of the policy, which is the judge with ``judge.model=policy``.
    """
    models: dict[str, ChatEndpoint] = {}
    for name, term in config.reward.by_name.items():
        if term.judge is None or term.judge.model is None:
            continue
        if term.judge.model != POLICY:
            models[name] = judges[term.judge.model]
        else:
            assert renderer is not None, "check_endpoint refuses it"
            assert sampler is not None, "check_endpoint refuses it"
            models[name] = EngineJudge(POLICY, renderer, sampler)
    return models
