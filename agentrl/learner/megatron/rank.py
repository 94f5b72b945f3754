"""One rank of the Megatron-Core learner. The process group must exist before it is constructed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import LearnerError
from agentrl.distributed.base import TensorSpec
from agentrl.learner.base import Role, RowLogprobs, RowScores, WeightSource
from agentrl.learner.batch_loss import BatchLoss, SequenceRatios, at_mask, by_row, scored
from agentrl.learner.device import compiles, peak_memory
from agentrl.learner.megatron.cpu import computing_on
from agentrl.learner.megatron.options import learner_options
from agentrl.learner.megatron.pipeline import Scores
from agentrl.learner.megatron.policies import LoadedModel, copy_weights, load_reference, load_trained, start_groups
from agentrl.learner.megatron.state import Writers, load_state, start_saving
from agentrl.learner.megatron.weights import GatherGroups
from agentrl.learner.offload import CpuOffload
from agentrl.learner.optimization import config_of_role
from agentrl.learner.random_states import seed_everything
from agentrl.learner.step_metrics import StepMetrics

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _computing(method: _Method) -> _Method:
    """Enter the context in which Megatron-Core computes on the rank's device."""

    @wraps(method)
    def call(self: MegatronRank, *args: Any, **kwargs: Any) -> Any:
        with computing_on(self.device, compiled=compiles(self.config)):
            return method(self, *args, **kwargs)

    return cast("_Method", call)


