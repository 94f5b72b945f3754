"""Outputs of modules that an SGLang engine has written (``--debug-tensor-dump-output-folder``), by the names of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.models.module_outputs import ModuleOutputs

_INPUT_IDS = ".forward_batch_info.input_ids"
_NEWEST = 64
"""Forward passes of a rank that are looked at, the last ones: every decoded token is one."""
_LAST_PARTS = {".self_attn.o_proj": ".self_attn", ".mlp.down_proj": ".mlp"}
"""Modules whose output is that of the module around them, of which SGLang writes none."""


def read_dump(folder: Path, token_ids: Sequence[int], *, tensor_ranks: int = 1) -> ModuleOutputs:
    """Return the outputs for the last token of a row that an engine has computed in one forward pass; empty without one.

    Of an engine of several tensor-parallel ranks these are the outputs of norms and of the embedding: other modules may have
    the rank's part of a sum.

    Args:
        folder: ``debug_tensor_dump_output_folder``. It has a folder for each rank of each engine.
        token_ids: of the row.
        tensor_ranks: of the engine.
    """
    outputs: dict[str, NDArray[np.float32]] = {}
    for rank_folder in sorted(folder.glob("TP0_PP*")):
        passes = sorted(rank_folder.glob("Pass*.pt"))[-_NEWEST:]
        for path in reversed(passes):
            tensors = torch.load(path, weights_only=True)
            if any(_is_row(name, tensor, token_ids) for name, tensor in tensors.items()):
                for name, output in tensors.items():
                    _add(outputs, name, output, tensor_ranks)
                break
    return outputs


def _is_row(name: str, tensor: object, token_ids: Sequence[int]) -> bool:
    return name.endswith(_INPUT_IDS) and isinstance(tensor, torch.Tensor) and tensor.tolist() == [*token_ids]


def _add(outputs: dict[str, NDArray[np.float32]], name: str, output: object, tensor_ranks: int) -> None:
    hidden = output[0] if isinstance(output, list) and output else output  # a norm returns the residual, too
    if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2 or not hidden.is_floating_point():
        return
    if tensor_ranks > 1 and not name.endswith(("norm", "embed_tokens")):
        return
    for submodule, module in _LAST_PARTS.items():
        if name.endswith(submodule):
            name = name.removesuffix(submodule) + module
    outputs[name] = hidden.flatten(0, -2)[-1].float().numpy()
