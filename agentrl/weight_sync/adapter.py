"""Weight sync of LoRA adapters alone: the engines keep the base model's weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from agentrl.config.learner import LoraConfig
from agentrl.config.sampler import SamplerConfig
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, LearnerError
from agentrl.inference.base import EngineControl, LoraAdapter
from agentrl.learner.base import LearnerGroup
from agentrl.models.peft_folder import last_names, layer_names, peft_config, read_peft, write_peft
from agentrl.models.weight_checksum import fingerprint, raw_bytes
from agentrl.weight_sync.base import SyncedWeights, WeightSync
from agentrl.weight_sync.engines import call_all, check_version

_FUSED_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang computes as one."""
_ADAPTERS_PER_POLICY = 2
"""Adapters of a policy that an engine holds on its device: the newest, and an earlier one of requests that a pause kept."""


class AdapterSync(WeightSync):
    """Sends the adapters of all policies in bodies of requests. Each version is an adapter of the engines, which requests name.

    Args:
        config: of the adapters.
        dtype: they are cast to it before they are sent; None keeps the learner's float32.
        check: ``none``; ``version``, the engines' versions afterwards; ``checksum``, also each engine's own comparison of
            what it received with SHA-256 sums.
    """

    def __init__(self, config: LoraConfig, *, dtype: str | None = None, check: str = "version") -> None:
        self._config = config
        self._dtype = dtype
        self._check = check

    @override
    async def aclose(self) -> None:
        """Do nothing: no resources are kept between updates."""

    @override
    async def sync_weights(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int
    ) -> SyncedWeights:
        """Sync the adapters.

        Raises:
            ConfigError: SGLang cannot compute adapters of these layers.
            LearnerError: the learner has no adapters.
            EngineError: an engine refused them, died or did not answer in time, or has another version afterwards.
        """
        adapters = await asyncio.to_thread(self._adapters, learner)

        async def send(engine: EngineControl) -> None:
            ranks = await engine.groups.ranks()
            await engine.updates.from_adapters(
                {policy: replace(adapter, ranks=ranks) for policy, adapter in adapters.items()}, version
            )

        await call_all(engines, f"adapters of version {version}", send)
        if self._check != "none":
            await check_version(engines, version)
        return await asyncio.to_thread(_sent, adapters.values())

    def _adapters(self, learner: LearnerGroup) -> dict[str, LoraAdapter]:
        return {policy: self._adapter(learner, policy) for policy in self._config.policies}

    def _adapter(self, learner: LearnerGroup, policy: str) -> LoraAdapter:
        tensors = learner.adapters(self._dtype, policy)
        if not tensors:
            raise LearnerError("weights.adapters=only: the learner has no adapters; set weights.adapters=merged")
        layers = layer_names([name for name, _ in tensors])
        _check_fused(layers)
        sums: Mapping[str, str] = {}
        if self._check == "checksum":
            sums = {name: hashlib.sha256(raw_bytes(tensor)).hexdigest() for name, tensor in tensors}
        return LoraAdapter(peft_config(self._config, last_names(layers)), tensors, checksums=sums)


def _sent(adapters: Iterable[LoraAdapter]) -> SyncedWeights:
    flats = [tensor.reshape(-1).view(torch.uint8) for adapter in adapters for _, tensor in adapter.tensors]
    return SyncedWeights(fingerprint(torch.cat(flats)), sum(map(len, flats)))


def write_adapters(learner: LearnerGroup, folder: Path, config: LoraConfig, dtype: str | None) -> None:
    """Write a PEFT folder for each policy into ``folder``; see `load_adapters`."""
    for policy in config.policies:
        write_peft(folder / policy, config, learner.adapters(dtype, policy))


async def load_adapters(engine: EngineControl, folder: Path, policies: Collection[str], version: int) -> None:
    """Load the adapters of policies, whose PEFT folders are in ``folder``, into an engine.

    Raises:
        ModelError: a folder is incomplete or damaged.
        EngineError: the engine refuses them.
    """
    ranks, adapters = await engine.groups.ranks(), {}
    for policy in policies:
        peft, tensors = await asyncio.to_thread(read_peft, folder / policy)
        adapters[policy] = LoraAdapter(peft, tensors, ranks)
    await engine.updates.from_adapters(adapters, version)


def for_adapters(config: Config, model: Path) -> Config:
    """Return the configuration of a run whose engines hold adapters, if ``weights.adapters=only``; see `with_adapters`."""
    lora, sampler = config.learner.lora, config.sampler
    if lora is None or config.weights.adapters != "only" or not sampler.uses_sglang or sampler.urls:
        return config
    return config.model_copy(update={"sampler": with_adapters(sampler, lora, model)})


def with_adapters(sampler: SamplerConfig, config: LoraConfig, model: Path) -> SamplerConfig:
    """Return the configuration of SGLang engines that hold adapters; options that it has already stay.

    Args:
        sampler: configuration of the engines.
        config: of the adapters.
        model: Hugging Face folder of the base model.

    Raises:
        ConfigError: see `agentrl.learner.fsdp.lora.adapted_layers`.
        ModelError: the model's configuration cannot be loaded.
    """
    from agentrl.learner.fsdp.lora import adapted_layers
    from agentrl.models.load import empty_model

    layers = adapted_layers(empty_model(model, "sdpa"), config)
    _check_fused(layers)
    options: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": config.rank,
        "lora_target_modules": last_names(layers),
        "max_loras_per_batch": _ADAPTERS_PER_POLICY * len(config.policies),
        "lora_strict_loading": True,
    }
    configured_names = {name.replace("-", "_") for name in sampler.sglang}
    options = {name: value for name, value in options.items() if name not in configured_names}
    return sampler.model_copy(update={"sglang": sampler.sglang | options})


def _check_fused(layers: Collection[str]) -> None:
    """Check that of layers that SGLang joins, either all or none have an adapter.

    Raises:
        ConfigError: names one without.
    """
    names = set(layers)
    for layer in sorted(names):
        parent, _, last = layer.rpartition(".")
        for fused in _FUSED_LAYERS:
            unadapted = [name for name in fused if last in fused and f"{parent}.{name}" not in names]
            if unadapted:
                raise ConfigError(
                    f"weights.adapters=only: {layer} has an adapter and {parent}.{unadapted[0]} has none, but SGLang computes "
                    f"{', '.join(fused)} as one layer; set learner.lora.target to all of them, or weights.adapters=merged"
                )
