"""The model of the engine: loading, one forward pass over a `Step`, taking new weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.errors import ModelError
from agentrl.models.load import load_model
from agentrl.sampler.embedded.cache import ATTENTION, SlotCache
from agentrl.sampler.embedded.errors import BadRequestError
from agentrl.sampler.embedded.step import Segment, Step

# Largest difference of log-probabilities between this engine and transformers' own attention in the check at the start.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}


class Model:
    """A Hugging Face causal model that computes steps against a `SlotCache`."""

    def __init__(self, folder: Path, dtype: torch.dtype, slots: int, context: int) -> None:
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
        self._check(dtype)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation, as the model's own configuration says."""
        found: set[int] = set()
        for config in (self._model.config, self._model.generation_config):
            ids = getattr(config, "eos_token_id", None)
            found.update([ids] if isinstance(ids, int) else ids or ())
        return frozenset(found)

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

    def load_weights(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors over the weights of the same Hugging Face names: all, or none where one does not fit.

        Raises:
            BadRequestError: a name is unknown, or a shape is another.
        """
        state = self._model.state_dict()
        for name, tensor in named:
            if name not in state:
                raise BadRequestError(f"the model has no weight {name!r}")
            if state[name].shape != tensor.shape:
                raise BadRequestError(f"weight {name!r} is {list(state[name].shape)}, not {list(tensor.shape)}")
        with torch.no_grad():
            for name, tensor in named:
                state[name].copy_(tensor)

    def load_folder(self, folder: Path) -> None:
        """Take all weights of a Hugging Face folder.

        Raises:
            BadRequestError: it cannot be loaded, or is of another model.
        """
        try:
            other = load_model(folder, self._model.dtype)
        except ModelError as error:
            raise BadRequestError(str(error)) from error
        theirs, ours = other.state_dict(), self._model.state_dict()
        if theirs.keys() != ours.keys():
            raise BadRequestError(f"{folder} is of another model: {sorted(theirs.keys() ^ ours.keys())[:3]} differ")
        self.load_weights(list(theirs.items()))
