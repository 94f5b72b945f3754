"""The knobs of `agentrl tune`: keys that change how fast a run is, and not what it learns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.algo.registry import needs_critic
from agentrl.config.engine_groups import training_engines
from agentrl.config.runners import concurrent_episodes, runner_count
from agentrl.config.schema import Config
from agentrl.tune.search import Knob, Settings

_DRAFTS = (4, 8)
"""Tokens that a forward pass verifies for each request, the first of which is no draft."""
_LEAST_TOKENS = 1024
_MOST_FRACTION = 0.9
_ROLLOUT = ("rollout",)
_LEARNER = ("train", "score")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the trials run on."""

    cores: int
    gpus: int

    @classmethod
    def here(cls) -> Machine:
        """Return this machine."""
        import torch

        return cls(len(os.sched_getaffinity(0)), torch.cuda.device_count())


def knobs(config: Config, machine: Machine) -> Iterator[Knob]:
    """Yield the knobs of a configuration. While the engines sample during training, no phase says what a knob can gain."""
    overlaps = config.asynchronous.max_staleness > 0
    rollout, learner = ((), ()) if overlaps else (_ROLLOUT, _LEARNER)
    hot_episodes = not overlaps and not runner_count(config)
    yield Knob("rollout.concurrency", _concurrency, rollout, restarts=not hot_episodes)
    yield Knob("batch.tokens_per_micro", _micro_batches, learner, restarts=False)
    if config.learner.device == "cuda":
        yield Knob("learner.recompute", _recomputation, learner)
    if machine.gpus > 1 and _total_gpus(config):
        yield Knob("GPUs of learner and engines", _gpu_split)
    if overlaps:
        yield Knob("async.streaming", _streaming)
    if not config.sampler.urls:
        yield from _engine_knobs(config, machine, rollout)
    if machine.cores >= _CORES_A_RUNNER:
        yield Knob("rollout.runners", lambda config: _runners(config, machine), rollout)


def _engine_knobs(config: Config, machine: Machine, rollout: tuple[str, ...]) -> Iterator[Knob]:
    sampler = config.sampler
    if not sampler.uses_sglang:
        yield Knob("sampler.embedded.threads", lambda config: _threads(config, machine), rollout)
    elif sampler.device == "cuda":
        if machine.gpus == 1 and config.placement.mode == "separate" and sampler.memory_share and not sampler.groups:
            yield Knob("engines on the GPU", _engines_on_the_gpu, rollout)
        yield Knob("speculative decoding", _speculation, rollout)
        yield Knob("CUDA graphs", _cuda_graphs, rollout)
        if sampler.memory_share is not None:
            yield Knob("sampler.sglang.mem_fraction_static", _memory_fraction, rollout)


Directions = Sequence[Sequence[Settings]]


def _values(key: str, *directions: Sequence[object]) -> Directions:
    return [[{key: value} for value in values] for values in directions]


