"""One rank of the FSDP2 learner. The process group must exist before it is constructed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from agentrl.batch.microbatch import GlobalBatch
from agentrl.core.errors import LearnerError
from agentrl.distributed.base import TensorSpec
from agentrl.learner.base import RankOptions, RowScores
from agentrl.learner.device import recompute_mode
from agentrl.learner.fsdp.compute_copies import ComputeCopies, add_gradient, copies_weights, take_gradients
from agentrl.learner.fsdp.gather import AdapterWeights, MergedWeights
from agentrl.learner.fsdp.loading import load_critic, load_policy
from agentrl.learner.fsdp.model import PackedModel
from agentrl.learner.fsdp.optimizer import RoundedGradients, make_optimizers
from agentrl.learner.fsdp.reference import Reference, load_reference
from agentrl.learner.fsdp.sharding import clip_gradients, make_mesh, reshard
from agentrl.learner.fsdp.state import load_state, saved_tensors, start_saving
from agentrl.learner.fsdp.weights import local
from agentrl.learner.layers import decoder_layers
from agentrl.learner.optimizer_states import OptimizerStates
from agentrl.learner.rank import (
    BackendRank,
    SequenceRatios,
    by_row,
    first_tokens,
    learning_rate,
    mask_positions,
    score_positions,
)
from agentrl.learner.step_metrics import StepMetrics

_COMPILED_TOKENS = 1024
"""Enough that the compiler chooses kernels for many."""


class FsdpRank(BackendRank):
    """A rank of a Hugging Face model.

    Raises:
        ConfigError: the reference reads other tokens than the policy, or see `frozen_names`.
        ModelError: a folder cannot be loaded.
    """

    reference: Reference | None
    """It is not saved in checkpoints unless it has changed."""

    def __init__(self, options: RankOptions) -> None:
        super().__init__(options)
        config, device = self.config, self.device
        self.data_parallel_rank = dist.get_rank() // config.context_parallel
        mesh = make_mesh(device.type, config)
        self._cpu_mesh = mesh if device.type == "cpu" else make_mesh("cpu", config)
        self.writers = dist.new_group(timeout=timedelta(seconds=config.step_timeout_s), backend="gloo")
        load = load_critic if options.role == "critic" else load_policy
        self.model: PackedModel = load(self.model_folder, config, device, mesh)
        self.model.replays_routing = options.replays_routing
        if self.model.images is not None:
            self.model.images.trust_remote_code = options.trust_remote_code
        self._context = self.model.context
        self.merged = MergedWeights(self.model.hf, config.lora)
        self.adapters = {name: AdapterWeights(self, self.merged, name) for name in self.merged.exported}
        """The adapters of each policy, by their names in a PEFT folder."""
        self._compiled: set[tuple[int, bool]] = set()
        """Models, and whether with gradients, of which `_compile_rows` has seen a batch."""
        self.steps = dict.fromkeys(self.merged.policies, 0)
        """Finished optimizer steps of each policy."""
        self._active = next(iter(self.steps))
        if options.reference is not None:
            self.reference = load_reference(
                options.reference,
                config,
                mesh,
                policy=self.model,
                policy_folder=self.model_folder,
                merged=self.merged,
                trust_remote_code=options.trust_remote_code,
            )
        self.optimizers = self._make_optimizers()
        """By policy and number."""
        leaves = {weight: weight for weight in self.model.parameters() if weight.requires_grad}
        self._copies: ComputeCopies | None = None
        if copies_weights(
            config,
            recompute_mode(config),
            ranks=dist.get_world_size(),
            bfloat16=self.model.autocast,
            compiled=self.model.compiled,
        ):
            self._copies = ComputeCopies(decoder_layers(self.model.hf))
            leaves |= self._copies.by_weight
        self._sums: RoundedGradients | None = None
        if config.optimizer.state == "8bit" and mesh is None:
            self._sums = RoundedGradients(leaves)
        elif self._copies is not None:
            take_gradients(self._copies.by_weight, add_gradient)
        self.optimizer_states = OptimizerStates(
            [*self.optimizers.values()], offloaded=config.cpu_offload == "optimizer"
        )

    def _make_optimizers(self) -> dict[str, Optimizer]:
        head, options = self.model.head, self.config.optimizer
        if not self.merged.exported:
            return {str(i): optimizer for i, optimizer in enumerate(make_optimizers(self.model, head, options))}
        adapters = self.merged.adapters
        by_policy = {
            policy: [adapters[name] for name in names.values()] for policy, names in self.merged.exported.items()
        }
        return {
            f"{policy}.{i}": optimizer
            for policy, weights in by_policy.items()
            for i, optimizer in enumerate(make_optimizers(self.model, head, options, weights))
        }

    @property
    @override
    def shares_prefixes(self) -> bool:
        if self.model.batch_invariant:
            return False
        return not any(model.separates_rows for model in (self.model, self.reference) if model is not None)

    @override
    def _add_gradients(self, batch: GlobalBatch, metrics: StepMetrics) -> None:
        self._activate(batch.policy)
        if self._sums is not None:
            self._sums.step = self.steps[self._active]
        self._compile_rows(batch, self.model)
        [micros] = batch.micro
        # Before the policy's first pass, so that the weights of both models are never gathered at the same time.
        references = self._reference_logprobs(batch)
        ratios = self._sequence_ratios(batch)
        for micro, reference_N, ratio_N in zip(micros, references, ratios, strict=True):
            at_N = self.model.local_positions(micro, mask_positions(micro))
            scores = self.model(
                micro,
                at_N.numpy(),
                batch.temperature,
                batch.kind == "rl",
                batch.truncation,
                self.loss.centering(batch),
            )
            loss, loss_metrics = self.loss(batch, micro, at_N, scores, reference_N=reference_N, ratio_N=ratio_N)
            torch.autograd.backward(loss)
            metrics.add(loss, len(at_N), loss_metrics)

    @override
    def _reduce(self, metrics: StepMetrics, scale: float) -> dict[str, float]:
        return metrics.reduce(scale=scale)

    @torch.no_grad()
    def _sequence_ratios(self, batch: GlobalBatch) -> list[torch.Tensor | None]:
        """Return the ratios that the loss needs of each micro-batch, which take a forward pass; see `SequenceRatios`."""
        [micros] = batch.micro
        if not self.loss.needs_ratios(batch, divides_rows=self._context is not None):
            return [None] * len(micros)
        ratios = SequenceRatios(batch, self.device)
        for micro in micros:
            at_N = self.model.local_positions(micro, mask_positions(micro))
            scores = self.model(micro, at_N.numpy(), batch.temperature, truncation=batch.truncation)
            ratios.add(*self.loss.log_ratio(micro, at_N, scores[0]))
        reshard(self.model)
        return [*ratios.reduce()]

    @torch.no_grad()
    def _reference_logprobs(self, batch: GlobalBatch) -> list[torch.Tensor | None]:
        """Return the reference policy's log-probabilities at the mask of each micro-batch, on the device."""
        [micros] = batch.micro
        if not self.loss.needs_reference(batch):
            return [None] * len(micros)
        with self._model("reference") as model:
            self._compile_rows(batch, model)
            return [
                model(micro, self.model.local_positions(micro, mask_positions(micro)).numpy(), batch.temperature)[0]
                for micro in micros
            ]

    def _compile_rows(self, batch: GlobalBatch, model: PackedModel) -> None:
        """Compile layers for rows that share nothing with the first batch of rows that do: a later step would wait for it."""
        kind = (id(model), torch.is_grad_enabled())
        if not model.compiled or kind in self._compiled:
            return
        self._compiled.add(kind)
        [micros] = batch.micro
        shares = torch.tensor([float(micro.shares_prefixes) for micro in micros], device=self.device).amax()
        dist.all_reduce(shares, dist.ReduceOp.MAX)
        if not shares:
            return
        rows = first_tokens(micros[0], _COMPILED_TOKENS)
        at_N = self.model.local_positions(rows, score_positions(rows))
        scores_N = model(rows, at_N.numpy(), batch.temperature)[0]
        if torch.is_grad_enabled():
            torch.autograd.backward(scores_N.sum())
            self._zero_grad()
        reshard(model)

    def _model(self, name: str) -> AbstractContextManager[PackedModel]:
        """Return a context manager of the trained model or the reference."""
        if name == self.name:
            return nullcontext(self.model)
        if name == "reference" and self.reference is not None:
            return self.reference.model()
        raise self.unknown_model(name)

    def _activate(self, policy: str) -> None:
        """Compute with the adapters of a policy; only these get gradients, and are clipped and changed by the next update."""
        if policy not in self.steps:
            raise LearnerError(
                f"the learner has no policy {policy!r}, only {', '.join(self.steps)} (learner.lora.policies)"
            )
        self._active = policy
        self.merged.activate(policy)

    @override
    @torch.no_grad()
    def _scale_gradients(self, factor: float) -> None:
        if self._sums is not None:
            self._sums.hand_over()
        if factor != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= factor

    @override
    def _update(self, lr_scale: float) -> dict[str, float]:
        norm = self._clip_gradients()
        rate = learning_rate(self.config.optimizer, self.steps[self._active], lr_scale)
        if not math.isfinite(norm):
            return {"train/nonfinite_gradients": 1.0, "train/lr": rate}
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
        if self.optimizer_states.offloaded:
            wait([self._writing])  # it reads them
        self.optimizer_states.step()
        if self._copies is not None:
            self._copies.refresh()
        self.steps[self._active] += 1
        return {"train/nonfinite_gradients": 0.0, "train/grad_norm": norm, "train/lr": rate}

    def _clip_gradients(self) -> float:
        """Return the gradient's norm, over all ranks, before it is clipped."""
        weights, maximum = [*self.model.parameters()], self.config.optimizer.max_grad_norm
        if self._sums is None:
            return clip_gradients(weights, maximum)
        # A norm of bfloat16 would be rounded to bfloat16.
        norms = [torch.linalg.vector_norm(w.grad, dtype=torch.float32) for w in weights if w.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        torch.nn.utils.clip_grads_with_norm_(weights, maximum, norm)
        return float(norm)

    @override
    def _zero_grad(self) -> None:
        if self._sums is not None:
            self._sums.clear()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    @override
    @torch.no_grad()
    def _score_rows(self, batch: GlobalBatch, name: str) -> RowScores:
        self._activate(batch.policy)
        scores: RowScores = {}
        [micros] = batch.micro
        with self._model(name) as model:
            self._compile_rows(batch, model)
            for micro in micros:
                at_N = self.model.local_positions(micro, score_positions(micro))
                scored_N = model(micro, at_N.numpy(), batch.temperature, truncation=batch.truncation)[0]
                reshard(model)
                scores |= by_row(micro, at_N, scored_N)
        return scores if self._context is None else self._context.sum_over_ranks(scores)

    @override
    def _copy_to_reference(self) -> None:
        assert self.reference is not None
        self.reference.update()

    @override
    def specs(self) -> Sequence[TensorSpec]:
        return self.merged.specs()

    @override
    @torch.no_grad()
    def gather(self, into: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.merged.gather(into, self.cpu_copy if self._offload else torch.Tensor.detach)

    def cpu_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy on the CPU of a tensor of the rank's state, as of the last `save` or `sleep`."""
        copies = self.optimizer_states if self.optimizer_states.holds(tensor) else self._offload
        copy = copies.cpu_copy(local(tensor))
        if not isinstance(tensor, DTensor):
            return copy
        assert self._cpu_mesh is not None
        return DTensor.from_local(
            copy,
            self._cpu_mesh.holding(tensor),
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    @override
    def _settle_weights(self) -> None:
        reshard(self.model)

    @override
    def _release_gradients(self) -> None:
        self._zero_grad()
        if self._copies is not None:
            self._copies.release()

    @override
    def _restore_gradients(self) -> None:
        if self._copies is not None:
            self._copies.refresh()

    @override
    @torch.no_grad()
    def _state(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = [*self.model.parameters()]
        if self.reference is not None:
            tensors += self.reference.weights().values()
        for optimizer in self.optimizers.values():
            tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        return [local(tensor) for tensor in tensors if not self.optimizer_states.holds(tensor)]

    @override
    def _saved_state(self) -> Iterator[torch.Tensor]:
        return (local(tensor) for tensor in saved_tensors(self) if not self.optimizer_states.holds(tensor))

    @override
    def _start_saving(self, folder: Path) -> Future[None]:
        return start_saving(self, folder)

    @override
    def _load(self, folder: Path) -> None:
        reshard(self.model)
        load_state(self, folder)
        self._restore_gradients()
