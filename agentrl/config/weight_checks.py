"""Checks of weight sync, across sections: transport, adapters, and the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.schema import Config


def check_weight_sync(config: Config) -> Iterator[str]:
    """Yield what does not fit together."""
    yield from _weights(config)
    yield from _adapters(config)


def _weights(config: Config) -> Iterator[str]:
    """Whether ``weights.transport`` reaches the engines from the learner, and what may be checked afterwards."""
    sampler, weights, mode = config.sampler, config.weights, config.placement.mode
    kind, on_gpus = weights.transport, sampler.device == "cuda"
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
    elif weights.pause == "in_place" and weights.adapters == "merged" and sampler.backend == "sglang":
        yield (
            "weights.pause=in_place with weights.prefix_cache=drop: SGLang cannot drop its cache while it keeps requests; "
            "set weights.prefix_cache=by_version"
        )
    if kind == "ipc" and mode != "colocate":
        yield (
            f"weights.transport=ipc needs learner and engines on the same GPUs: set placement.mode=colocate, not {mode}"
        )
    elif kind == "delta" and mode == "colocate":
        yield (
            "weights.transport=delta with placement.mode=colocate: engines release the weights that changes are to; set "
            "weights.transport=tensor, or ipc on GPUs"
        )
    elif kind == "ipc" and (not on_gpus or config.learner.device == "cpu"):
        yield "weights.transport=ipc is for GPUs, and engines or learner are on the CPU: set weights.transport=tensor"
    elif kind == "distributed" and mode == "colocate" and on_gpus:
        yield (
            "weights.transport=distributed: NCCL needs separate GPUs for the learner and each engine, and "
            "placement.mode=colocate shares them; set weights.transport=ipc"
        )
    elif kind == "distributed" and on_gpus and config.learner.device == "cpu":
        yield (
            "weights.transport=distributed with learner.device=cpu: engines on GPUs receive weights from a GPU only; set "
            "weights.transport=tensor or disk"
        )
    # Pipeline stages and data parallel replicas number their tensor parallel ranks from 0 again.
    elif kind in ("ipc", "distributed") and sampler.engine_ranks != sampler.tensor_ranks:
        yield f"weights.transport={kind} reaches SGLang's tensor parallel ranks only; set weights.transport=disk"


def _prefix_cache(config: Config) -> Iterator[str]:
    """Whether the engines can keep their prefix cache at a sync."""
    key = f"weights.prefix_cache={config.weights.prefix_cache}"
    if config.placement.mode == "colocate":
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
    if config.placement.mode == "colocate":
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
