"""Opens the rollout source of a training run: sampling with engines and tool servers, or a replay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agentrl.cluster.ray_address import learner_device
from agentrl.config.schema import Config
from agentrl.data.jobs import TaskJobs
from agentrl.data.task_sources import open_tasks, order_of, read_splits
from agentrl.evaluation.sets import load_eval_tasks
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.launch.launcher import EngineSpec, Launcher
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.services import open_services
from agentrl.self_play.game_scores import open_game_scores
from agentrl.self_play.training import open_self_play
from agentrl.train.evaluator import Evaluator, open_eval_engines
from agentrl.train.pipeline.records import RunRecords
from agentrl.train.replay import RecordedRollouts, Replay, sample_check
from agentrl.train.rollout_source import RolloutSource
from agentrl.train.sampling import Sampling
from agentrl.weight_sync.adapter import AdapterSync, for_adapters
from agentrl.weight_sync.base import WeightSync
from agentrl.weight_sync.registry import bucket_bytes_of, for_transport, make_sync


async def open_sampling(
    config: Config,
    folder: Path,
    model: Path,
    exits: AsyncExitStack,
    interrupt: Interrupt,
    *,
    launcher: Callable[[EngineSpec], Launcher],
    check_learner: Callable[[], None],
    resume_after: int | None,
    state: Mapping[str, Any],
) -> Sampling:
    """Start engines and tool servers, which ``exits`` ends, and return their rollout source.

    Args:
        config: of the run.
        folder: of the run.
        model: loaded by engines and tokenizer.
        exits: gets what ends the services.
        interrupt: ends sampling.
        launcher: starts the engines.
        check_learner: raises if a process of the learner was lost.
        resume_after: rollouts recorded after this step are deleted; None keeps all.
        state: of the trainer in the checkpoint, or of a new run; see `agentrl.train.trainer.Trainer.state`.

    """
    tasks = open_tasks(config)
    config = for_transport(await asyncio.to_thread(for_adapters, config, model))
    opening = open_services(config, tasks, model, folder, config.run.seed, launcher=launcher)
    services = await exits.enter_async_context(opening)
    services.check_learner = check_learner
    dtype = await _sent_dtype(config, services.fleet)
    if config.placement.mode == "colocate":  # the learner loads next
        await asyncio.gather(*(engine.memory.release() for engine in services.fleet.live))
    sync = _weight_sync(config, folder, config.weights.transport, dtype)
    exits.push_async_callback(sync.aclose)
    records = RunRecords.of_run(config, folder, state, resume_after)
    evaluator = Evaluator(config, services, load_eval_tasks(config, tasks), records.recorder, interrupt)
    evaluator.game_scores = open_game_scores(config, services.renderer, services.fleet.vocabulary.size)
    eval_sync = _weight_sync(config, folder, config.weights.transport, dtype)
    evaluator.engines = await open_eval_engines(config, folder, model, services, eval_sync, exits)
    evaluator.self_play = await open_self_play(
        config, folder, model, services.fleet.vocabulary, exits, dtype, resume_after
    )
    if evaluator.self_play is not None:
        services.reserved += evaluator.self_play.engines.fleets
        untaken = {group.position: group.opponent for group in records.journal.untaken}
        evaluator.self_play.restore(state["source"].get("self_play"), untaken)
    source = Sampling(
        config=config,
        services=services,
        tasks=TaskJobs(config, order_of(config, read_splits(config, tasks))),
        sync=sync,
        records=records,
        interrupt=interrupt,
        evaluator=evaluator,
        # An offloaded learner has no GPU memory that an engine could open.
        restart_sync=_weight_sync(config, folder, "tensor", dtype) if config.weights.transport == "ipc" else None,
        self_play=evaluator.self_play,
    )
    await source.open()
    exits.push_async_callback(source.aclose)
    if state["source"]:
        source.tasks.buffer.load_state(state["source"]["data"])
    return source


def open_replay(config: Config, path: Path, model: Path, interrupt: Interrupt) -> RolloutSource:
    """Return the rollout source of recorded rollouts, which are checked against the tokenizer of ``model``."""
    recorded = RecordedRollouts(path, config.rollout.batch_size)
    return Replay(config, recorded, sample_check(config, model), interrupt)


async def _sent_dtype(config: Config, fleet: Fleet) -> str | None:
    """Return the dtype in which weights are sent; None for the learner's."""
    if config.weights.dtype != "auto":
        return config.weights.dtype
    held = set(await asyncio.gather(*(engine.dtype() for engine in fleet.live)))
    return held.pop() if len(held) == 1 else None


def _weight_sync(config: Config, folder: Path, transport: str, dtype: str | None) -> WeightSync:
    if config.learner.lora is not None and config.weights.adapters == "only":
        return AdapterSync(config.learner.lora, dtype=dtype, check=config.weights.check)
    gpus = config.sampler.device == learner_device(config.learner) == "cuda"
    return make_sync(
        transport,
        bucket_bytes=bucket_bytes_of(transport, config.weights.bucket_mib),
        folder=folder / "weights",
        dtype=dtype,
        check=config.weights.check,
        backend="nccl" if gpus else "gloo",
        timeout_s=config.sampler.request_timeout_s,
    )
