"""Evaluation of a policy with engines and tool servers of the evaluation: ``agentrl eval``."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from agentrl.config.engine_groups import saved_policy_sampler
from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError, ConfigError, RunStopped
from agentrl.core.types import Rollout
from agentrl.data.task_sources import NoTasks, TaskSources, open_tasks
from agentrl.episode.runner import GroupRunner
from agentrl.evaluation.evaluate import OnDone, SetResult, evaluate, finished_results, flat_metrics
from agentrl.evaluation.own_function import call_evaluation, load_evaluation, make_policy
from agentrl.evaluation.saved_samples import SavedSamples
from agentrl.evaluation.sets import EvalTasks, load_eval_tasks
from agentrl.evaluation.table import results_table
from agentrl.inference.base import EngineControl
from agentrl.models.resolve import resolve_model
from agentrl.obs.progress import EpisodeProgress
from agentrl.obs.watchdog import Watchdog
from agentrl.runtime.checks import check_engine, check_episodes
from agentrl.runtime.endpoint_services import EndpointServices, check_endpoint, open_endpoint
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.run_tools import check_tools
from agentrl.runtime.services import Services, open_services
from agentrl.self_play.game_scores import open_game_scores
from agentrl.weight_sync.adapter import for_adapters, load_adapters


@asynccontextmanager
async def open_saved(config: Config, tasks: TaskSources, model: Path, folder: Path) -> AsyncIterator[Services]:
    """Start the services of the policy in ``model``; several policies are read from the checkpoint that it is in.

    Raises:
        ConfigError, ModelError: the checkpoint has not all policies that ``env.roles`` names, or one is damaged.
        EngineError, ToolServerError: see `open_services`.
    """
    names, policies = config.env.policies, model.parent / "policies"
    for name in names:
        if not (policies / name).is_dir():
            raise ConfigError(
                f"env.roles names the policies {', '.join(names)}, and model.path={model} is not of a checkpoint with them: "
                f"there is no {policies / name}"
            )

    async def load(engine: EngineControl) -> int:
        await load_adapters(engine, policies, names, 0)
        return 0

    if names:
        config = await asyncio.to_thread(for_adapters, config, model)
    config = config.model_copy(update={"sampler": saved_policy_sampler(config.sampler)})
    async with open_services(config, tasks, model, folder, config.run.seed) as services:
        if names:
            services.fleet.set_weight_sync(load)
            await asyncio.gather(*(load(engine) for engine in services.fleet.live))
        yield services


def open_policy(
    config: Config, tasks: TaskSources, folder: Path
) -> AbstractAsyncContextManager[Services | EndpointServices]:
    """Start what the episodes of a policy need: the services of ``model.path``, or a model at ``model.endpoint``.

    Raises:
        AgentrlError: see `open_saved` and `open_endpoint`.
    """
    if config.model.endpoint is not None:
        return open_endpoint(config, tasks, folder)
    return open_saved(config, tasks, resolve_model(config.model.path), folder)


async def evaluate_policy(
    config: Config, console: Console, samples: Path | None = None, *, resume: bool = False
) -> tuple[list[SetResult], dict[str, float]]:
    """Start engines and tool servers, evaluate, and return the results by set, and further metrics: the exploitability in a game
    with a tree, requests and tokens of a model at an endpoint.

    Args:
        config: of the evaluation.
        console: progress is printed to it, and what an interrupted evaluation has.
        samples: a ``.jsonl`` or ``.parquet`` file for the rollouts. Each is written when it ends, so that an interrupted
            evaluation leaves the finished ones, as JSON lines.
        resume: play only the episodes that ``samples`` lacks. The results are of all.

    Raises:
        ConfigError: there is nothing to evaluate on, or the configuration does not fit, or not the samples.
        EngineError: an engine failed.
        RunStopped: Ctrl-C or the failure policy ended it.
    """
    tasks = open_eval_tasks(config)
    sets = await asyncio.to_thread(check_eval, config, tasks)
    if resume and config.eval.function is not None:
        raise ConfigError(
            f"--resume with eval.function={config.eval.function}: it is not known which episodes it plays"
        )
    episodes = sum(eval_set.episodes for eval_set in sets)
    saved = None if samples is None else await asyncio.to_thread(SavedSamples, samples, config, sets, resume=resume)
    file, played = (None, {}) if saved is None else (saved.file, saved.finished)
    finished = [rollout for rollouts in played.values() for rollout in rollouts]
    with (
        EpisodeProgress(console, episodes) as count,
        Interrupt(count.print_text) as interrupt,
        tempfile.TemporaryDirectory(prefix="agentrl-eval-") as folder,
    ):

        def done(rollout: Rollout) -> None:
            if file is not None:
                file.write(rollout)
            finished.append(rollout)
            count.add()

        async with AsyncExitStack() as exits:
            async with interrupt.guard():
                services = await exits.enter_async_context(open_policy(config, tasks, Path(folder)))
            count.begin()
            if played:
                count.print_text(f"resuming: {len(played)} of {episodes} episodes are in {samples}")
            for _ in finished:
                count.add()
            if isinstance(services, Services) and services.agents_line:
                count.print_text(services.agents_line)
            with Watchdog(config.obs.stall_warning_s, count.print_text):
                try:
                    async with interrupt.guard_episodes(services.check):
                        results, own_metrics = await _evaluate(config, sets, services.runner(), done, played)
                        metrics = own_metrics | await _further_metrics(services)
                except (AgentrlError, OSError) as error:
                    is_stop = isinstance(error, RunStopped)
                    if finished and is_stop:
                        title = f"{config.label}: {config.model.label}, {len(finished)} of {episodes} rollouts"
                        console.print(results_table(finished_results(sets, finished), title))
                    advice = "; with --rollouts FILE they are kept" if file is None else f"; they are in {file.lines}"
                    if samples is not None:
                        advice += ". The same command with --resume plays the others"
                    text = f"{len(finished)} of {episodes} rollouts were finished{advice}"
                    if is_stop:
                        raise RunStopped(f"{error}. {text}") from error
                    count.print_text(text)
                    raise
    if file is not None:
        file.finish()
    return results, metrics


async def _evaluate(
    config: Config,
    sets: Sequence[EvalTasks],
    runner: GroupRunner,
    done: OnDone,
    played: Mapping[str, Sequence[Rollout]],
) -> tuple[list[SetResult], dict[str, float]]:
    """Return the results of the sets, and the metrics of ``eval.function``."""
    function = load_evaluation(config.eval)
    if function is None:
        return await evaluate(sets, runner, done, played), {}
    policy = make_policy(config, None, sets, runner, done)
    metrics = await call_evaluation(function, str(config.eval.function), policy, lambda: flat_metrics(policy.results))
    return policy.results, metrics


async def _further_metrics(services: Services | EndpointServices) -> dict[str, float]:
    if isinstance(services, EndpointServices):
        counters, usage = services.endpoint.client.counters, services.endpoint.usage
        return {f"eval/endpoint/{name}": float(value) for name, value in (asdict(counters) | asdict(usage)).items()}
    scores = open_game_scores(services.config, services.renderer, services.fleet.vocabulary.size)
    return {} if scores is None else scores.metrics(await scores.score_strategy(services.fleet))


def open_eval_tasks(config: Config) -> TaskSources:
    """Return the configured tasksets, or an empty one if every set has a file and the configuration names no taskset."""
    files = all(plan.path is not None for plan in config.eval.named_sets(config.sources).values())
    if files and not config.sources and config.tasks.name is None and config.data.path is None:
        return {"": NoTasks()}
    return open_tasks(config)


def check_eval(config: Config, tasks: TaskSources) -> list[EvalTasks]:
    """Check everything about an evaluation that needs no server, and return its sets.

    Raises:
        UserError: with the value and the key to change.
    """
    check_episodes(config)
    check_tools(config)
    check_policy(config)
    sets = load_eval_tasks(config, tasks)
    load_evaluation(config.eval)
    if not sets and config.eval.function is None:
        raise ConfigError("there is nothing to evaluate on: set data.eval_path, eval.path, eval.split or eval.sets")
    return sets


def check_policy(config: Config) -> None:
    """Check that the policy can be sampled here: by an engine, or at an endpoint.

    Raises:
        UserError: it cannot; the message has the value and the key to change.
    """
    if config.model.endpoint is not None:
        check_endpoint(config)
    else:
        check_engine(config)
