"""One rank of the Megatron-Core learner. The process group must exist before it is constructed.

A checkpoint loads with any tensor, pipeline, expert and data parallel sizes::

    folder/
      model/         Hugging Face folder: safetensors in the learner's precision, configuration, the tokenizer's files
      megatron/      Megatron-Core's distributed format (torch_dist): float32 weights and moments, and a changed reference
      random/        one file per rank: torch, CUDA, NumPy and Python states
      learner.json   finished steps, number of ranks, shapes of weights, frozen weights
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from typing_extensions import override

from agentrl.batch.microbatch import GlobalBatch
from agentrl.core.atomic_files import names_file
from agentrl.core.background import run_in_daemon_thread
from agentrl.core.errors import CheckpointError
from agentrl.core.reading import reading
from agentrl.distributed.base import TensorSpec
from agentrl.learner.base import RankOptions, RowScores, StreamSource
from agentrl.learner.device import compiles
from agentrl.learner.export import plan_buckets
from agentrl.learner.megatron.cpu import computing_on
from agentrl.learner.megatron.distributed_checkpoint import ShardedFiles
from agentrl.learner.megatron.fixes import SHARDING
from agentrl.learner.megatron.options import learner_options
from agentrl.learner.megatron.pipeline import Scores
from agentrl.learner.megatron.policies import LoadedModel, copy_weights, load_reference, load_trained, start_groups
from agentrl.learner.megatron.senders import PartSource, RankPart, rank_parts
from agentrl.learner.megatron.weights import GatherGroups
from agentrl.learner.random_states import rank_states, restore_rank, save_rank_states
from agentrl.learner.rank import BackendRank, SequenceRatios, by_row, mask_positions, score_positions
from agentrl.learner.step_metrics import StepMetrics
from agentrl.models.export import copy_other_files
from agentrl.models.reference_policy import CRITIC_KEY
from agentrl.models.weight_writer import DraftLayers, WeightWriter

_BUCKET_BYTES = 256 << 20
"""Weights that are gathered at a time."""


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
        self.writers = dist.new_group(backend="gloo")
        """Of the threads that write checkpoints."""
        self.writer_groups = GatherGroups.with_rank_0()
        """Of the threads that gather weights for them."""

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
        has_entropy = batch.kind == "rl"
        run(
            micros,
            places,
            batch.temperature,
            compute_loss,
            entropy=has_entropy,
            backward=True,
            truncation=batch.truncation,
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

        def add(number: int, scores: Scores) -> None:
            ratios.add(*self.loss.log_ratio(micros[number], places[number], scores[0]))

        pipeline.run(micros, places, batch.temperature, add, truncation=batch.truncation)
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
        return rank_parts(self.trained.weights)

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
        return [*self.trained.tensors(), *reference, *self.training.tensors(gathered=False)]

    @override
    def _start_saving(self, folder: Path) -> Future[None]:
        model = self.trained.model
        drafts = None if model.values else DraftLayers(self.model_folder, model.config.num_layers, "model.path")
        writer = WeightWriter(folder / "model", [*self.trained.weights.specs(), *(drafts.specs if drafts else ())])
        first = dist.get_rank() == 0
        if first:
            shutil.rmtree(folder, ignore_errors=True)
            with names_file(folder):
                for name in ("model", "megatron", "random"):
                    (folder / name).mkdir(parents=True)
                copy_other_files(self.model_folder, folder / "model")
                _copy_config(self, folder / "model")
                writer.create()
                (folder / "learner.json").write_text(json.dumps(_description(self), indent=1), encoding="utf-8")
        dist.barrier()
        with self.training.reading(self.readable):
            state = _sharded_state(self, loading=False)
        dict_list_map_inplace(lambda shard: _move_to_cpu(shard, self.cpu_copy), state)
        files = ShardedFiles(state, folder / "megatron")
        states = rank_states(self.device)

        def write() -> None:
            files.write(self.writers)
            _write_model(self, writer)
            if drafts is not None and first:
                drafts.write(writer)
            save_rank_states(states, folder / "random")

        return run_in_daemon_thread(write, "checkpoint")

    @override
    def _load(self, folder: Path) -> None:
        description, expected = _read_description(folder), _description(self)
        path = CRITIC_KEY if self.trained.model.values else "model.path"
        for key, setting in (("shapes", path), ("frozen", "learner.freeze")):
            if description[key] != expected[key]:
                name = min(name for name, _ in {*_items(description[key])} ^ {*_items(expected[key])})
                raise CheckpointError(f"{folder} was written with another {key} of weights, such as {name} ({setting})")
        self.reference_changed = self.reference is not None and description["reference"]
        with self.training.loading():
            self._load_state(folder)
        self.step = int(description["step"])
        restore_rank(folder / "random" / f"rank_{dist.get_rank():05d}.pt", self.device)

    def _load_state(self, folder: Path) -> None:
        state = _sharded_state(self, loading=True)
        try:
            loaded = dist_checkpointing.load(state, str(folder / "megatron"))
        except Exception as error:
            words = str(error).strip().splitlines() or ["no message"]
            raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {words[-1]}") from error
        for number, chunk in enumerate(self.trained.model.chunks):
            chunk.load_state_dict(loaded[f"model{number}"])
            if self.reference is not None and self.reference_changed:
                self.reference.model.chunks[number].load_state_dict(loaded[f"reference{number}"])
        self.training.load(loaded["optimizer"])

    @override
    def close(self) -> None:
        wait([self._writing])
        parallel_state.destroy_model_parallel()
        super().close()


def _write_model(rank: MegatronRank, writer: WeightWriter) -> None:
    """Gather the weights on rank 0, which writes them."""
    groups = rank.writer_groups
    if all(dist.get_rank(group) < 0 for group in (groups.layers, groups.experts)):
        return
    fault: OSError | None = None
    for bucket_plan in plan_buckets(rank.trained.weights.specs(), _BUCKET_BYTES):
        into = [(spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in bucket_plan.specs]
        rank.trained.weights.gather(into, groups, rank.cpu_copy)
        if dist.get_rank() == 0 and fault is None:
            try:
                for name, tensor in into:
                    writer.write(name, tensor)
            except OSError as error:
                fault = error  # other ranks still send their weights
    if fault is not None:
        raise fault


def _sharded_state(rank: MegatronRank, *, loading: bool) -> dict[str, Any]:
    """Return the state in Megatron-Core's sharded form."""
    chunks = rank.trained.model.chunks
    state = {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
    optimizer = rank.training.optimizer.sharded_state_dict(state, is_loading=loading, metadata=SHARDING)
    if rank.reference is not None and rank.reference_changed:
        for number, chunk in enumerate(rank.reference.model.chunks):
            state[f"reference{number}"] = chunk.sharded_state_dict(prefix="reference.")
    return state | {"optimizer": optimizer}


def _move_to_cpu(shard: Any, cpu_copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(shard, ShardedTensor | ShardedTensorFactory) and isinstance(shard.data, torch.Tensor):
        shard.data = cpu_copy(shard.data)
    return shard


def _copy_config(rank: MegatronRank, folder: Path) -> None:
    config = json.loads((rank.model_folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["dtype"] = str(rank.trained.model.config.params_dtype).removeprefix("torch.")
    if rank.trained.model.values:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # one number a token
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _description(rank: MegatronRank) -> dict[str, Any]:
    return {
        "step": rank.step,
        "ranks": dist.get_world_size(),
        "shapes": {spec.name: list(spec.shape) for spec in rank.trained.weights.specs()},
        "frozen": sorted(rank.config.freeze),
        "reference": rank.reference_changed,
    }


def _read_description(folder: Path) -> dict[str, Any]:
    with reading(folder / "learner.json", "description of a whole checkpoint", CheckpointError):
        description: dict[str, Any] = json.loads((folder / "learner.json").read_bytes())
        return {
            "step": int(description["step"]),
            "shapes": dict(description["shapes"]),
            "frozen": list(description["frozen"]),
            "reference": bool(description["reference"]),
        }


def _items(described: Any) -> list[tuple[str, str]]:
    return [
        (str(name), str(value))
        for name, value in (
            described.items() if isinstance(described, dict) else zip(described, described, strict=True)
        )
    ]
