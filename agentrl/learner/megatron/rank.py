"""One rank of the Megatron-Core learner. The process group must exist before it is constructed.

A checkpoint loads with any tensor, pipeline, expert, context and data parallel sizes::

    folder/
      model/         Hugging Face folder: safetensors in the learner's precision, configuration, the tokenizer's files; without
                     safetensors if not `BackendRank.saves_hf`
      weights/       float32 weights by Hugging Face name, torch.distributed.checkpoint; frozen ones in the learner's precision
      draft_layers/  without safetensors in model/: weights of multi-token prediction of the folder that the rank was loaded from
      optimizer/     moments, likewise; absent before the first step
      reference/     the reference policy, likewise; only once it differs from that of the start
      random/        one file per rank: torch, CUDA, NumPy and Python states
      learner.json   finished steps, number of ranks, shapes of weights, frozen weights, names of moments

Every rank writes the numbers that it has: of float32 weights and moments those that its optimizer changes, see `state`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import override

from agentrl.algo.base import TokenScores
from agentrl.batch.microbatch import GlobalBatch
from agentrl.core.atomic_files import names_file
from agentrl.core.background import run_in_daemon_thread
from agentrl.core.errors import CheckpointError, OtherKeysError
from agentrl.core.reading import reading
from agentrl.distributed.base import TensorSpec
from agentrl.learner.base import RankOptions, RowScores, StreamSource
from agentrl.learner.device import compiles
from agentrl.learner.megatron.cpu import computing_on
from agentrl.learner.megatron.options import learner_options
from agentrl.learner.megatron.policies import LoadedModel, copy_weights, load_reference, load_trained, start_groups
from agentrl.learner.megatron.senders import PartSource, RankPart, rank_parts
from agentrl.learner.megatron.state import OPTIMIZER, state_to_load, state_to_save
from agentrl.learner.megatron.weights import GatherGroups, ModelWeights
from agentrl.learner.random_states import rank_states, restore_rank, save_rank_states
from agentrl.learner.rank import BackendRank, SequenceRatios, by_row, mask_positions, score_positions
from agentrl.learner.sharded_files import load_sharded, save_sharded
from agentrl.learner.step_metrics import StepMetrics
from agentrl.models.export import copy_other_files
from agentrl.models.reference_policy import CRITIC_KEY
from agentrl.models.weight_writer import DraftLayers, WeightWriter


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
            start_groups(megatron, options.seed, config.step_timeout_s)
            self.trained, self.training = load_trained(self.model_folder, config, megatron, device, options.role)
            self.trained.pipeline.replays_routing = options.replays_routing
            self.reference_changed = False
            if options.reference is not None:
                trusted = options.trust_remote_code
                self.reference = load_reference(
                    options.reference, config, megatron, device, self.model_folder, trust_remote_code=trusted
                )
            for loaded in (self.trained, self.reference):
                if loaded is not None and loaded.model.images is not None:
                    loaded.model.images.inputs.trust_remote_code = options.trust_remote_code
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self._groups = GatherGroups.model_parallel()
        self._data_parallel_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        """Ranks that together have each token of a batch once."""
        timeout = timedelta(seconds=config.step_timeout_s)
        self._all_ranks = dist.new_group(timeout=timeout, backend="gloo")
        self.writers = dist.new_group(timeout=timeout, backend="gloo")
        """Process group of the threads that write checkpoints."""

    @override
    def computing(self) -> AbstractContextManager[None]:
        return computing_on(self.device, compiled=compiles(self.config))

    @override
    def _add_gradients(self, batch: GlobalBatch, metrics: StepMetrics) -> None:
        [micros] = batch.micro
        places = [self.trained.pipeline.local_places(micro, mask_positions(micro)) for micro in micros]
        references = self._reference_logprobs(batch, places)
        ratios = self._sequence_ratios(batch, places)

        def compute_loss(number: int, scores: TokenScores) -> torch.Tensor:
            loss, loss_metrics = self.loss(
                batch, micros[number], places[number], scores, reference_N=references[number], ratio_N=ratios[number]
            )
            metrics.add(loss, len(places[number]), loss_metrics)
            return loss

        run = self.trained.pipeline.run
        self.training.begin_pass(completes=batch.completes)
        has_entropy = batch.kind == "rl"
        run(
            micros,
            places,
            batch.temperature,
            compute_loss,
            entropy=has_entropy,
            backward=True,
            truncation=batch.truncation,
            centering=self.loss.centering(batch),
        )

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
        if self.training.states.offloaded:
            wait([self._writing])  # it reads them
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

        def add(number: int, scores: TokenScores) -> None:
            ratios.add(*self.loss.log_ratio(micros[number], places[number], scores[0]))

        pipeline.run(micros, places, batch.temperature, add, truncation=batch.truncation)
        return [*ratios.reduce(self._data_parallel_group)] if pipeline.is_last else [None] * len(micros)

    def _reference_logprobs(self, batch: GlobalBatch, places: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the reference policy's log-probabilities of each micro-batch, on last stages and on the device."""
        [micros] = batch.micro
        logprobs: list[torch.Tensor | None] = [None] * len(micros)
        if not self.loss.needs_reference(batch):
            return logprobs

        def keep(number: int, scores: TokenScores) -> None:
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

        def keep(number: int, scores: TokenScores) -> None:
            if returns:
                row_scores.update(by_row(micros[number], places[number], scores[0]))

        pipeline.run(micros, places, batch.temperature, keep, truncation=batch.truncation)
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

    @cached_property
    def _parts(self) -> list[RankPart]:
        return rank_parts(self.trained.weights, self.config.step_timeout_s)

    def streams(self) -> Sequence[StreamSource]:
        """See `StreamedWeights.streams`."""
        with self.computing():
            self._settle_weights()
            parts = self._parts
        return [PartSource(rank_part, self, self.trained.weights, self.computing, self.readable) for rank_part in parts]

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the rank's state in readable memory, while it sleeps on the CPU."""
        if self.training.states.holds(tensor):
            return self.training.states.cpu_copy(tensor)
        is_offloaded = bool(self._offload) and not tensor.untyped_storage().nbytes()
        return self._offload.cpu_copy(tensor) if is_offloaded else tensor.detach()

    def cpu_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the CPU copy of a tensor of the rank's state as of the last `save` or `sleep`; copy other tensors to the CPU."""
        if self.training.states.holds(tensor):
            return self.training.states.cpu_copy(tensor)
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
        weights = [tensor for tensor in self.trained.tensors() if self.saves_hf or not tensor.requires_grad]
        return [*weights, *reference, *self.training.tensors()]

    @override
    def _start_saving(self, folder: Path) -> Future[None]:
        model, weights = self.trained.model, self.trained.weights
        drafts = None if model.values else DraftLayers(self.model_folder, model.config.num_layers, "model.path")
        writer = None
        if self.saves_hf:
            writer = WeightWriter(folder / "model", [*weights.specs(), *(drafts.specs if drafts else ())])
        moments, first = self._moment_names(), dist.get_rank() == 0
        if first:
            shutil.rmtree(folder, ignore_errors=True)
            with names_file(folder):
                for name in ("model", "random"):
                    (folder / name).mkdir(parents=True)
                copy_other_files(self.model_folder, folder / "model")
                _copy_config(self, folder / "model")
                if writer is not None:
                    writer.create()
                (folder / "learner.json").write_text(
                    json.dumps(_description(self) | {"moments": moments}, indent=1), encoding="utf-8"
                )
        state = state_to_save(weights, self.training, self._changed_reference(), self.cpu_copy)
        if not moments:
            del state[OPTIMIZER]
        slices = [
            (weight_slice, self.cpu_copy(weight.tensor)[weight_slice.local_index])
            for weight in (weights.to_write() if writer is not None else ())
            for weight_slice in weight.slices
        ]
        states = rank_states(self.device)
        dist.barrier()

        def write() -> None:
            for name, tensors in state.items():  # first: it fails on all ranks together
                save_sharded(tensors, folder / name, self.writers)
            for weight_slice, values in slices:
                assert writer is not None
                offsets = [indices.start or 0 for indices in weight_slice.hf_slices]
                writer.write_part(weight_slice.tensor.name, values, offsets)
            if drafts is not None and first:
                if writer is None:
                    drafts.save(folder)
                else:
                    drafts.write(writer)
            save_rank_states(states, folder / "random")

        return run_in_daemon_thread(write, "checkpoint")

    def _moment_names(self) -> list[str]:
        """Return the names of the optimizer's moments, also those that only other ranks have. Collective."""
        names: list[Any] = [None] * dist.get_world_size()
        rank_names = {name for shard in self.training.shards() for name in shard.moments}
        dist.all_gather_object(names, rank_names, group=self._all_ranks)
        return sorted(set().union(*names))

    def _changed_reference(self) -> ModelWeights | None:
        return self.reference.weights if self.reference is not None and self.reference_changed else None

    @override
    def _load(self, folder: Path) -> None:
        description, expected = _read_description(folder), _description(self)
        path = CRITIC_KEY if self.trained.model.values else "model.path"
        for key, setting in (("shapes", path), ("frozen", "learner.freeze")):
            if description[key] != expected[key]:
                name = min(name for name, _ in {*_items(description[key])} ^ {*_items(expected[key])})
                raise OtherKeysError(
                    f"{folder} was written with another {key} of weights, such as {name} ({setting}); take the change back, or "
                    "start another run"
                )
        self.step = int(description["step"])
        self.reference_changed = self.reference is not None and description["reference"]
        with self.training.loading():
            self._load_state(folder, description["moments"])
        restore_rank(folder / "random" / f"rank_{dist.get_rank():05d}.pt", self.device)

    def _load_state(self, folder: Path, moments: Sequence[str]) -> None:
        self.training.allocate_moments(moments, self.step)
        state = state_to_load(self.trained.weights, self.training, self._changed_reference())
        try:
            for name, tensors in state.items():
                if name != OPTIMIZER or moments:
                    load_sharded(tensors, folder / name, self.writers)
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            words = str(error).strip().splitlines() or ["no message"]
            raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {words[-1]}") from error

    @override
    def close(self) -> None:
        wait([self._writing])
        parallel_state.destroy_model_parallel()
        super().close()


