"""What ranks compute in the tests; see `forked`. Imported there only, as Megatron-Core takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file

from agentrl.core.errors import ConfigError
from agentrl.learner.megatron.layout import Layout
from agentrl.learner.megatron.model import MegatronModel, build_model, packed_tokens
from agentrl.learner.megatron.weights import GatherGroups, ModelWeights, load_weights
from tests.unit.learner.megatron.models import LAYOUTS, MODELS, rows

CPU = torch.device("cpu")


def one_rank(folder: Path) -> dict[str, Any]:
    """Every model on one rank: which weights come back other than they are in the files, and logits."""
    Layout().start(0)
    return {name: _computed(folder / name, {}) for name in MODELS}


def two_ranks(folder: Path) -> dict[str, Any]:
    """Every layout of two ranks; logits are None with pipeline stages."""
    found = {}
    for name, (model, options) in LAYOUTS.items():
        Layout.of(options).start(0)
        found[name] = _computed(folder / model, options)
        parallel_state.destroy_model_parallel()
    return found


def refused_options(folder: Path) -> dict[str, str]:
    """Messages by option, and what a known one became."""
    Layout().start(0)
    known = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    built = build_model(folder / "qwen3", known | {"overlap_grad_reduce": True}, device=CPU, dtype=torch.float32)
    found = {"taken": f"{built.config.recompute_granularity} {built.config.recompute_num_layers}"}
    for option in ("recompute_granularty", "num_layers", "recompute_granularity"):
        try:
            build_model(folder / "qwen3", {option: "some"}, device=CPU, dtype=torch.float32)
        except ConfigError as error:
            found[option] = str(error)
    return found


def _computed(folder: Path, options: dict[str, Any]) -> tuple[list[str], torch.Tensor | None]:
    """Return the weights that differ from the files on any rank, and logits."""
    built = build_model(folder, options, device=CPU, dtype=torch.float32)
    weights = ModelWeights(built)
    load_weights(weights, folder)
    files = load_file(folder / "model.safetensors")
    into = [(spec.name, torch.full(spec.shape, 7.0)) for spec in weights.specs()]
    weights.gather(into, GatherGroups.of_megatron())
    assert {name for name, _ in into} == files.keys()
    wrong = [name for name, out in into if not torch.equal(out, files[name])]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, wrong)
    logits = None if "pipeline_model_parallel_size" in options else _logits(built)
    return [name for names in everywhere for name in names], logits


@torch.no_grad()
def _logits(built: MegatronModel) -> torch.Tensor:
    """Return logits ``[L, V]`` of `rows`."""
    token_ids_L, positions_L, row_L = rows()
    [chunk] = built.chunks
    packed = packed_tokens(positions_L, row_L, CPU, torch.float32)
    chunk.eval()
    found = chunk(token_ids_L[None], positions_L[None], None, packed_seq_params=packed, runtime_gather_output=True)
    return found[0]