def _concurrency(config: Config) -> Directions:
    """Episodes at the same time: more keep the engines busy until they are all at once, fewer spare the KV cache."""
    episodes, rollout = concurrent_episodes(config), config.rollout
    most = rollout.batch_size * rollout.n_samples_per_prompt
    if not config.sampler.uses_sglang:
        most = min(most, config.sampler.embedded.slots * config.sampler.engines)
    more = sorted({min(factor * episodes, most) for factor in (2, 4)} - {episodes}) if episodes < most else []
    return _values("rollout.concurrency", more, [episodes // factor for factor in (2, 4) if episodes // factor])


def _micro_batches(config: Config) -> Directions:
    tokens = config.batch.micro_tokens
    fewer = [tokens // factor for factor in (2, 4) if tokens // factor >= _LEAST_TOKENS]
    return _values("batch.tokens_per_micro", [2 * tokens, 4 * tokens], fewer)


def _recomputation(config: Config) -> Directions:
    faster: Mapping[str, Sequence[str]] = {"full": ("selective", "none"), "selective": ("none",)}
    return _values("learner.recompute", faster.get(config.learner.recompute, ()))


def _streaming(config: Config) -> Directions:
    return _values("async.streaming", [not config.asynchronous.streaming])


def _runners(config: Config, machine: Machine) -> Directions:
    running = runner_count(config)
    more = [count for count in (2, 4, 8) if running < count <= machine.cores // _CORES_A_RUNNER]
    return _values("rollout.runners", more, [0] if running else [])


_CORES_A_RUNNER = 4


def _threads(config: Config, machine: Machine) -> Directions:
    threads = config.sampler.embedded.threads
    more = [count for count in (2 * threads, 4 * threads) if count <= machine.cores]
    return _values("sampler.embedded.threads", more, [threads // 2] if threads > 1 else [])


def _requests(config: Config) -> int:
    """Return the most requests of an engine, a multiple of 8."""
    episodes = -(-concurrent_episodes(config) // training_engines(config.sampler))
    return -(-episodes // 8) * 8


def _speculation(config: Config) -> Directions:
    """Without speculation: n-gram drafts, which need no draft model. With it: deeper drafts, shallower ones, none."""
    sampler, key = config.sampler, "sampler.sglang.speculative_"
    if (algorithm := sampler.speculative_algorithm) is None:
        drafts: dict[str, Any] = {f"{key}algorithm": "NGRAM", f"{key}ngram_max_bfs_breadth": 1}
        if sampler.sglang_option("max_running_requests") is None:  # SGLang would run 48
            drafts["sampler.sglang.max_running_requests"] = _requests(config)
        return [[{**drafts, f"{key}num_draft_tokens": count} for count in _DRAFTS]]
    off = [{f"{key}algorithm": None}]
    count = sampler.sglang_option("speculative_num_draft_tokens")
    if not isinstance(count, int):
        return [off]
    if algorithm == "NGRAM":
        return [*_values(f"{key}num_draft_tokens", [2 * count], [count // 2] if count > 3 else []), off]
    if sampler.sglang_option("speculative_eagle_topk", 1) != 1:
        return [off]
    depths = [[depth for depth in direction if depth] for direction in ([count + 1, count + 3], [count - 2])]
    chains = [
        [{f"{key}num_steps": depth, f"{key}num_draft_tokens": depth + 1} for depth in direction] for direction in depths
    ]
    return [*chains, off]


def _cuda_graphs(config: Config) -> Directions:
    """CUDA graphs for as many requests as an engine has; SGLang by itself may capture fewer, or more than are used."""
    sampler, names = config.sampler, ("cuda_graph_max_bs_decode", "cuda_graph_max_bs")
    name = next((name for name in names if sampler.sglang_option(name) is not None), names[1])
    requests = _requests(config)
    return _values(f"sampler.sglang.{name}", [requests] if sampler.sglang_option(name) != requests else [])


def _engines_on_the_gpu(config: Config) -> Directions:
    """Engines that divide the memory of those of now: a small model leaves the GPU idle while an engine's process is busy."""
    sampler = config.sampler
    fraction, tokens = sampler.memory_share, sampler.sglang_option("max_total_tokens")
    assert fraction is not None, "only an option that is set is divided"

    def share_memory(engines: int) -> Settings:
        settings: dict[str, Any] = {
            "sampler.engines": engines,
            "sampler.sglang.mem_fraction_static": round(fraction * sampler.engines / engines, 3),
        }
        if isinstance(tokens, int):
            settings["sampler.sglang.max_total_tokens"] = tokens * sampler.engines // engines
        return settings

    more = [share_memory(sampler.engines + extra) for extra in (1, 2)]
    return [more, [share_memory(sampler.engines - 1)] if sampler.engines > 1 else []]


def _memory_fraction(config: Config) -> Directions:
    fraction = config.sampler.memory_share
    assert fraction is not None, "only an option that is set is a knob"
    more = [round(fraction + step, 2) for step in (0.1, 0.2) if fraction + step <= _MOST_FRACTION + 1e-9]
    return _values("sampler.sglang.mem_fraction_static", more)


def _total_gpus(config: Config) -> int:
    """Return the GPUs of learner and engines, if they can be split otherwise; else 0."""
    sampler = config.sampler
    if (
        config.learner.device != "cuda"
        or sampler.device != "cuda"
        or sampler.urls
        or needs_critic(config.algo)
        or sampler.groups
    ):
        return 0
    engine_gpus = sampler.engines * sampler.engine_ranks
    return (
        max(config.learner.ranks, engine_gpus) if config.placement.shares_gpus else config.learner.ranks + engine_gpus
    )


def _gpu_split(config: Config) -> Directions:
    """One engine more, one less, and all GPUs for both by time sharing; of shared GPUs, half for each."""
    sampler, total, size = config.sampler, _total_gpus(config), config.sampler.engine_ranks

    def split(engines: int, *, shared: bool) -> Settings:
        settings: dict[str, Any] = {
            "learner.ranks": total if shared else total - engines * size,
            "sampler.engines": engines,
        }
        if shared != config.placement.shares_gpus:
            settings |= {"placement.mode": "colocate" if shared else "disaggregate"}
            settings |= {"weights.transport": "ipc" if shared else "distributed"}
        return settings

    if config.placement.shares_gpus:
        engines = total // 2 // size
        return [[split(engines, shared=False)]] if engines else []
    more = [split(sampler.engines + extra, shared=False) for extra in (1, 2)]
    fewer = [split(sampler.engines - less, shared=False) for less in (1, 2) if sampler.engines > less]
    directions = [[settings for settings in more if settings["learner.ranks"] > 0], fewer]
    if not config.asynchronous.max_staleness and total % size == 0:
        directions.append([split(total // size, shared=True)])
    return directions
