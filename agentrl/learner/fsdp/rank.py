"""One rank of the FSDP2 learner. The process group must exist before it is constructed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import LearnerError
from agentrl.distributed.base import TensorSpec
from agentrl.learner.base import Role, RowLogprobs, RowScores
from agentrl.learner.batch_loss import BatchLoss, SequenceRatios, at_mask, by_row, scored
from agentrl.learner.device import peak_memory
from agentrl.learner.fsdp.gather import AdapterWeights, MergedWeights
from agentrl.learner.fsdp.loading import load_critic, load_policy
from agentrl.learner.fsdp.model import PackedModel
from agentrl.learner.fsdp.optimizer import OptimizerStates, make_optimizers
from agentrl.learner.fsdp.reference import Reference, load_reference
from agentrl.learner.fsdp.sharding import reshard
from agentrl.learner.fsdp.state import load_state, saved_tensors, start_saving
from agentrl.learner.fsdp.weights import local
from agentrl.learner.offload import CpuOffload
from agentrl.learner.optimization import config_of_role, learning_rate
from agentrl.learner.random_states import seed_everything
from agentrl.learner.step_metrics import StepMetrics


class FsdpRank:
    """Implements `agentrl.learner.base.LearnerRank` on a Hugging Face model.

    Args:
        folder: the model, a Hugging Face folder.
        config: precision, optimizer, sharding.
        algo: the loss of ``rl`` batches.
        device: where this rank computes.
        seed: of the random states; the rank is added.
        reference: the frozen policy, if the loss needs one. It is not saved in checkpoints.
        role: a critic has a value head in place of the language head, ``algo.critic.optimizer``, and the loss of values.

    Raises:
        ConfigError: the reference reads other tokens than the policy, or see `frozen_names`.
        ModelError: a folder cannot be loaded.

    """

    def __init__(
        self,
        folder: Path,
        config: LearnerConfig,
        algo: AlgoConfig,
        *,
        device: torch.device,
        seed: int,
        reference: Path | None = None,
        role: Role = "policy",
    ) -> None:
        self.config = config = config_of_role(config, algo, folder, role)
        self.device = device
        self.source = folder
        self.share = dist.get_rank() // config.context_parallel
        """See `LearnerRank.share`."""
        seed_everything(seed + dist.get_rank())
        self.loss = BatchLoss(algo, device)
        self._metrics: StepMetrics | None = None
        """Of the parts of an optimizer step that is not complete."""
        ranks = (dist.get_world_size(),)
        mesh = init_device_mesh(device.type, ranks) if ranks > (1,) else None
        self._cpu_mesh = init_device_mesh("cpu", ranks) if mesh is not None and device.type != "cpu" else mesh
        self._offload = CpuOffload()
        self._writing: Future[None] = Future()
        """Of the newest checkpoint."""
        self._writing.set_result(None)
        self.writers = dist.new_group(backend="gloo")
        load = load_critic if role == "critic" else load_policy
        self.model: PackedModel = load(folder, config, device, mesh)
        self.model.replays_routing = algo.replays_routing and role == "policy"
        self._context = self.model.context
        self.merged = MergedWeights(self.model.hf, self.config.lora)
        self.adapters = {name: AdapterWeights(self, self.merged, name) for name in self.merged.exported}
        """The adapters of each policy, by their names in a PEFT folder."""
        self.steps = dict.fromkeys(self.merged.policies, 0)
        """Finished optimizer steps of each policy."""
        self._active = next(iter(self.steps))
        self.name = "critic" if role == "critic" else "main"
        self.reference: Reference | None = None
        if reference is not None:
            self.reference = load_reference(
                reference, self.config, mesh, policy=self.model, source=folder, merged=self.merged
            )
        self.optimizers = self._make_optimizers()
        """By policy and number."""
        self.optimizer_states = OptimizerStates(
            [*self.optimizers.values()], offloaded=config.cpu_offload == "optimizer"
        )

    def _make_optimizers(self) -> dict[str, Optimizer]:
        head, options = self.model.head, self.config.optimizer
        if not self.merged.exported:
            return {str(i): each for i, each in enumerate(make_optimizers(self.model, head, options))}
        adapters = self.merged.adapters
        by_policy = {name: [adapters[one] for one in names.values()] for name, names in self.merged.exported.items()}
        return {
            f"{name}.{i}": each
            for name, weights in by_policy.items()
            for i, each in enumerate(make_optimizers(self.model, head, options, weights))
        }

    @property
    def shares_prefixes(self) -> bool:
        """Whether micro-batches may share prefixes; see `LearnerGroup.shares_prefixes`."""
        return not any(one.separates_rows for one in (self.model, self.reference) if one is not None)

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Take one optimizer step; see `LearnerRank.train_step`. Without a token to train on none is taken."""
        self._check_awake()
        self._activate(batch.policy)
        [micros] = batch.micro
        # Before the policy's first pass, so that the weights of both models are never gathered at the same time.
        references = self._reference_logprobs(batch)
        ratios = self._sequence_ratios(batch)
        metrics = self._metrics = self._metrics or StepMetrics(self.device)
        for micro, reference_N, ratio_N in zip(micros, references, ratios, strict=True):
            at_N = self.model.own(micro, at_mask(micro))
            scores = self.model(micro, at_N.numpy(), batch.temperature, batch.kind == "rl")
            loss, loss_metrics = self.loss(batch, micro, at_N, scores, reference_N=reference_N, ratio_N=ratio_N)
            torch.autograd.backward(loss)
            metrics.add(loss, len(at_N), loss_metrics)
        if not batch.completes:
            return {}
        self._metrics = None
        result = metrics.reduce(scale=batch.gradient_scale) | peak_memory(self.device)
        if result["train/trained_tokens"]:
            self._scale_gradient(batch.gradient_scale)
            result |= self._update(batch.lr_scale)
        self._zero_grad()
        return result

    @torch.no_grad()
    def _sequence_ratios(self, batch: GlobalBatch) -> list[torch.Tensor | None]:
        """Return the ratios that the loss needs of each micro-batch, which take a forward pass; see `SequenceRatios`."""
        [micros] = batch.micro
        if not self.loss.needs_ratios(batch, divides_rows=self._context is not None):
            return [None] * len(micros)
        ratios = SequenceRatios(batch, self.device)
        for micro in micros:
            at_N = self.model.own(micro, at_mask(micro))
            logprobs_N, _ = self.model(micro, at_N.numpy(), batch.temperature)
            ratios.add(*self.loss.log_ratio(batch, micro, at_N, logprobs_N))
        reshard(self.model)
        return [*ratios.reduce()]

    @torch.no_grad()
    def _reference_logprobs(self, batch: GlobalBatch) -> list[torch.Tensor | None]:
        """Return the reference policy's log-probabilities at the mask of each micro-batch, on the device."""
        [micros] = batch.micro
        if not self.loss.needs_reference(batch):
            return [None] * len(micros)
        with self._model("reference") as model:
            return [
                model(micro, self.model.own(micro, at_mask(micro)).numpy(), batch.temperature)[0] for micro in micros
            ]

    def _model(self, name: str) -> AbstractContextManager[PackedModel]:
        """Return the policy, the critic or the reference, for the block."""
        if name == self.name:
            return nullcontext(self.model)
        if name == "reference" and self.reference is not None:
            return self.reference.model()
        hint = "; set algo.kl_coef above 0, or give the learner its folder" if name == "reference" else ""
        known = [self.name] if self.reference is None else [self.name, "reference"]
        raise LearnerError(f"the learner has no policy {name!r}, only {', '.join(known)}{hint}")

    def _activate(self, policy: str) -> None:
        """Compute with the adapters of a policy; only these get gradients, and are clipped and changed by the next update."""
        if policy not in self.steps:
            raise LearnerError(
                f"the learner has no policy {policy!r}, only {', '.join(self.steps)} (learner.lora.policies)"
            )
        self._active = policy
        self.merged.activate(policy)

    @torch.no_grad()
    def _scale_gradient(self, factor: float) -> None:
        if factor != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= factor

    def _update(self, lr_scale: float) -> dict[str, float]:
        """Clip the gradient and take an optimizer step, at the learning rate of this step; none if it is not finite."""
        norm_tensor = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        norm = float(norm_tensor.full_tensor() if isinstance(norm_tensor, DTensor) else norm_tensor)
        rate = learning_rate(self.config.optimizer, self.steps[self._active], lr_scale)
        if not math.isfinite(norm):
            return {"train/nonfinite_gradients": 1.0, "train/lr": rate}
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
        if self.optimizer_states.offloaded:
            wait([self._writing])  # it reads them
        self.optimizer_states.step()
        self.steps[self._active] += 1
        return {"train/nonfinite_gradients": 0.0, "train/grad_norm": norm, "train/lr": rate}

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    @torch.no_grad()
    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        """Return the log-probabilities of this rank's rows; see `LearnerRank.logprobs`."""
        return self._scores(batch, policy)

    @torch.no_grad()
    def values(self, batch: GlobalBatch) -> RowScores:
        """Return the critic's values of this rank's rows; see `LearnerRank.values`."""
        return self._scores(batch, "critic")

    def _scores(self, batch: GlobalBatch, name: str) -> RowScores:
        """Return the first score of every token by row, 0 for the first token."""
        self._check_awake()
        self._activate(batch.policy)
        found: RowScores = {}
        [micros] = batch.micro
        with self._model(name) as model:
            for micro in micros:
                at_N = self.model.own(micro, scored(micro))
                scored_N = model(micro, at_N.numpy(), batch.temperature)[0]
                reshard(model)
                found |= by_row(micro, at_N, scored_N)
        return found if self._context is None else self._context.add_up(found)

    def update_reference(self) -> None:
        """Copy the policy into the reference; see `LearnerRank.update_reference`."""
        self._check_awake()
        if self.reference is None:
            raise LearnerError(
                "the learner has no reference policy: set algo.kl_coef above 0, or algo.reference_steps=0"
            )
        self.reference.update()

    @property
    def gathers_on(self) -> torch.device:
        """The device of the weights that `gather` and `whole` gather; see `LearnerRank.gathers_on`."""
        return torch.device("cpu") if self._offload else self.device

    def specs(self) -> Sequence[TensorSpec]:
        """Return names, dtypes and shapes of the weights; see `LearnerRank.specs`."""
        return self.merged.specs()

    @torch.no_grad()
    def gather(self, into: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write weights into tensors on this rank's device, or on the CPU while it sleeps; see `LearnerRank.gather`."""
        present = self.staged if self._offload else torch.Tensor.detach
        self.merged.gather(into, present)

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy on the CPU of a tensor of the rank's state, as of the last `save` or `sleep`."""
        copies = self.optimizer_states if self.optimizer_states.holds(tensor) else self._offload
        copy = copies.copy_of(local(tensor))
        if not isinstance(tensor, DTensor):
            return copy
        return DTensor.from_local(
            copy, self._cpu_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    @torch.no_grad()
    def sleep(self) -> None:
        """Release the device's memory; see `LearnerRank.sleep`."""
        if self._offload:
            return
        wait([self._writing])  # it reads the copies
        reshard(self.model)
        self._zero_grad()
        self._offload.offload(self._state())
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Restore the device's memory; see `LearnerRank.wake`."""
        try:
            self._offload.restore()
        except torch.OutOfMemoryError as error:
            raise LearnerError(
                "the learner stays offloaded, as its GPU no longer has the memory that it released: "
                f"{str(error).splitlines()[0]}; another process keeps too much of it while the learner trains"
            ) from error

    @torch.no_grad()
    def _state(self) -> list[torch.Tensor]:
        """Return this rank's shards of weights, optimizer states and reference, but for what is in CPU memory already."""
        tensors: list[torch.Tensor] = [*self.model.parameters()]
        if self.reference is not None:
            tensors += self.reference.weights().values()
        for optimizer in self.optimizers.values():
            tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        return [local(tensor) for tensor in tensors if not self.optimizer_states.holds(tensor)]

    def _check_awake(self) -> None:
        if self._offload:
            raise LearnerError("the learner sleeps: its weights are on the CPU; wake it first")

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Copy the state to the CPU and begin to write it; see `LearnerRank.save`."""
        wait([self._writing])
        reshard(self.model)
        self._offload.copy(local(tensor) for tensor in saved_tensors(self) if not self.optimizer_states.holds(tensor))
        self._writing = start_saving(self, folder)

    def finish_save(self) -> None:
        """Wait until this rank has written its part; see `LearnerRank.finish_save`."""
        self._writing.result()

    def load(self, folder: Path) -> None:
        """Load what `save` wrote; see `LearnerRank.load`."""
        self._check_awake()
        self.finish_save()
        dist.barrier()
        reshard(self.model)
        load_state(self, folder)

    def close(self) -> None:
        """Leave the process group."""
        wait([self._writing])
        dist.destroy_process_group()