def _copy_config(rank: MegatronRank, folder: Path) -> None:
    config = json.loads((rank.model_folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["dtype"] = str(rank.trained.model.config.params_dtype).removeprefix("torch.")
    if rank.trained.model.values:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # one number a token
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _description(rank: MegatronRank) -> dict[str, Any]:
    model = rank.trained.model
    return {
        "step": rank.step,
        "ranks": dist.get_world_size(),
        "shapes": {spec.name: list(spec.shape) for spec in rank.trained.weights.specs()},
        "frozen": [] if model.values and model.images is None else sorted(rank.config.freeze),
        "reference": rank.reference_changed,
    }


def _read_description(folder: Path) -> dict[str, Any]:
    with reading(folder / "learner.json", "description of a whole checkpoint", CheckpointError):
        description: dict[str, Any] = json.loads((folder / "learner.json").read_bytes())
        if "steps" in description:
            raise OtherKeysError(
                f"{folder} was written with learner.backend=fsdp, this run has megatron; take the change back, or start another "
                "run"
            )
        return {
            "step": int(description["step"]),
            "shapes": dict(description["shapes"]),
            "frozen": list(description["frozen"]),
            "reference": bool(description["reference"]),
            "moments": [str(name) for name in description["moments"]],
        }


def _items(described: Any) -> list[tuple[str, str]]:
    return [
        (str(name), str(value))
        for name, value in (
            described.items() if isinstance(described, dict) else zip(described, described, strict=True)
        )
    ]
