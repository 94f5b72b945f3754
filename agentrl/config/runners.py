"""The number of processes that run a run's episodes, and what follows from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

from agentrl.config.agent import AgentConfig
from agentrl.config.schema import Config

CORES = 8
"""Cores of the machine for each runner process: engines, tools and learner need the others."""
MOST = 8
"""Runner processes of ``rollout.runners=auto``."""
LEAST_EPISODES = 512
"""Concurrent episodes from which ``auto`` takes runner processes: at some seconds a turn, they are what one process can run."""


def runner_count(config: Config, cluster_cores: int = 0) -> int:
    """Return the number of runner processes; 0: episodes run in the run's own process.

    Args:
        config: of the run.
        cluster_cores: of all machines on which runners may be started; 0: they are on this one.
    """
    if config.rollout.runners != "auto":
        return config.rollout.runners
    if agent_elsewhere(config) is not None:
        return 0  # all of its sessions are started at one port
    count = min(MOST, max(_cores(), cluster_cores) // CORES)
    return count if count > 1 and concurrent_episodes(config) >= LEAST_EPISODES else 0


def with_runner_count(config: Config, cluster_cores: int) -> Config:
    """Return a configuration with the number of runner processes in place of ``auto``; see `runner_count`."""
    rollout = config.rollout.model_copy(update={"runners": runner_count(config, cluster_cores)})
    return config.model_copy(update={"rollout": rollout})


def agent_elsewhere(config: Config) -> AgentConfig | None:
    """Return the section ``rollout.agent`` of an agent that runs elsewhere, of the run or of a source; None without one."""
    agents = (source.rollout.agent for source in config.by_source().values())
    return next((agent for agent in agents if agent.is_elsewhere), None)


def _cores() -> int:
    """Return the number of cores of this machine that the run may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_runners(config: Config, cluster_cores: int = 0) -> str:
    """Return in one line where episodes run; empty if that is the run's own process, and enough for so many episodes.

    Args:
        config: of the run.
        cluster_cores: see `runner_count`.
    """
    count, episodes = runner_count(config, cluster_cores), concurrent_episodes(config)
    if count == 0 and (config.rollout.runners == 0 or episodes < LEAST_EPISODES):
        return ""
    processes = "the run's own process" if count == 0 else f"{count} runner process{'es' if count > 1 else ''}"
    cores = f"{cluster_cores} cores of the cluster" if cluster_cores > _cores() else f"{_cores()} cores"
    why = f"{cores} and {episodes} concurrent episodes" if config.rollout.runners == "auto" else "as set"
    return f"in {processes} (rollout.runners={config.rollout.runners}: {why})"


def concurrent_episodes(config: Config) -> int:
    """Return the most episodes that run at the same time."""
    rollout = config.rollout
    groups = rollout.over_sampling_batch_size or (config.asynchronous.max_staleness + 1) * rollout.batch_size
    return min(rollout.concurrency, groups * rollout.n_samples_per_prompt)


def rollout_form(config: Config) -> Literal["jsonl", "records", "parquet"]:
    """Return the format of files of rollouts."""
    form = config.obs.rollout_format
    return form if form != "auto" else "records" if runner_count(config) else "jsonl"


def runner_faults(config: Config) -> Iterator[str]:
    """Yield a line for each fault of ``rollout.runners``."""
    runners, concurrency = config.rollout.runners, config.rollout.concurrency
    if runners != "auto" and concurrency < runners:
        yield f"rollout.runners={runners} is more than rollout.concurrency={concurrency}, and each runs an episode; lower it"
