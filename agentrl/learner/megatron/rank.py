"""One rank of the Megatron-Core learner. The process group must exist before it is constructed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from typing_extensions import override

from agentrl.batch.microbatch import GlobalBatch
from agentrl.distributed.base import TensorSpec
from agentrl.learner.base import RankOptions, RowScores
from agentrl.learner.device import compiles
from agentrl.learner.megatron.cpu import computing_on
from agentrl.learner.megatron.options import learner_options
from agentrl.learner.megatron.pipeline import Scores
from agentrl.learner.megatron.policies import LoadedModel, copy_weights, load_reference, load_trained, start_groups
from agentrl.learner.megatron.state import Writers, load_state, start_saving
from agentrl.learner.megatron.weights import GatherGroups
from agentrl.learner.rank import BackendRank, SequenceRatios, by_row, mask_positions, score_positions
from agentrl.learner.step_metrics import StepMetrics


class MegatronRank(BackendRank):
    """A rank of a Megatron-Core model. Rows do not share prefixes, and there are no LoRA adapters.

    Raises:
        ConfigError: see `load_trained` and `load_reference`.
        ModelError: a folder cannot be loaded.
    """

    shares_prefixes = False
    reference: LoadedModel | None

    def __init__(self, options: RankOptions) -> None:
        super().__init__(options)
        config, device = self.config, self.device
        self.step = 0
        megatron = learner_options(config)
        with self.computing():
            start_groups(megatron, options.seed)
            self.trained, self.training = load_trained(self.model_folder, config, megatron, device, options.role)
            self.trained.pipeline.replays_routing = options.replays_routing
            self.reference_changed = False
            if options.reference is not None:
                self.reference = load_reference(options.reference, config, megatron, device, self.model_folder)
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self._groups = GatherGroups.model_parallel()
        self._data_parallel_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        """Ranks that together have each token of a batch once."""
        self._all_ranks = dist.new_group(backend="gloo")
        self.writers = Writers.join()

    @override
    def computing(self) -> AbstractContextManager[None]:
        return computing_on(self.device, compiled=compiles(self.config))

    @override
    def _add_gradients(self, batch: GlobalBatch, metrics: StepMetrics) -> None:
        [micros] = batch.micro
        places = [self.trained.pipeline.local_places(micro, mask_positions(micro)) for micro in micros]
        references = self._reference_logprobs(batch, places)
        ratios = self._sequence_ratios(batch, places)

        def compute_loss(number: int, scores: Scores) -> torch.Tensor:
            loss, loss_metrics = self.loss(
                batch, micros[number], places[number], scores, reference_N=references[number], ratio_N=ratios[number]
            )
            metrics.add(loss, len(places[number]), loss_metrics)
            return loss

        run = self.trained.pipeline.run
        self.training.begin_pass(completes=batch.completes)
        run(micros, places, batch.temperature, compute_loss, entropy=batch.kind == "rl", backward=True)

    @override
    def _reduce(self, metrics: StepMetrics, scale: float) -> dict[str, float]:
        # Last stages have the metrics.
        reduced = [metrics.reduce(self._data_parallel_group, scale) if self.trained.pipeline.is_last else None]
        # The last rank is on the last stage.
        dist.broadcast_object_list(reduced, src=dist.get_world_size() - 1, group=self._all_ranks)
        assert reduced[0] is not None
        return reduced[0]

    @override
    def _scale_gradients(self, factor: float) -> None:
        self.training.scale_gradient(factor)

    @override
    def _update(self, lr_scale: float) -> dict[str, float]:
        metrics = self.training.update(self.step, lr_scale)
        self.step += not metrics["train/nonfinite_gradients"]
        return metrics

    @override
    def _zero_grad(self) -> None:
        self.training.zero_grad()

    def _sequence_ratios(self, batch: GlobalBatch, places: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the ratios that the loss needs of each micro-batch, from a separate forward pass; see `SequenceRatios`."""
        [micros] = batch.micro
        pipeline = self.trained.pipeline
        if not self.loss.needs_ratios(batch, divides_rows=pipeline.context is not None):
            return [None] * len(micros)
        ratios = SequenceRatios(batch, self.device)

        def add(number: int, scores: Scores) -> None:
            ratios.add(*self.loss.log_ratio(micros[number], places[number], scores[0]))

        pipeline.run(micros, places, batch.temperature, add)
        return [*ratios.reduce(self._data_parallel_group)] if pipeline.is_last else [None] * len(micros)

    def _reference_logprobs(self, batch: GlobalBatch, places: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the reference policy's log-probabilities of each micro-batch, on last stages and on the device."""
        [micros] = batch.micro
        logprobs: list[torch.Tensor | None] = [None] * len(micros)
        if not self.loss.needs_reference(batch):
            return logprobs

        def keep(number: int, scores: Scores) -> None:
            logprobs[number] = scores[0]

        self._find_model("reference").pipeline.run(micros, places, batch.temperature, keep)
        return logprobs

    def _find_model(self, name: str) -> LoadedModel:
        """Return the policy, the critic or the reference."""
        if name == self.name:
            return self.trained
        if name == "reference" and self.reference is not None:
            return self.reference
        raise self.unknown_model(name)

    @override
    def _score_rows(self, batch: GlobalBatch, name: str) -> RowScores:
        [micros] = batch.micro
        pipeline = self._find_model(name).pipeline
        places = [pipeline.local_places(micro, score_positions(micro)) for micro in micros]
        row_scores: RowScores = {}
        returns = parallel_state.get_tensor_model_parallel_rank() == 0

        def keep(number: int, scores: Scores) -> None:
            if returns:
                row_scores.update(by_row(micros[number], places[number], scores[0]))

        pipeline.run(micros, places, batch.temperature, keep)
        return row_scores if pipeline.context is None else pipeline.context.sum_over_ranks(row_scores)

    @override
    def _copy_to_reference(self) -> None:
        assert self.reference is not None
        self.training.complete_weights()
        copy_weights(self.trained, self.reference)
        self.reference_changed = True

    @override
    def specs(self) -> Sequence[TensorSpec]:
        return self.trained.weights.specs()

    @override
    def gather(self, into: Sequence[tuple[str, torch.Tensor]]) -> None:
        with self.computing():
            self._settle_weights()
            self.trained.weights.gather(into, self._groups, self.readable)

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the rank's state in readable memory, while it sleeps on the CPU."""
        is_offloaded = bool(self._offload) and not tensor.untyped_storage().nbytes()
        return self._offload.cpu_copy(tensor) if is_offloaded else tensor.detach()

    def cpu_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the CPU copy of a tensor of the rank's state as of the last `save` or `sleep`; copy other tensors to the CPU."""
        return self._offload.cpu_copy(tensor) if self._offload.has_copy(tensor) else tensor.cpu()

    @override
    def _settle_weights(self) -> None:
        """Get weights that other ranks have updated; a rank that sleeps already has them."""
        if not self._offload:
            self.training.complete_weights()

    @override
    def _release_gradients(self) -> None:
        self.training.release_gradients()

    @override
    def _restore_gradients(self) -> None:
        self.training.restore_gradients()

    @override
    def _state(self) -> list[torch.Tensor]:
        reference = [] if self.reference is None else self.reference.tensors()
        return [*self.trained.tensors(), *reference, *self.training.tensors()]

    @override
    def _saved_state(self) -> list[torch.Tensor]:
        reference = self.reference.tensors() if self.reference is not None and self.reference_changed else []
        return [*self.trained.tensors(), *reference, *self.training.tensors(gathered=False)]

    @override
    def _start_saving(self, folder: Path) -> Future[None]:
        return start_saving(self, folder)

    @override
    def _load(self, folder: Path) -> None:
        load_state(self, folder)

    @override
    def close(self) -> None:
        wait([self._writing])
        parallel_state.destroy_model_parallel()
        super().close()
