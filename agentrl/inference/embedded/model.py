"""The engine's model: loading, forward passes over a `ForwardBatch`, and weight updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.core.errors import ModelError
from agentrl.inference.embedded.adapters import Adapter, WeightSwitch, merged_weights
from agentrl.inference.embedded.cache import ATTENTION, SlotCache
from agentrl.inference.embedded.forward_batch import ForwardBatch, Segment
from agentrl.inference.embedded.images import INPUT_CACHE_BYTES, ImageEncoder, ImageFeatures
from agentrl.inference.embedded.replies import BadRequestError
from agentrl.models.batch_invariant import make_batch_invariant
from agentrl.models.hub_tensors import hub_tensors, sent_buffers
from agentrl.models.image_positions import read_image_positions
from agentrl.models.image_processor import has_image_processor, load_image_processor
from agentrl.models.load import load_model, read_end_ids
from agentrl.models.module_outputs import ModuleOutputs, record_module_outputs
from agentrl.models.routing import REPLAYED, chooses_outside_router

# Largest difference of log-probabilities from transformers' own attention in the check after loading.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}


_SHARED_PRODUCT_WEIGHTS = 16_000_000
"""From this number of weights on, threads share each matrix product; below, each thread computes other requests."""
_MIN_THREAD_TOKENS = 48
"""Fewest tokens per thread."""
_KEY_COST = 0.005
"""Cost of attending to one key, in tokens: measured on a model of 2M weights."""


class Model:
    """A Hugging Face causal model that computes batches against a `SlotCache`.

    The matrix products of a small model are too small to share: threads would synchronise at each of them, which is slow
    when other processes need the cores. For a small model the requests are partitioned among the threads instead.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        slots: int,
        context: int,
        threads: int = 1,
        *,
        batch_invariant: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model and verify on a few tokens that its log-probabilities are those of transformers.

        With ``batch_invariant`` no product is shared among threads, and all have fixed sizes; see
        `agentrl.models.batch_invariant`. With ``trust_remote_code`` an image processor may run code of the folder.

        Raises:
            ModelError: it cannot be loaded, or its attention is not supported.
        """
        self.folder = folder
        self.end_ids = frozenset(read_end_ids(folder))
        """End tokens of the model."""
        self._model: PreTrainedModel = load_model(folder, dtype)
        model: Any = self._model
        self._decoder: Any = model.get_decoder()
        self._head: Any = model.get_output_embeddings()
        self.images = self._image_encoder(trust_remote_code=trust_remote_code)
        """Images of prompts; None: the model takes none."""
        if batch_invariant:
            # Each image is computed alone.
            make_batch_invariant(
                self._model if self.images is None else self._decoder, "sampler.embedded.batch_invariant"
            )
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", context)
        self.context = min(context, longest)
        embedding: Any = self._model.get_input_embeddings()
        self.vocabulary = int(embedding.weight.shape[0])
        self.batch_invariant = batch_invariant
        """Whether what is computed of a token depends on nothing else that is computed with it."""
        # `_check` copies from one slot to another.
        self.cache = SlotCache(max(slots, 2), self.context, batch_invariant=batch_invariant)
        # Without a mask transformers would build one. A mask of four dimensions is passed on as it is, and ignored.
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        large = self._model.num_parameters() >= _SHARED_PRODUCT_WEIGHTS and not batch_invariant
        self._threads = 1 if large else threads
        torch.set_num_threads(threads if large else 1)
        self._pool = ThreadPoolExecutor(max(1, self._threads - 1), "forward", torch.set_num_threads, (1,))
        shapes = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        self._tensors = {tensor.name: tensor for tensor in hub_tensors(self._model, shapes)}
        self._buffers = sent_buffers(self._model)
        self._layers = _record_experts(self._model, self.cache)
        self._switch = WeightSwitch(self._model)
        self._check(dtype)
        self.keeps_released_weights = False
        """Whether weights whose memory is released are kept on the CPU, and are there again with it."""
        self._backup: dict[str, Tensor] = {}
        """These."""
        self._released: dict[str, torch.Size] = {}
        """Shapes of the weights whose memory was released."""

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        return str(self._model.dtype).removeprefix("torch.")

    def compute(self, segments: Sequence[Segment], adapter: Adapter | None = None) -> tuple[Tensor, list[int]]:
        """Compute the new tokens of requests of one adapter, partitioned among the threads.

        Returns:
            float32 logits ``[K, V]`` of the tokens that are kept, segment by segment, and the order of the segments.
        """
        self._switch.use(adapter)
        number = 0 if adapter is None else adapter.number
        features: dict[str, ImageFeatures] = {}
        for image in {placed.image for segment in segments for placed in segment.images}:
            assert self.images is not None
            features[image.digest] = self.images.features(image, number)
        partitions = _partition(segments, self._threads)
        batches = [ForwardBatch([segments[index] for index in partition]) for partition in partitions]
        futures = [self._pool.submit(self.forward, batch, features) for batch in batches[1:]]
        logits = [self.forward(batches[0], features), *(future.result() for future in futures)]
        order = [partition[at] for partition, batch in zip(partitions, batches, strict=True) for at in batch.order]
        return logits[0] if len(logits) == 1 else torch.cat(logits), order

    def forward(self, batch: ForwardBatch, features: Mapping[str, ImageFeatures] | None = None) -> Tensor:
        """Return float32 logits ``[K, V]`` of the tokens ``batch.kept``, in the order of ``batch.order``.

        ``features`` are those of the batch's images by digest.
        """
        self.cache.batch = batch
        options = {"attention_mask": self._no_mask, "past_key_values": self.cache, "use_cache": True}
        with torch.inference_mode():
            if self.images is None:
                output = self._model(
                    input_ids=batch.token_ids[None],
                    position_ids=batch.positions[None],
                    logits_to_keep=batch.kept,
                    **options,
                )
                logits: Tensor = output.logits[0].float()
            else:
                inputs = self._image_inputs(batch, features or {})
                hidden = self._decoder(**inputs, **options).last_hidden_state
                logits = self._head(hidden[0, batch.kept]).float()
        return logits

    def _image_inputs(self, batch: ForwardBatch, features: Mapping[str, ImageFeatures]) -> dict[str, object]:
        """Return the inputs of the decoder: features of images in place of the embeddings of their tokens."""
        embedding: Any = self._model.get_input_embeddings()
        embeddings = embedding(batch.token_ids)
        rotary = batch.rotary if len(batch.rotary) == 1 else batch.rotary[:, None]
        inputs: dict[str, object] = {"inputs_embeds": embeddings[None], "position_ids": rotary}
        if not batch.images:
            return inputs
        deep_layers = len(features[batch.images[0][0].image.digest].deep)
        deep = [torch.zeros_like(embeddings) for _ in range(deep_layers)]
        is_image = torch.zeros(len(embeddings), dtype=torch.bool)
        for placed, rows in batch.images:
            image_features = features[placed.image.digest]
            cut = slice(placed.first, placed.first + len(rows))
            embeddings[rows] = image_features.embeddings[cut]
            is_image[rows] = True
            for target, layer in zip(deep, image_features.deep, strict=True):
                target[rows] = layer[cut]
        if deep:
            inputs |= {
                "visual_pos_masks": is_image[None],
                "deepstack_visual_embeds": [layer[is_image] for layer in deep],
            }
        return inputs

    def _image_encoder(self, *, trust_remote_code: bool) -> ImageEncoder | None:
        positions = read_image_positions(self.folder)
        if positions is None or not has_image_processor(self.folder):
            return None
        processor = load_image_processor(
            self.folder, trust_remote_code=trust_remote_code, cache_bytes=INPUT_CACHE_BYTES
        )
        return ImageEncoder(self._model, positions, processor)

    def module_outputs(self, token_ids: NDArray[np.int32]) -> ModuleOutputs:
        """Compute a row in slot 0, which nothing may use, and return the outputs of modules; see `record_module_outputs`."""
        self.check_present()
        self._switch.use(None)
        batch = ForwardBatch([Segment(0, 0, token_ids)])
        return record_module_outputs(self._model, lambda: self.forward(batch))

    def experts(self, slot: int, start: int, end: int) -> NDArray[np.int32]:
        """Return the experts ``[end - start, layers, K]`` of a slot's tokens."""
        return self.cache.experts(slot, start, end, self._layers)

    @property
    def has_experts(self) -> bool:
        """Whether there are layers of experts."""
        return self._layers > 0

    def _check(self, dtype: torch.dtype) -> None:
        """Compare log-probabilities after a prompt, a copied prefix and a decoded token with transformers' own attention.

        With images the prompt has one, which the prefix cuts in two.
        """
        ids = np.random.default_rng(0).integers(0, self.vocabulary, 16).astype(np.int32)
        prompt, reference_inputs = None, dict[str, Tensor]()
        if self.images is not None:
            ids, prompt, reference_inputs = self.images.check_prompt(ids)
        with torch.inference_mode():
            row = torch.from_numpy(ids.astype(np.int64))[None]
            reference_logits = self._model(input_ids=row, **reference_inputs).logits[0, -2:].float()
        self._decoder.set_attn_implementation(ATTENTION)
        self.cache.bind(self._decoder)

        def compute(slot: int, start: int, end: int) -> Tensor:
            rotary = None if prompt is None else prompt.rotary(start, end)
            images = () if prompt is None else prompt.segment_images(start, end)
            return self.compute([Segment(slot, start, ids[start:end], rotary=rotary, images=images)])[0]

        half, last = len(ids) // 2, len(ids) - 1
        compute(0, 0, half)
        self.cache.copy(0, 1, half)
        logits = torch.cat([compute(1, half, last), compute(1, last, last + 1)])
        difference = float((logits.log_softmax(-1) - reference_logits.log_softmax(-1)).abs().max())
        limit = _TOLERANCE.get(dtype, 0.3)
        if not difference <= limit:
            raise ModelError(
                f"model.path={self.folder}: with the embedded engine's attention its log-probabilities differ by "
                f"{difference:.2g} (at most {limit:g}); use sampler.backend=sglang or another model"
            )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return weights and buffers by Hugging Face name; of tied weights only the first."""
        self._switch.use(None)
        weights = dict(self._weights())
        tensors = self._tensors.values()
        return (
            (tensor.name, tensor.slice_weight(weights[tensor.weight])) for tensor in tensors if tensor.weight in weights
        )

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        yield from self._buffers.items()

    def merged(self, config: Mapping[str, Any], named: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the weights that a LoRA adapter changes; see `merged_weights`."""
        self.check_present()
        self._switch.use(None)
        return merged_weights(dict(self._model.named_parameters()), config, named)

    def release_weights(self) -> None:
        """Free the memory of the weights; with `keeps_released_weights` they are kept on the CPU."""
        self._switch.use(None)
        if self.images is not None:
            self.images.clear()
        for name, weight in self._weights():
            self._released[name] = weight.shape
            if self.keeps_released_weights:
                self._backup[name] = weight.data.cpu()
            weight.data = weight.new_empty(0)

    def allocate_weights(self) -> None:
        """Allocate the memory of the weights again, filled with NaN, or with what was kept."""
        for name, weight in self._weights():
            if self.keeps_released_weights:
                weight.data = self._backup.pop(name).to(weight.device)
            else:
                weight.data = weight.new_full(self._released[name], torch.nan)
        self._released = {}

    def check_present(self) -> None:
        """Check that the weights are in memory.

        Raises:
            BadRequestError: their memory was released.
        """
        if self._released:
            raise BadRequestError("the memory of the weights was released: call /resume_memory_occupation first")

    def check_weights(self, shapes: Sequence[tuple[str, torch.Size]]) -> None:
        """Check that weights of these names and shapes fit.

        Raises:
            BadRequestError: a name is unknown, a shape differs, or the weights' memory was released.
        """
        self.check_present()
        for name, shape in shapes:
            if name not in self._tensors:
                raise BadRequestError(f"the model has no weight {name!r}")
            if (model_shape := self._tensors[name].shape) != shape:
                raise BadRequestError(f"weight {name!r} is {list(model_shape)}, not {list(shape)}")

    def load_weights(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors into the weights of the same Hugging Face names: all of them, or none if one does not fit.

        Raises:
            BadRequestError: a name is unknown, or a shape differs.
        """
        self.check_weights([(name, tensor.shape) for name, tensor in named])
        self._switch.use(None)
        if self.images is not None:
            self.images.clear()
        state = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in named:
                weight = self._tensors[name]
                weight.slice_weight(state[weight.weight]).copy_(tensor)

    def load_folder(self, folder: Path) -> None:
        """Load all weights of a Hugging Face folder, or of a folder with only safetensors files.

        Raises:
            BadRequestError: it cannot be loaded, or lacks weights of this model.
        """
        try:
            loaded = self._read(folder)
        except (ModelError, OSError, SafetensorError) as error:
            raise BadRequestError(f"{folder} cannot be read: {error}") from error
        self.check_present()
        missing_names = dict(self.parameters()).keys() - loaded.keys()
        if missing_names:
            raise BadRequestError(f"{folder} is of another model: it lacks the weights {sorted(missing_names)[:3]}")
        self.load_weights(list(loaded.items()))

    def _read(self, folder: Path) -> dict[str, Tensor]:
        if (folder / "config.json").exists():
            state = load_model(folder, self._model.dtype).state_dict()
            return {
                name: weight.slice_weight(state[weight.weight])
                for name, weight in self._tensors.items()
                if weight.weight in state
            }
        files = sorted(folder.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _record_experts(model: PreTrainedModel, cache: SlotCache) -> int:
    """Have the experts that routers choose written into a cache; return the model's layers, or 0 if there are no such routers."""
    if model.config.model_type not in REPLAYED:
        return 0
    decoder: Any = model.base_model
    blocks = [*decoder.layers]
    mixtures = [(number, block.mlp) for number, block in enumerate(blocks) if hasattr(block.mlp, "experts")]
    if any(chooses_outside_router(mixture) for _, mixture in mixtures):
        return 0

    def record(number: int, router: nn.Module, inputs: object, output: tuple[Tensor, ...]) -> None:
        if cache.computes:
            cache.record_experts(number, output[2])

    for number, mixture in mixtures:
        mixture.gate.register_forward_hook(partial(record, number))
    return len(blocks)


def _partition(segments: Sequence[Segment], threads: int) -> list[list[int]]:
    """Return the segments' indices in at most ``threads`` partitions of about equal cost.

    Decoding requests stay sorted by slot, so that the slots of a partition are contiguous.
    """
    order = sorted(range(len(segments)), key=lambda index: (len(segments[index].tokens) > 1, segments[index].slot))
    counts = np.array([len(segments[index].tokens) for index in order])
    keys = np.array([segments[index].start for index in order]) + counts
    ends = (counts * (1 + _KEY_COST * keys)).cumsum()
    count = max(1, min(threads, len(order), int(counts.sum()) // _MIN_THREAD_TOKENS))
    # A request belongs to the partition that contains the midpoint of its cost.
    middles = (ends + np.concatenate([[0.0], ends[:-1]])) / 2
    assigned = np.minimum((middles / ends[-1] * count).astype(int), count - 1)
    return [group.tolist() for number in range(count) if len(group := np.array(order)[assigned == number])]
