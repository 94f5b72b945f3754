"""SGLang's own model classes and loading code on a CPU, without a server. Run by the interpreter that has SGLang.

Its argument is a folder with a folder for each model, as `tests.with_sglang.test_loaders` writes it; each gets a
``result.json``. SGLang is imported once, and each model has a process that is forked from this one.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import traceback
from array import array
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_DERIVED = ("w_kc", "w_vc")
"""Tensors of a module that SGLang computes from its parameters when they are loaded."""


def start(folder: Path, attention: str) -> Any:
    """Load a model as SGLang's server does; return its runner."""
    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        attention_backend=attention,
        disable_overlap_schedule=True,
        dtype="float32",
        grammar_backend="none",
        max_total_tokens=1024,
        max_running_requests=4,
        skip_tokenizer_init=True,
        mem_fraction_static=0.1,
    )
    one_batch.publish(args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    one_batch.get_tokenizer = lambda *_, **__: None
    runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    return runner


def logprobs(runner: Any, rows: list[list[int]]) -> list[list[float]]:
    """Return the log-probability of each token but the first, by row."""
    scores = []
    for number, token_ids in enumerate(rows):
        request = one_batch.Req(
            rid=number,
            origin_input_text="",
            origin_input_ids=array("q", token_ids),
            sampling_params=one_batch.SamplingParams(temperature=0, max_new_tokens=1),
            return_logprob=True,
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = 0
        request.extend_end = len(token_ids)
        outputs, forward = [], runner.torch_runner.forward

        def keep_output(*arguments: Any, forward: Any = forward, outputs: list[Any] = outputs, **named: Any) -> Any:
            outputs.append(forward(*arguments, **named))
            return outputs[-1]

        runner.torch_runner.forward = keep_output
        runner.clear()
        runner.extend([request])
        runner.torch_runner.forward = forward
        scores.append(outputs[0].logits_output.input_token_logprobs[: len(token_ids) - 1].tolist())
    return scores


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's parameters, and of what is derived from them."""
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        derived = {f"{name}.{key}": getattr(module, key, None) for key in _DERIVED}
        tensors |= {key: tensor.detach().clone() for key, tensor in derived.items() if isinstance(tensor, torch.Tensor)}
    return tensors


def differing(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not the same bit for bit."""
    return sorted(name for name, tensor in tensors.items() if not torch.equal(tensor, others[name]))


def measure(folder: Path) -> dict[str, Any]:
    """Load every plan of buckets into the model in ``folder``; return what differs from a load of all weights at once."""
    job = json.loads((folder / "job.json").read_text())
    if not job["attention"]:
        runner, model = None, only_model(folder / "before")
    else:
        runner = start(folder / "before", job["attention"])
        model = runner.torch_runner.model
    before, after = load_file(folder / "before" / "model.safetensors"), load_file(folder / "after.safetensors")
    result: dict[str, Any] = {"class": type(model).__name__, "plans": {}}

    def scores() -> list[list[float]] | None:
        return None if runner is None else logprobs(runner, job["rows"])

    def add(name: str) -> None:
        result["plans"][name] = {"differing": differing(state(model), whole), "logprobs": scores()}

    result["logprobs_before"] = scores()
    model.load_weights([*after.items()])
    whole = state(model)
    model.load_weights([*before.items()])
    result["unchanged"] = sorted(set(whole) - set(differing(state(model), whole)))
    for size, buckets in job["plans"].items():
        model.load_weights([*before.items()])
        for names in buckets:
            model.load_weights([(name, after[name]) for name in names])
        add(size)
    model.load_weights([*before.items()])
    for entries in job["changes"]:
        for entry in entries:
            agentrl_weight_loaders.load_changes(model, pickle.loads(base64.b64decode(entry)))
    add("changes")
    if runner is not None:
        register_forward_hook_for_model(model, str(folder / "dump"), None, 1, 0, 0)
        logprobs(runner, job["rows"])
    return result


def only_model(folder: Path) -> Any:
    """Load a model whose attention does not run on a CPU: its class and its loading code alone."""
    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        attention_backend="triton",
        dtype="float32",
        grammar_backend="none",
        max_total_tokens=1024,
        skip_tokenizer_init=True,
        mem_fraction_static=0.1,
    )
    one_batch.publish(args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    ports = PortArgs.init_new(args)
    config = one_batch.ModelConfig.from_server_args(args)
    one_batch.bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=ports.nccl_port)
    one_batch.bootstrap.init_layer_runtime(model_config=config)
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import get_model

    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def main(root: Path) -> None:
    """Measure every model below ``root``."""
    for folder in sorted(path.parent for path in root.glob("*/job.json")):
        child = os.fork()
        if not child:
            try:
                result = measure(folder)
            except BaseException:
                result = {"error": traceback.format_exc()}
            (folder / "result.json").write_text(json.dumps(result))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    import agentrl_weight_loaders
    from sglang.benchmark import one_batch
    from sglang.srt.debug_utils.tensor_dump_forward_hook import register_forward_hook_for_model
    from sglang.srt.models.deepseek_common import attention_backend_handler as latent_attention
    from sglang.srt.server_args import PortArgs, ServerArgs

    # On a CPU the absorbed form works, with the weights that are derived from `kv_b_proj`; the other one has no kernel.
    latent_attention.AttentionBackendRegistry.register("torch_native", latent_attention._dispatch_mla_subtype)
    main(Path(sys.argv[1]))
