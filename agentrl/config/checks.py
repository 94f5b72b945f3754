"""Whether ``weights.transport`` can reach the engines from where the learner is."""

from __future__ import annotations

from agentrl.config.learner import LearnerConfig
from agentrl.config.placement import PlacementConfig, engine_ranks, sampler_device
from agentrl.config.sections import SamplerConfig, WeightsConfig


def transport_fault(
    weights: WeightsConfig, placement: PlacementConfig, learner: LearnerConfig, sampler: SamplerConfig
) -> str | None:
    """Return why new weights cannot take the way that is set, or cannot be checked then, or None."""
    kind, mode = weights.transport, placement.mode
    on_gpus = sampler_device(sampler) == "cuda"
    if weights.check == "checksum" and engine_ranks(sampler) > 1:
        return "weights.check=checksum: an engine of several ranks gives checksums of parts; set weights.check=version"
    if kind not in ("ipc", "distributed"):
        return None
    if kind == "ipc":
        if mode != "colocate":
            return f"weights.transport=ipc wants learner and engines on the same GPUs: set placement.mode=colocate, not {mode}"
        if not on_gpus or learner.device == "cpu":
            return (
                "weights.transport=ipc is for GPUs, and engines or learner are on the CPU: set weights.transport=tensor"
            )
    elif mode == "colocate" and on_gpus:
        return (
            "weights.transport=distributed: NCCL wants a GPU of its own for the learner and for each engine, and "
            "placement.mode=colocate shares them; set weights.transport=ipc"
        )
    elif on_gpus and learner.device == "cpu":
        return (
            "weights.transport=distributed with learner.device=cpu: engines on GPUs get weights from a GPU only; set "
            "weights.transport=tensor or disk"
        )
    # Pipeline stages and data parallel replicas have tensor parallel ranks from 0 on again.
    if engine_ranks(sampler) != _tensor_ranks(sampler):
        return f"weights.transport={kind} reaches SGLang's tensor parallel ranks only; set weights.transport=disk"
    return None


def _tensor_ranks(sampler: SamplerConfig) -> object:
    options = {name.replace("-", "_"): value for name, value in sampler.sglang_options.items()}
    if sampler.backend != "sglang":
        return 1
    names = ("tp", "tp_size", "tensor_parallel_size")
    return next((options[name] for name in names if options.get(name) is not None), 1)
