"""The model of the engine: loading, one forward pass over a `Step`, taking new weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.core.errors import ModelError
from agentrl.inference.embedded.cache import ATTENTION, SlotCache
from agentrl.inference.embedded.errors import BadRequestError
from agentrl.inference.embedded.forward_batch import Segment, Step
from agentrl.models.load import load_model

# Largest difference of log-probabilities between this engine and transformers' own attention in the check at the start.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}


_LARGE = 16_000_000
"""Weights from which on threads share each matrix product; below, each computes requests of its own."""
_WORTH = 48
"""Tokens that a thread gets at least."""
_KEY_COST = 0.005
"""What attending to one key costs, in tokens: measured on a model of 2M weights."""


class Model:
    """A Hugging Face causal model that computes steps against a `SlotCache`.

    The products of a small model are too small to share: threads would wait for each other at each of them, for as
    long as the scheduler likes where other processes want the cores. So they divide the requests instead.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, slots: int, context: int, threads: int = 1) -> None:
        """Load the model and prove on a few tokens that it computes what transformers does.

        Raises:
            ModelError: it cannot be loaded, or its attention is none that this engine has.
        """
        self.folder = folder
        self._model: PreTrainedModel = load_model(folder, dtype)
        longest = getattr(self._model.config, "max_position_embeddings", context)
        self.context = min(context, longest)
        embedding: Any = self._model.get_input_embeddings()
        self.vocabulary = int(embedding.weight.shape[0])
        self.cache = SlotCache(slots, self.context)
        # transformers would build a mask of its own; a mask of four dimensions is taken as it is, and ours is unused.
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        large = self._model.num_parameters() >= _LARGE
        self._threads = 1 if large else threads
        torch.set_num_threads(threads if large else 1)
        self._pool = ThreadPoolExecutor(max(1, self._threads - 1), "forward", torch.set_num_threads, (1,))
        self._check(dtype)
        self._dropped: dict[str, torch.Size] = {}
        """Shapes of the weights whose memory was given back."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation, as the model's own configuration says."""
        found: set[int] = set()
        for config in (self._model.config, self._model.generation_config):
            ids = getattr(config, "eos_token_id", None)
            found.update([ids] if isinstance(ids, int) else ids or ())
        return frozenset(found)

    def compute(self, segments: Sequence[Segment]) -> tuple[Tensor, list[int]]:
        """Compute what the requests add, on all threads.

        Returns:
            float32 logits ``[B, V]`` of what follows each, and of which segment each row is.
        """
        parts = _divide(segments, self._threads)
        steps = [Step([segments[index] for index in part]) for part in parts]
        others = [self._pool.submit(self.forward, step) for step in steps[1:]]
        logits = [self.forward(steps[0]), *(other.result() for other in others)]
        order = [part[row] for part, step in zip(parts, steps, strict=True) for row in step.order]
        return logits[0] if len(logits) == 1 else torch.cat(logits), order

    def forward(self, step: Step) -> Tensor:
        """Return float32 logits ``[B, V]`` of what follows each request's last token, in the step's order."""
        self.cache.step = step
        with torch.inference_mode():
            output = self._model(
                input_ids=step.token_ids[None],
                position_ids=step.positions[None],
                attention_mask=self._no_mask,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=step.last,
            )
            logits: Tensor = output.logits[0].float()
        return logits

    def _check(self, dtype: torch.dtype) -> None:
        """Compare a prompt, a copied prefix and a decoded token with transformers' own attention."""
        tokens = np.random.default_rng(0).integers(0, self.vocabulary, 16).astype(np.int32)
        with torch.inference_mode():
            wanted = self._model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -2:].float()
        self._model.set_attn_implementation(ATTENTION)
        self.cache.bind(self._model)
        self.forward(Step([Segment(0, 0, tokens[:8])]))
        self.cache.copy(0, 1, 8)
        before = self.forward(Step([Segment(1, 8, tokens[8:15])]))
        after = self.forward(Step([Segment(1, 15, tokens[15:])]))
        got = torch.cat([before, after])
        difference = float((got.log_softmax(-1) - wanted.log_softmax(-1)).abs().max())
        limit = _TOLERANCE.get(dtype, 0.3)
        if not difference <= limit:
            raise ModelError(
                f"model.path={self.folder}: with the embedded engine's attention its log-probabilities differ by "
                f"{difference:.2g} (at most {limit:g}); use sampler.backend=sglang or another model"
            )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the weights by Hugging Face name; of tied ones only the first."""
        return self._model.named_parameters()

    def drop_weights(self) -> None:
        """Give the weights' memory back."""
        for name, parameter in self._model.named_parameters():
            self._dropped[name] = parameter.shape
            parameter.data = parameter.new_empty(0)

    def take_weights(self) -> None:
        """Take memory for weights again; what is in it is no number."""
        for name, parameter in self._model.named_parameters():
            parameter.data = parameter.new_full(self._dropped[name], torch.nan)
        self._dropped = {}

    def check_present(self) -> None:
        """Check that there are weights.

        Raises:
            BadRequestError: their memory was given back.
        """
        if self._dropped:
            raise BadRequestError("the memory of the weights was given back: /resume_memory_occupation comes first")

    def check_weights(self, shapes: Sequence[tuple[str, torch.Size]]) -> None:
        """Check that weights of these names and shapes fit.

        Raises:
            BadRequestError: a name is unknown, a shape is another, or the weights' memory was given back.
        """
        self.check_present()
        state = self._model.state_dict()
        for name, shape in shapes:
            if name not in state:
                raise BadRequestError(f"the model has no weight {name!r}")
            if state[name].shape != shape:
                raise BadRequestError(f"weight {name!r} is {list(state[name].shape)}, not {list(shape)}")

    def load_weights(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors over the weights of the same Hugging Face names: all, or none where one does not fit.

        Raises:
            BadRequestError: a name is unknown, or a shape is another.
        """
        self.check_weights([(name, tensor.shape) for name, tensor in named])
        state = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in named:
                state[name].copy_(tensor)

    def load_folder(self, folder: Path) -> None:
        """Take all weights of a Hugging Face folder; one without a configuration holds nothing but weights.

        Raises:
            BadRequestError: it cannot be loaded, or is of another model.
        """
        try:
            theirs = self._read(folder)
        except (ModelError, OSError, SafetensorError) as error:
            raise BadRequestError(f"{folder} cannot be read: {error}") from error
        self.check_present()
        ours = dict(self.parameters())
        missing = ours.keys() - theirs.keys()
        if missing:
            raise BadRequestError(f"{folder} is of another model: it has no {sorted(missing)[:3]}")
        self.load_weights(list(theirs.items()))

    def _read(self, folder: Path) -> dict[str, Tensor]:
        if (folder / "config.json").exists():
            return load_model(folder, self._model.dtype).state_dict()
        files = sorted(folder.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _divide(segments: Sequence[Segment], threads: int) -> list[list[int]]:
    """Return the segments' indices in at most ``threads`` parts that take about as long as each other.

    Decoding requests stay sorted by slot, so that each part's slots lie together.
    """
    order = sorted(range(len(segments)), key=lambda index: (len(segments[index].tokens) > 1, segments[index].slot))
    counts = np.array([len(segments[index].tokens) for index in order])
    keys = np.array([segments[index].start for index in order]) + counts
    ends = (counts * (1 + _KEY_COST * keys)).cumsum()
    parts = max(1, min(threads, len(order), int(counts.sum()) // _WORTH))
    # A request goes to the part that holds its middle.
    middles = (ends + np.concatenate([[0.0], ends[:-1]])) / 2
    which = np.minimum((middles / ends[-1] * parts).astype(int), parts - 1)
    return [group.tolist() for part in range(parts) if len(group := np.array(order)[which == part])]
