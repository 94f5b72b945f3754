"""The tensor-parallel ranks of an SGLang engine load weights of which only the first has a body. Run by SGLang's interpreter.

Its arguments are a model's folder, and a file with a JSON list of buckets: load format, and an entry for each rank. Prints for
each bucket's loader what the ranks have otherwise than after a load of the files.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2


def load_model(folder: Path, rank: int, store: Path) -> Any:
    """Return a rank's shard of the model in ``folder``, with SGLang's process groups."""
    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        grammar_backend="none",
        max_total_tokens=1024,
        skip_tokenizer_init=True,
        mem_fraction_static=0.1,
        tp_size=RANKS,
    )
    one_batch.publish(args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    init_distributed_environment(RANKS, rank, f"file://{store}", rank, "gloo", timeout=60)
    initialize_model_parallel("gloo")
    config = one_batch.ModelConfig.from_server_args(args)
    one_batch.bootstrap.init_layer_runtime(model_config=config)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def differing(folder: Path, buckets: list[dict[str, Any]], rank: int, store: Path) -> dict[str, list[str]]:
    """Load the buckets as the scheduler of a rank does; return by load format which parameters are not those of ``folder``."""
    model, names = load_model(folder, rank, store), dict[str, list[str]]()
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for load_format in dict.fromkeys(bucket["load_format"] for bucket in buckets):
        for parameter in model.parameters():
            parameter.detach().zero_()
        for bucket in buckets:
            if bucket["load_format"] == load_format:
                named = MultiprocessingSerializer.deserialize(bucket["serialized_named_tensors"][rank])
                dynamic_import(load_format)(model, named)
        names[load_format] = [
            name for name, parameter in model.named_parameters() if not torch.equal(parameter, expected[name])
        ]
    return names


def main(folder: Path, buckets: list[dict[str, Any]]) -> None:
    """Fork the ranks, and print their results as JSON."""
    work = Path(tempfile.mkdtemp())
    for rank in range(RANKS):
        if not os.fork():
            try:
                result: Any = differing(folder, buckets, rank, work / "store")
            except BaseException:
                result = {"error": traceback.format_exc()}
            (work / f"{rank}.json").write_text(json.dumps(result))
            if dist.is_initialized():
                dist.destroy_process_group()
            os._exit(0)
    for _ in range(RANKS):
        os.wait()
    print(json.dumps([json.loads((work / f"{rank}.json").read_text()) for rank in range(RANKS)]))


if __name__ == "__main__":
    from sglang.benchmark import one_batch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.model_loader import get_model
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import MultiprocessingSerializer, dynamic_import

    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