class MegatronRank:
    """Implements `agentrl.learner.base.LearnerRank` on a Megatron-Core model.

    Args:
        folder: the model, a Hugging Face folder.
        config: precision, optimizer, ``megatron``.
        algo: the loss of ``rl`` batches.
        device: where this rank computes.
        seed: of the random states; the rank is added.
        reference: the frozen policy, if the loss needs one.
        role: a critic has a value head in place of the language head, ``algo.critic.optimizer``, and the loss of values.

    Raises:
        ConfigError: see `load_trained` and `load_reference`.
        ModelError: a folder cannot be loaded.

    """

    shares_prefixes = False
    """Every row is computed as a whole; see `LearnerRank.shares_prefixes`."""
    adapters: Mapping[str, WeightSource] = MappingProxyType({})
    """There are none; see `LearnerRank.adapters`."""

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
        self.name = "critic" if role == "critic" else "main"
        self.step = 0
        self._metrics: StepMetrics | None = None
        """Of the parts of an optimizer step that is not complete."""
        self.loss = BatchLoss(algo, device)
        seed_everything(seed + dist.get_rank())
        options = learner_options(config)
        with computing_on(device, compiled=compiles(config)):
            start_groups(options, seed)
            self.trained, self.training = load_trained(folder, config, options, device, role)
            self.trained.pipeline.replays_routing = algo.replays_routing and role == "policy"
            self.reference: LoadedModel | None = None
            self.reference_changed = False
            if reference is not None:
                self.reference = load_reference(reference, config, options, device, folder)
        self.share: int = parallel_state.get_data_parallel_rank()
        """Ranks of tensor, pipeline and context parallelism compute one together; see `LearnerRank.share`."""
        self._groups = GatherGroups.of_megatron()
        self._of_share = parallel_state.get_data_parallel_group(with_context_parallel=True)
        """Ranks that together have each token of a batch once."""
        self._everyone = dist.new_group(backend="gloo")
        self._offload = CpuOffload()
        self._writing: Future[None] = Future()
        """Of the newest checkpoint."""
        self._writing.set_result(None)
        self.writers = Writers.join()

    @_computing
    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Take one optimizer step; see `LearnerRank.train_step`. Without a token to train on none is taken."""
        self._check_awake()
        [micros] = batch.micro
        places = [self.trained.pipeline.own(micro, at_mask(micro)) for micro in micros]
        references = self._reference_logprobs(batch, places)
        ratios = self._sequence_ratios(batch, places)
        metrics = self._metrics = self._metrics or StepMetrics(self.device)

        def loss_of(number: int, scores: Scores) -> torch.Tensor:
            loss, loss_metrics = self.loss(
                batch,
                micros[number],
                places[number],
                scores,
                reference_N=references[number],
                ratio_N=ratios[number],
            )
            metrics.add(loss, len(places[number]), loss_metrics)
            return loss

        run = self.trained.pipeline.run
        self.training.begin_pass(completes=batch.completes)
        run(micros, places, batch.temperature, loss_of, entropy=batch.kind == "rl", backward=True)
        if not batch.completes:
            return {}
        self._metrics = None
        result = self._reduced(metrics, batch.gradient_scale) | peak_memory(self.device)
        if result["train/trained_tokens"]:
            self.training.scale_gradient(batch.gradient_scale)
            result |= self.training.update(self.step, batch.lr_scale)
            self.step += not result["train/nonfinite_gradients"]
        self.training.zero_grad()
        return result

    def _reduced(self, metrics: StepMetrics, scale: float) -> dict[str, float]:
        """Return the metrics of the global batch, which last stages have, on every rank. Collective."""
        found = [metrics.reduce(self._of_share, scale) if self.trained.pipeline.is_last else None]
        # The last rank is on the last stage.
        dist.broadcast_object_list(found, src=dist.get_world_size() - 1, group=self._everyone)
        assert found[0] is not None
        return found[0]

    def _sequence_ratios(self, batch: GlobalBatch, places: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the ratios that the loss needs of each micro-batch, which take a forward pass; see `SequenceRatios`."""
        [micros] = batch.micro
        pipeline = self.trained.pipeline
        if not self.loss.needs_ratios(batch, divides_rows=pipeline.context is not None):
            return [None] * len(micros)
        ratios = SequenceRatios(batch, self.device)

        def add(number: int, scores: Scores) -> None:
            ratios.add(*self.loss.log_ratio(batch, micros[number], places[number], scores[0]))

        pipeline.run(micros, places, batch.temperature, add)
        return [*ratios.reduce(self._of_share)] if pipeline.is_last else [None] * len(micros)

    def _reference_logprobs(self, batch: GlobalBatch, places: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the reference policy's log-probabilities of each micro-batch, on last stages and on the device."""
        [micros] = batch.micro
        found: list[torch.Tensor | None] = [None] * len(micros)
        if not self.loss.needs_reference(batch):
            return found

        def keep(number: int, scores: Scores) -> None:
            found[number] = scores[0]

        self._loaded("reference").pipeline.run(micros, places, batch.temperature, keep)
        return found

    def _loaded(self, name: str) -> LoadedModel:
        """Return the policy, the critic or the reference."""
        if name == self.name:
            return self.trained
        if name == "reference" and self.reference is not None:
            return self.reference
        hint = "; set algo.kl_coef above 0, or give the learner its folder" if name == "reference" else ""
        known = [self.name] if self.reference is None else [self.name, "reference"]
        raise LearnerError(f"the learner has no policy {name!r}, only {', '.join(known)}{hint}")

    @_computing
    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        """Return the log-probabilities of this rank's rows; see `LearnerRank.logprobs`."""
        return self._scores(batch, policy)

    @_computing
    def values(self, batch: GlobalBatch) -> RowScores:
        """Return the critic's values of this rank's rows; see `LearnerRank.values`."""
        return self._scores(batch, "critic")

    def _scores(self, batch: GlobalBatch, name: str) -> RowScores:
        """Return the first score of every token by row, 0 for the first token; none where another rank returns them."""
        self._check_awake()
        [micros] = batch.micro
        pipeline = self._loaded(name).pipeline
        places = [pipeline.own(micro, scored(micro)) for micro in micros]
        found: RowScores = {}
        returns = parallel_state.get_tensor_model_parallel_rank() == 0

        def keep(number: int, scores: Scores) -> None:
            if returns:
                found.update(by_row(micros[number], places[number], scores[0]))

        pipeline.run(micros, places, batch.temperature, keep)
        return found if pipeline.context is None else pipeline.context.add_up(found)

    @_computing
    @torch.no_grad()
    def update_reference(self) -> None:
        """Copy the policy into the reference; see `LearnerRank.update_reference`."""
        self._check_awake()
        if self.reference is None:
            raise LearnerError(
                "the learner has no reference policy: set algo.kl_coef above 0, or algo.reference_steps=0"
            )
        self.training.complete_weights()
        copy_weights(self.trained, self.reference)
        self.reference_changed = True

    @property
    def gathers_on(self) -> torch.device:
        """The device of the weights that `gather` writes; see `LearnerRank.gathers_on`."""
        return torch.device("cpu") if self._offload else self.device

    def specs(self) -> Sequence[TensorSpec]:
        """Return names, dtypes and shapes of the weights; see `LearnerRank.specs`."""
        return self.trained.weights.specs()

    @_computing
    def gather(self, into: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write weights into tensors on this rank's device, or on the CPU while it sleeps; see `LearnerRank.gather`."""
        self._complete_weights()
        self.trained.weights.gather(into, self._groups, self.present)

    def present(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the rank's state in readable memory, while it sleeps on the CPU."""
        is_offloaded = bool(self._offload) and not tensor.untyped_storage().nbytes()
        return self._offload.copy_of(tensor) if is_offloaded else tensor.detach()

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy on the CPU of a tensor of the rank's state, as of the last `save` or `sleep`; others moved there."""
        return self._offload.copy_of(tensor) if self._offload.has_copy(tensor) else tensor.cpu()

    def _complete_weights(self) -> None:
        """Get weights that other ranks have updated; a rank that sleeps has them."""
        if not self._offload:
            self.training.complete_weights()

    @_computing
    @torch.no_grad()
    def sleep(self) -> None:
        """Release the device's memory; see `LearnerRank.sleep`."""
        if self._offload:
            return
        wait([self._writing])  # it reads the copies
        self.training.complete_weights()
        self.training.release_gradients()
        self._offload.offload(self._state())
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Restore the device's memory; see `LearnerRank.wake`."""
        try:
            self._offload.restore()
            self.training.restore_gradients()
        except torch.OutOfMemoryError as error:
            raise LearnerError(
                "the learner stays offloaded, as its GPU no longer has the memory that it released: "
                f"{str(error).splitlines()[0]}; another process keeps too much of it while the learner trains"
            ) from error

    def _state(self) -> list[torch.Tensor]:
        """Return this rank's parts of weights, optimizer states and reference."""
        reference = [] if self.reference is None else self.reference.tensors()
        return [*self.trained.tensors(), *reference, *self.training.tensors()]

    def _check_awake(self) -> None:
        if self._offload:
            raise LearnerError("the learner sleeps: its weights are on the CPU; wake it first")

    @_computing
    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Copy the state to the CPU and begin to write it; see `LearnerRank.save`."""
        wait([self._writing])
        self._complete_weights()
        reference = self.reference.tensors() if self.reference is not None and self.reference_changed else []
        self._offload.copy([*self.trained.tensors(), *reference, *self.training.tensors(gathered=False)])
        self._writing = start_saving(self, folder)

    def finish_save(self) -> None:
        """Wait until this rank has written its part; see `LearnerRank.finish_save`."""
        self._writing.result()

    @_computing
    def load(self, folder: Path) -> None:
        """Load what `save` wrote; see `LearnerRank.load`."""
        self._check_awake()
        self.finish_save()
        dist.barrier()
        load_state(self, folder)

    def close(self) -> None:
        """Leave the process groups."""
        wait([self._writing])
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
