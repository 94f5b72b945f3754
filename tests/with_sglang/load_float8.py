"""Run by an interpreter with SGLang on a CPU: loads float8 models as SGLang does, from disk and from what agentrl sends.

Each folder in the arguments has a float8 folder ``disk``, a bfloat16 folder ``plain``, ``overrides.json``, and ``*.buckets``: a
line for each bucket of weights. ``changes`` has buckets of changes, and ``changed`` the float8 folder after them. The CPU build
has no float8 kernels: what SGLang does with weights after a load, for its kernels, is left out, and no forward pass is computed.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from agentrl_weight_loaders import load_changes
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
from sglang.srt.layers.quantization import fp8
from sglang.srt.layers.quantization.fp8_utils import per_block_cast_to_fp8
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader import get_model
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_cache.daemon import SpawnRanks, publish, spawn_world_rank


def start(folder: Path) -> None:
    """Publish the options of a server, and create the groups of one rank."""
    options = ServerArgs(model_path=str(folder), device="cpu", attention_backend="torch_native", dtype="bfloat16")
    ranks = SpawnRanks(world_rank=spawn_world_rank(options, tp_rank=0, pp_rank=0), gpu_id=0)
    publish(options, role="weight_cache_daemon", ranks=ranks)
    store = f"file://{folder.parent}/store-{os.getpid()}"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=store, backend="gloo")
    initialize_model_parallel()
    initialize_dp_attention(options)
    for method in (fp8.Fp8LinearMethod, fp8.Fp8MoEMethod):
        method.process_weights_after_loading = lambda self, layer: None


def load(folder: Path, load_format: str, overrides: str = "{}") -> torch.nn.Module:
    config = ModelConfig(str(folder), dtype="bfloat16", model_override_args=overrides)
    init_dp_gathered_buffer(config)
    format_config = LoadConfig(load_format=load_format)
    return get_model(model_config=config, load_config=format_config, device_config=DeviceConfig("cpu"))


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(model.named_parameters())
    for name, module in model.named_modules():  # of latent attention, made of kv_b_proj
        tensors |= {
            f"{name}.{key}": part for key in ("w_kc", "w_vc") if torch.is_tensor(part := getattr(module, key, None))
        }
    return {name: tensor.detach().reshape(-1).view(torch.uint8).clone() for name, tensor in tensors.items()}


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(actual[name], expected[name])]


def check(folder: Path) -> dict[str, object]:
    model = load(folder / "disk", "auto")
    float8 = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float8_e4m3fn}
    expected, results = bits(model), {"float8": len(float8), "tensors": len(dict(model.named_parameters()))}
    updater = None
    for file in sorted(folder.glob("*.buckets")):
        model = load(folder / "plain", "dummy", (folder / "overrides.json").read_text())
        updater = SimpleNamespace(get_model=lambda model=model: model)
        for line in file.read_text().splitlines():
            bucket = MultiprocessingSerializer.deserialize(line)
            WeightUpdater._update_weights_from_flattened_bucket(updater, flattened_tensor_bucket_dict=bucket)
        results[file.stem] = difference(bits(model), expected)
    model = load(folder / "plain", "dummy", (folder / "overrides.json").read_text())
    sizes = []
    for line in (folder / "changes").read_text().splitlines():
        named = MultiprocessingSerializer.deserialize(line)
        sizes.append(len(dict(named)["payload"]))
        load_changes(model, named)
    results["bytes"] = sizes
    results["changes"] = difference(bits(model), bits(load(folder / "changed", "auto")))
    return results


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]]
    start(folders[0] / "disk")
    matrix = torch.load(folders[0].parent / "matrix.pt")
    torch.save(per_block_cast_to_fp8(matrix), folders[0].parent / "powers.pt")
    (folders[0].parent / "results.json").write_text(json.dumps({folder.name: check(folder) for folder in folders}))


if __name__ == "__main__":
    main()
