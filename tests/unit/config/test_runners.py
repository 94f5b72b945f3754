"""``rollout.runners``: the number of processes that ``auto`` takes, and the line that says so."""

from __future__ import annotations

import os

import pytest

from agentrl.cluster.placement_layout import spreads_runners
from agentrl.config.load import load_config
from agentrl.config.runners import describe_runners, rollout_form, runner_count, with_runner_count
from agentrl.core.errors import ConfigError
from agentrl.core.imports import python_objects

LARGE = ("rollout.concurrency=512", "rollout.batch_size=64", "rollout.n_samples_per_prompt=8")


@pytest.mark.parametrize(
    ("cores", "settings", "count"),
    [
        (2, LARGE, 0),
        (15, LARGE, 0),
        (16, LARGE, 2),
        (128, LARGE, 8),
        (128, (), 0),
        (128, (*LARGE, "rollout.concurrency=511"), 0),
        (128, (*LARGE, "rollout.batch_size=63"), 0),
        (128, (*LARGE, "rollout.batch_size=32", "async.max_staleness=1"), 8),
        (128, (*LARGE, "obs.trace=true"), 8),
        (128, (*LARGE, "rollout.runners=0"), 0),
        (2, ("rollout.runners=3",), 3),
    ],
)
def test_auto_follows_cores_and_episodes(
    monkeypatch: pytest.MonkeyPatch, cores: int, settings: tuple[str, ...], count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    config = load_config(None, [*settings])
    assert runner_count(config) == count
    assert rollout_form(config) == ("records" if count else "jsonl")
    assert rollout_form(load_config(None, [*settings, "obs.rollout_format=parquet"])) == "parquet"


@pytest.mark.parametrize(
    ("cores", "settings", "line"),
    [
        (2, (), ""),
        (2, ("rollout.runners=1",), "in 1 runner process (rollout.runners=1: as set)"),
        (2, (*LARGE, "rollout.runners=0"), ""),
        (2, LARGE, "in the run's own process (rollout.runners=auto: 2 cores and 512 concurrent episodes)"),
        (16, LARGE, "in 2 runner processes (rollout.runners=auto: 16 cores and 512 concurrent episodes)"),
    ],
)
def test_a_line_says_what_auto_has_chosen(
    monkeypatch: pytest.MonkeyPatch, cores: int, settings: tuple[str, ...], line: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert describe_runners(load_config(None, [*settings])) == line


@pytest.mark.parametrize(
    ("cores", "cluster_cores", "settings", "count"),
    [(2, 64, LARGE, 8), (2, 15, LARGE, 0), (2, 24, LARGE, 3), (32, 24, LARGE, 4), (2, 64, (), 0),
     (2, 64, (*LARGE, "rollout.runners=1"), 1)],
)  # fmt: skip
def test_auto_counts_the_cores_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch, cores: int, cluster_cores: int, settings: tuple[str, ...], count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    config = load_config(None, [*settings])
    resolved = with_runner_count(config, cluster_cores)
    assert (runner_count(config, cluster_cores), resolved.rollout.runners) == (count, count)
    assert runner_count(resolved) == count, "whatever machine it is read on"
    assert spreads_runners(config, cluster_cores) == (count > 0)


def test_a_line_says_how_many_cores_the_cluster_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    line = "in 8 runner processes (rollout.runners=auto: 64 cores of the cluster and 512 concurrent episodes)"
    assert describe_runners(load_config(None, [*LARGE]), 64) == line


def test_objects_of_this_process_and_the_routers_program_keep_episodes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    config = load_config(None, [*LARGE])
    with python_objects({"reward.function": min}):
        assert not spreads_runners(config, 64)
    assert spreads_runners(config, 64)
    assert not spreads_runners(load_config(None, [*LARGE, "sampler.backend=sglang", "sampler.router=sglang"]), 64)


def test_a_runner_without_an_episode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.runners=2 is more than rollout\.concurrency=1"):
        load_config(None, ["rollout.runners=2", "rollout.concurrency=1"])
