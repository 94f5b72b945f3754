"""Engines next to those of training: for snapshots of self-play, frozen roles and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl.config.engine_groups import saved_policy_sampler, training_engines
from agentrl.config.sampler import SamplerConfig
from agentrl.config.schema import Config
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.launch.launcher import EngineSpec, Launcher, LocalLauncher
from agentrl.models.reference_policy import resolve_frozen


def reserved_fleet(  # engines of other models differ in all of it
    config: Config,
    model: Path,
    logs: Path,
    number: int,
    vocabulary: Vocabulary,
    *,
    engines: int = 1,
    sampler: SamplerConfig | None = None,
    launcher: Callable[[EngineSpec], Launcher] | None = None,
    restores_weights: bool = False,
    overrides: Mapping[str, object] | None = None,
    first_gpu: int | None = None,
    group: str = "",
) -> Fleet:
    """Return a fleet, not started, whose GPUs come after those of the policy's engines and of teachers.

    Args:
        config: of the run.
        model: folder of the weights that the engine starts with.
        logs: folder of its logs, which is created.
        number: of the first engine among those that are reserved, from 0.
        vocabulary: of the model.
        engines: of the fleet.
        sampler: its options; None: those of the run.
        launcher: makes what starts the engines, wherever it places them; None: on this machine.
        restores_weights: see `EngineSpec.restores_weights`.
        overrides: see `EngineSpec.overrides`.
        first_gpu: see `LocalLauncher`.
        group: name of the engines in metrics; see `Fleet`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    sampler = (sampler or config.sampler).model_copy(
        update={"engines": engines, "url": None, "port": 0, "router": "builtin", "keep_minutes": None, "groups": {}}
    )
    trusted = config.model.trust_remote_code
    spec = EngineSpec(
        sampler, model, logs, config.run.seed, trusted, restores_weights=restores_weights, overrides=overrides
    )
    first = training_engines(config.sampler) + len(config.algo.distillation.teachers) + number
    return Fleet(
        sampler,
        LocalLauncher(spec, first, first_gpu) if launcher is None else launcher(spec),
        logs,
        vocabulary=vocabulary,
        max_tokens=config.max_tokens,
        restores_weights=restores_weights,
        group=group,
    )


def frozen_fleets(config: Config, logs: Path, vocabulary: Vocabulary) -> dict[str, Fleet]:
    """Return the engines of frozen roles, not started, by `RoleConfig.frozen`.

    Raises:
        ModelError: a model does not exist; the message names the key.
    """
    sampler = saved_policy_sampler(config.sampler)
    return {
        name: reserved_fleet(config, folder, logs / f"frozen-{number}", number, vocabulary, sampler=sampler)
        for number, (name, folder) in enumerate(resolve_frozen(config).items())
    }
