"""A forward pass of the weights that the learner sends: which of engine and learner computes another model, and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import ModelError
from agentrl.learner.base import LearnerGroup
from agentrl.models.module_outputs import ModuleOutputs, record_module_outputs

_MOST_BYTES = 8 << 30
"""Largest size of the model's files: larger ones would take minutes, and the memory of the driver's machine."""
_BUCKET_BYTES = 1 << 28
_FLOORS = {True: 1e-3, False: 5e-2}
"""Relative distance of outputs that rounding does not explain, by whether the engine computes in float32."""
_JUMP = 5.0
"""By how much the distance grows in the module that is wrong: rounding grows slowly from layer to layer."""


@dataclass(frozen=True, slots=True)
class ReferencePass:
    """What transformers computes in float32 on the CPU, with the weights that the learner sends."""

    logprobs: NDArray[np.float32]
    """Log-probabilities of the tokens from ``start`` on."""
    outputs: ModuleOutputs


def reference_pass(folder: Path, learner: LearnerGroup, token_ids: NDArray[np.int32], start: int) -> ReferencePass:
    """Compute a row. Blocks.

    Args:
        folder: of the model.
        learner: its weights are read.
        token_ids: of the row.
        start: the first token whose log-probability is returned, at least 1.

    Raises:
        ModelError: the model cannot be loaded, or its files have more than 8 GiB.
    """
    import torch

    from agentrl.models.hub_tensors import hub_tensors
    from agentrl.models.load import load_model

    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size > _MOST_BYTES:
        raise ModelError(f"{folder} has {size / 2**30:.0f} GiB of weights, more than {_MOST_BYTES >> 30}")
    model = load_model(folder, "float32")
    state = model.state_dict()
    tensors = {
        tensor.name: tensor for tensor in hub_tensors(model, {name: tuple(w.shape) for name, w in state.items()})
    }
    with torch.no_grad():
        for bucket in learner.buckets(_BUCKET_BYTES):
            for name, weight in bucket.tensors():
                if name in tensors:
                    tensors[name].slice_weight(state[tensors[name].weight]).copy_(weight)
    ids_T = torch.from_numpy(token_ids.astype(np.int64))
    logits: list[torch.Tensor] = []

    def compute() -> None:
        logits.append(model(ids_T[None]).logits[0].float())

    with torch.inference_mode():
        outputs = record_module_outputs(model, compute)
        logprobs_T = logits[0][:-1].log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]
    return ReferencePass(logprobs_T[start - 1 :].numpy(), outputs)


def first_difference(engine: ModuleOutputs, reference: ModuleOutputs, *, is_float32: bool) -> str | None:
    """Return in words the first module whose output rounding does not explain; None if there is none, or nothing to compare."""
    floor = _FLOORS[is_float32]
    largest = 0.0
    for name, expected in reference.items():
        if name not in engine or engine[name].shape != expected.shape:
            continue
        distance = float(np.linalg.norm(engine[name] - expected) / max(float(np.linalg.norm(expected)), 1e-30))
        if not distance <= max(floor, _JUMP * largest):
            return f"the first module whose output differs is {name} (relative distance {distance:.2g})"
        largest = max(largest, distance)
    return None
