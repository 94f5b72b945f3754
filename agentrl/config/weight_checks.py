"""Checks of weight sync, across sections: adapters, pauses and the prefix cache.

A transport checks the configuration itself: `agentrl.weight_sync.base.Transport.faults`.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.schema import Config


def check_weight_sync(config: Config) -> Iterator[str]:
    """Yield what does not fit together."""
    yield from _weights(config)
    yield from _adapters(config)


def _weights(config: Config) -> Iterator[str]:
    """Whether old weights are corrected for, and what may be checked after a sync."""
    sampler, weights = config.sampler, config.weights
    uncorrected = config.algo.old_logprobs == "learner" and config.algo.correction.rollout_is == "none"
    if weights.sync_every > 1 and uncorrected:
        yield (
            f"algo.old_logprobs=learner with weights.sync_every={weights.sync_every}: engines sample with older weights than the "
            "learner's, and nothing corrects for it; set algo.correction.rollout_is=token, or algo.old_logprobs=sampler"
        )
    if weights.check == "checksum" and sampler.engine_ranks > 1:
        yield (
            "weights.check=checksum: an engine with several ranks has checksums of shards only; set weights.check=version"
        )
    if weights.prefix_cache != "drop":
        yield from _prefix_cache(config)
    elif weights.pause == "in_place" and weights.adapters == "merged" and sampler.kind.keeps_cache_in_place:
        yield (
            "weights.pause=in_place with weights.prefix_cache=drop: SGLang cannot drop its cache while it keeps requests; "
            "set weights.prefix_cache=by_version"
        )


def _prefix_cache(config: Config) -> Iterator[str]:
    """Whether the engines can keep their prefix cache at a sync."""
    key = f"weights.prefix_cache={config.weights.prefix_cache}"
    if config.placement.shares_gpus:
        yield f"{key} with placement.mode=colocate: engines release the memory of their cache; leave out weights.prefix_cache"
    if config.weights.adapters == "only":
        yield f"{key} with weights.adapters=only: each version is an adapter with its cache; leave out weights.prefix_cache"
    if config.weights.prefix_cache == "by_version" and config.sampler.router == "sglang":
        yield f"{key} with sampler.router=sglang: requests through it have no key of their version; set sampler.router=builtin"


def _adapters(config: Config) -> Iterator[str]:
    """Whether the engines can hold the base model and take adapters."""
    sampler, key = config.sampler, "weights.adapters=only"
    if config.weights.adapters != "only":
        return
    if config.learner.lora is None:
        yield f"{key} without learner.lora: no adapters are trained; set learner.lora={{}}, or leave out weights.adapters"
    if sampler.router == "sglang":
        yield (
            f"{key} with sampler.router=sglang: requests name the adapter of an engine, and the router chooses the engine; set "
            "sampler.router=builtin"
        )
    if config.placement.shares_gpus:
        yield (
            f"{key} with placement.mode=colocate: engines that release their memory lose the base model; set "
            "weights.adapters=merged"
        )
    if config.weights.transport != "tensor":
        yield (
            f"{key} with weights.transport={config.weights.transport}: adapters are sent in the request; leave out "
            "weights.transport"
        )
    if "dummy" in (sampler.sglang.get("load_format"), sampler.sglang.get("load-format")):
        yield f"{key} with sampler.sglang.load_format=dummy: engines keep the weights that they start with; leave it out"
    if sampler.engine_ranks != sampler.tensor_ranks:
        yield f"{key} reaches SGLang's tensor parallel ranks only; set weights.adapters=merged"
