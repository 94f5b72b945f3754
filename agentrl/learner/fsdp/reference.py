"""The reference policy of a rank: a loaded model, or with LoRA the base model, without a second copy of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import LearnerError
from agentrl.learner.fsdp.gather import MergedWeights
from agentrl.learner.fsdp.loading import load_frozen
from agentrl.learner.fsdp.lora import disabled_adapters
from agentrl.learner.fsdp.model import PackedModel
from agentrl.learner.fsdp.sharding import RankMesh, reshard
from agentrl.learner.fsdp.weights import local
from agentrl.models.reference_policy import KEY, check_reference


def load_reference(
    folder: Path,
    config: LearnerConfig,
    mesh: RankMesh | None,
    *,
    policy: PackedModel,
    policy_folder: Path,
    merged: MergedWeights,
    trust_remote_code: bool,
) -> Reference:
    """Return the reference policy in ``folder``. Collective.

    Args:
        folder: a Hugging Face model folder.
        config: of the policy.
        mesh: of the ranks; see `load_frozen`.
        policy: the model that is trained.
        policy_folder: folder of its initial weights, with LoRA those of the base model.
        merged: its weights.
        trust_remote_code: see `RankOptions`.

    Raises:
        ConfigError: the reference reads other tokens than the policy.
        ModelError: the folder cannot be loaded.
    """
    check_reference(policy_folder, folder, trust_remote_code=trust_remote_code)
    if config.lora is not None and folder.samefile(policy_folder):
        return BaseReference(policy, merged.adapters)
    model = load_frozen(folder, config, policy.hf.device, mesh, KEY, policy.context)
    if model.images is not None:
        model.images.trust_remote_code = trust_remote_code
    return LoadedReference(model, merged)


class LoadedReference:
    """A second model."""

    def __init__(self, model: PackedModel, policy: MergedWeights) -> None:
        self.was_updated = False
        """Whether it was the policy of an earlier step (``algo.reference_steps``): checkpoints have `weights` then."""
        self._model = model
        self._policy = policy

    @property
    def separates_rows(self) -> bool:
        """See `PackedModel.separates_rows`."""
        return self._model.separates_rows

    @contextmanager
    def model(self) -> Iterator[PackedModel]:
        """Return a model that is the reference in the block, without gradients; its weights are sharded again at the end."""
        yield self._model
        reshard(self._model)

    @torch.no_grad()
    def update(self) -> None:
        """Become the policy.

        Raises:
            LearnerError: it is of another architecture.
        """
        parameters, policy_weights = dict(self._model.hf.named_parameters()), self._policy.base
        if {name: p.shape for name, p in parameters.items()} != {name: p.shape for name, p in policy_weights.items()}:
            raise LearnerError(
                "the reference has another architecture than the policy, so it cannot become the policy: set "
                "algo.reference_steps=0, or algo.reference to a model of the policy's architecture"
            )
        for name, weight in parameters.items():
            weight.copy_(self._policy.get(name, torch.Tensor.detach))
        self.was_updated = True

    def load(self, folder: Path) -> None:
        """Load `weights` that torch.distributed.checkpoint wrote. Collective."""
        load_sharded(self.weights(), checkpoint_id=folder)
        self.was_updated = True

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the sharded weights that it has in addition to the policy's, by name."""
        return {name: parameter.detach() for name, parameter in self._model.hf.named_parameters()}


class BaseReference:
    """The policy without its adapters; once it was updated, with those of an earlier step."""

    def __init__(self, policy: PackedModel, adapters: dict[str, nn.Parameter]) -> None:
        self._policy = policy
        self._adapters = adapters
        self._earlier_adapters: dict[str, torch.Tensor] = {}
        """The adapters of an earlier step."""

    @property
    def was_updated(self) -> bool:
        """See `LoadedReference`."""
        return bool(self._earlier_adapters)

    @property
    def separates_rows(self) -> bool:
        """See `PackedModel.separates_rows`."""
        return self._policy.separates_rows

    @contextmanager
    def model(self) -> Iterator[PackedModel]:
        """Return the policy with the reference's adapters and without routing replay; see `LoadedReference.model`."""
        replays, self._policy.replays_routing = self._policy.replays_routing, False
        try:
            with self._reference_adapters():
                yield self._policy
        finally:
            self._policy.replays_routing = replays

    @contextmanager
    def _reference_adapters(self) -> Iterator[None]:
        if not self._earlier_adapters:
            with disabled_adapters(self._policy.hf):
                yield
            reshard(self._policy)
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def update(self) -> None:
        """Copy the policy's adapters; see `LoadedReference.update`."""
        self._earlier_adapters = {name: adapter.detach().clone() for name, adapter in self._adapters.items()}

    def load(self, folder: Path) -> None:
        """Load the adapters; see `LoadedReference.load`."""
        self.update()
        load_sharded(self._earlier_adapters, checkpoint_id=folder)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the adapters of the earlier step; see `LoadedReference.weights`."""
        return self._earlier_adapters

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the policy's adapters and those of the earlier step."""
        reshard(self._policy)  # full weights are gathered from the shards again
        for name, earlier in self._earlier_adapters.items():
            shard, earlier_shard = local(self._adapters[name]), local(earlier)
            copy = shard.clone()
            shard.copy_(earlier_shard)
            earlier_shard.copy_(copy)


Reference = LoadedReference | BaseReference
"""A reference policy."""
