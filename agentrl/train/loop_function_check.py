"""Generate functions of users, tried with the recorded replies of the policy in place of an engine."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from agentrl.batch.provenance import check_graded, check_rows
from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError
from agentrl.core.registry import env_class, make_any_env
from agentrl.core.types import Rollout, SamplingParams
from agentrl.data.jobs import TaskJobs
from agentrl.data.task_sources import errors_name_source, make_order, open_tasks, read_splits
from agentrl.episode.context import EpisodeContext
from agentrl.episode.custom_loop import KEY, load_generate, required_tools
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.models.resolve import resolve_model
from agentrl.render.renderer import ChatRenderer
from agentrl.rewards.grader import make_grader
from agentrl.runtime.episodes import open_renderer
from agentrl.testing import RecordedRequest, ScriptedSampler
from agentrl.train.function_report import FunctionReport, RecordedStep

_TASKS = 4
"""Tasks that are played."""


async def check_generate(config: Config, source: str, step: RecordedStep) -> FunctionReport:
    """Play some tasks of the run. Each turn is a recorded one, which may not fit the question: rewards mean nothing.

    Args:
        config: of the source, as of a run with one environment.
        source: its name in a mixed run; else empty.
        step: whose turns the policy repeats.
    """
    report = FunctionReport(f"sources.{source}.{KEY}" if source else KEY, str(config.rollout.generate))
    try:
        with errors_name_source(source):
            generate = load_generate(str(config.rollout.generate))
            tools = required_tools(config.rollout.generate, env_class(config.env.name), config.env.options)
            if tools:
                report.lines.append(
                    f"not played, as it calls tools of servers ({', '.join(tools)}), which are not started: agentrl rollout "
                    "plays it"
                )
                return report
            renderer, _ = open_renderer(config, resolve_model(config.model.path, fetch=False))
            settings = EpisodeSettings(_context(config, renderer, step), generate, make_grader(config.reward))
            runner = EpisodeRunner(
                {"": settings}, FailurePolicy(config.rollout.failure), EpisodeSlots(config.rollout.concurrency)
            )
            jobs = TaskJobs(config, make_order(config, read_splits(config, open_tasks(config))))
            rollouts = await runner.run_many(jobs.groups(range(_TASKS)), check_dropped=False)
    except AgentrlError as error:
        report.faults.append(str(error))
        return report
    report.seconds += [rollout.seconds for rollout in rollouts]
    report.lines += _describe(rollouts)
    report.lines.append(report.time("an episode, without sampling"))
    report.faults += _faults(rollouts)
    return report


def _context(config: Config, renderer: ChatRenderer, step: RecordedStep) -> EpisodeContext:
    rollout, options = config.rollout, config.sampler
    replies = [[turn.action for turn in recorded.turns] for recorded in step.rollouts if recorded.turns] or [[""]]

    def reply(request: RecordedRequest) -> str:
        turns = replies[zlib.crc32(request.session_id.encode()) % len(replies)]
        return turns[request.turn % len(turns)]

    sampler = ScriptedSampler(reply, encode=renderer.encode, end_token_id=renderer.end_token_id)
    sampling = SamplingParams(options.max_new_tokens, options.temperature, stop=tuple(options.stop), seed=0)
    limits = Limits(rollout.max_turns, rollout.max_tokens, rollout.max_seconds, options.max_new_tokens)
    env = partial(make_any_env, config.env.name, config.env.options)
    return EpisodeContext(env, renderer, sampler, {}, limits, sampling)


def _describe(rollouts: Sequence[Rollout]) -> list[str]:
    turns = [len(rollout.turns) for rollout in rollouts]
    ends: dict[str, int] = {}
    for rollout in rollouts:
        ends[rollout.stop_reason.value] = ends.get(rollout.stop_reason.value, 0) + 1
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(ends.items()))
    return [
        f"{len(rollouts)} rollouts of {_TASKS} tasks with recorded replies: {fmean(turns):.3g} turns, ends: {reasons}"
    ]


def _faults(rollouts: Sequence[Rollout]) -> list[str]:
    """Return what a run could not train on, the most frequent first."""
    faults: dict[str, int] = {}
    for rollout in rollouts:
        fault = "" if rollout.failure is None else rollout.failure.message
        try:
            check_rows(rollout.rows)
            check_graded([rollout])
        except AgentrlError as error:
            fault = fault or str(error)
        if not fault and not rollout.rows:
            fault = "the policy says nothing: call chat.sample()"
        if fault:
            faults[fault] = faults.get(fault, 0) + 1
    return [f"{count} episodes: {fault}" for fault, count in sorted(faults.items(), key=lambda item: -item[1])]
