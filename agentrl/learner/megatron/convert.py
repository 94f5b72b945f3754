"""Conversion of Hugging Face folders to distributed checkpoints of Megatron-Core and back, on CPUs.

Ranks divide the layers. Each reads and writes only the weights of its layers, one Hugging Face tensor at a time.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.multiprocessing.spawn import start_processes

from agentrl.core.errors import ConfigError, ModelError
from agentrl.distributed.base import TensorSpec
from agentrl.learner.megatron.cpu import computing_on
from agentrl.learner.megatron.distributed_checkpoint import (
    METADATA,
    is_distributed_checkpoint,
    load_distributed,
    save_distributed,
)
from agentrl.learner.megatron.families.registry import read_family
from agentrl.learner.megatron.layout import Layout
from agentrl.learner.megatron.model import MegatronModel, build_model
from agentrl.learner.megatron.weights import ModelWeights, load_weights
from agentrl.models.export import check_free, copy_other_files, write_config
from agentrl.models.load import as_dtype
from agentrl.models.weight_files import WeightFiles
from agentrl.models.weight_writer import DRAFTS, DraftLayers, WeightWriter

_KEY = "SOURCE"
_CPU = torch.device("cpu")


def convert(source: Path, out: Path, ranks: int) -> str:
    """Write the model in ``source`` to ``out`` in the other format, with its configuration and tokenizer.

    Args:
        source: a Hugging Face folder with safetensors files, or a distributed checkpoint with the model's ``config.json``.
        out: does not exist, or is empty.
        ranks: processes that divide the layers.

    Returns:
        the name of the written format, for messages.

    Raises:
        ConfigError: ``out`` holds files, or there are more ranks than layers.
        ModelError: ``source`` holds no model of a known family, or its weights do not match its ``config.json``.
    """
    check_free(out)
    family, hf = read_family(source, _KEY)
    if family.reads_images:
        raise ModelError(
            f"{_KEY}={source} is a model with model_type={family.hf_type!r}, which reads images: models with a vision tower are "
            "not converted"
        )
    if not 1 <= ranks <= hf.num_hidden_layers:
        raise ConfigError(f"--ranks={ranks}: set it to 1 to {hf.num_hidden_layers}, the model's layers")
    to_hf = is_distributed_checkpoint(source)
    dtype = _dtype(hf, None if to_hf else WeightFiles(source, _KEY).specs(), source)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        rank_args = (Path(folder) / "store", ranks, _write_hf if to_hf else _write_distributed, source, out, dtype)
        if ranks == 1:
            _convert_layers(0, *rank_args)
        else:
            # Forks are safe, as this process has computed nothing. They have imported Megatron-Core.
            start_processes(_convert_layers, rank_args, ranks, start_method="fork")  # type: ignore[no-untyped-call]
    copy_other_files(source, out, without=METADATA)
    write_config(source, out, str(dtype).removeprefix("torch."))
    return "Hugging Face folder" if to_hf else "distributed checkpoint of Megatron-Core"


def _dtype(hf: Any, specs: list[TensorSpec] | None, source: Path) -> torch.dtype:
    """Return the most frequent dtype of the weights in the files; for a distributed checkpoint, that in ``config.json``.

    Raises:
        ModelError: there are no weights, or they are quantised.
    """
    if specs is None:
        return as_dtype(hf.dtype or "bfloat16")
    most_common = Counter(spec.dtype for spec in specs).most_common(1)
    dtype = most_common[0][0] if most_common else "missing"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ModelError(
            f"{_KEY}={source}: its weights are {dtype}; it needs safetensors files with 16 or 32 bits a weight"
        )
    return as_dtype(dtype)


def _convert_layers(
    rank: int,
    store: Path,
    ranks: int,
    write: Callable[[MegatronModel, Path, Path], None],
    source: Path,
    out: Path,
    dtype: torch.dtype,
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        with computing_on(_CPU):
            options = _stages(read_family(source, _KEY)[1].num_hidden_layers, ranks)
            Layout.from_options(options).start(0)
            write(build_model(source, options, device=_CPU, dtype=dtype, key=_KEY), source, out)
            dist.barrier()
            parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


def _stages(layers: int, ranks: int) -> dict[str, Any]:
    """Return the pipeline options with which ranks divide the layers as evenly as possible."""
    if ranks == 1:
        return {}
    stages = [["decoder"] * (layers // ranks + (rank < layers % ranks)) for rank in range(ranks)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return {"pipeline_model_parallel_size": ranks, "pipeline_model_parallel_layout": stages}


def _write_distributed(model: MegatronModel, source: Path, out: Path) -> None:
    load_weights(ModelWeights(model), source, _KEY)
    save_distributed(model, out)
    if dist.get_rank() == 0:
        DraftLayers(source, model.config.num_layers, _KEY).save(out)


def _write_hf(model: MegatronModel, source: Path, out: Path) -> None:
    load_distributed(model, source, _KEY)
    weights = ModelWeights(model)
    drafts = DraftLayers(source / DRAFTS, model.config.num_layers, _KEY)
    writer = WeightWriter(out, [*weights.specs(), *drafts.specs])
    if dist.get_rank() == 0:
        writer.create()
        drafts.write(writer)
    dist.barrier()
    for name, tensor in weights.full_tensors():
        writer.write(name, tensor)
