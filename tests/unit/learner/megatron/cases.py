"""What ranks compute in the tests; see `forked`. Imported there only, as Megatron-Core takes seconds to import."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import load_file, save_file
from torch.distributed import distributed_c10d

from agentrl.core.errors import ConfigError, LearnerError, ModelError
from agentrl.distributed.flat_bucket import total_bytes
from agentrl.learner.base import WeightSource
from agentrl.learner.export import NamedTensors, WeightExporter
from agentrl.learner.megatron import senders as megatron_senders
from agentrl.learner.megatron.convert import convert
from agentrl.learner.megatron.cpu import computing_on as computing_on
from agentrl.learner.megatron.distributed_checkpoint import (
    ShardedFiles,
    is_distributed_checkpoint,
    load_distributed,
    save_distributed,
    sharded_weights,
)
from agentrl.learner.megatron.layout import Layout
from agentrl.learner.megatron.model import MegatronModel, build_model, local_tokens, packed_tokens
from agentrl.learner.megatron.policies import Training
from agentrl.learner.megatron.senders import PartSource, rank_parts
from agentrl.learner.megatron.weights import GatherGroups, ModelWeights, load_weights
from agentrl.learner.streams import CommandGroup, RankStream, make_groups
from tests.unit.learner.megatron.models import EP, LAYOUTS, MODELS, PP, SP, TP, rows, weighted
from tests.unit.learner.megatron.rank_work import learner_config

CPU = torch.device("cpu")


def end_layout() -> None:
    """End the process groups of a layout, of which each has a thread that wakes up a hundred times a second. Collective."""
    dist.barrier()
    parallel_state.destroy_model_parallel()
    for group in [*distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()  # a group ends with the last object that has it


def one_rank(folder: Path) -> dict[str, Any]:
    """Every model on one rank: which weights come back other than they are in the files, and logits."""
    Layout().start(0)
    return {name: _computed(folder / name, {}) for name in MODELS}


def two_ranks(folder: Path) -> dict[str, Any]:
    """Every layout of two ranks; logits are None with pipeline stages."""
    results = {}
    for name, (model, options) in LAYOUTS.items():
        Layout.from_options(options).start(0)
        results[name] = _computed(folder / model, options)
        end_layout()
    return results


def compiled(folder: Path) -> dict[str, Any]:
    """Graphs of all layers of a model on two ranks, each of which must be one graph, and how far its logits are off."""
    Layout.from_options(TP | SP).start(0)
    built = build_model(folder / "glm4", TP | SP, device=CPU, dtype=torch.float32)
    load_weights(ModelWeights(built), folder / "glm4")
    plain = _logits(built)
    for layer in built.chunks[0].decoder.layers:
        layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True, dynamic=True)
    with torch.compiler.set_stance("default"):
        error = (_logits(built) - plain).abs().max()
    return {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"], "error": float(error)}


def gradients(folder: Path) -> dict[str, torch.Tensor]:
    """The gradient of weighted logits of gpt-oss by the weights' names, with ranks of tensor and expert parallelism."""
    options = TP | SP | EP | {"expert_tensor_parallel_size": 1}
    Layout.from_options(options).start(0)
    built = build_model(folder / "gpt_oss", options, device=CPU, dtype=torch.float32)
    weights = ModelWeights(built)
    load_weights(weights, folder / "gpt_oss")
    [chunk] = Training(built, learner_config("megatron", options, 2), options).chunks
    chunk.zero_grad_buffer()
    token_ids_L, positions_L, row_L = rows()
    packed = packed_tokens(built, positions_L, row_L, CPU)
    inputs = token_ids_L[None], positions_L[None], None
    logits = chunk(*inputs, packed_seq_params=packed, runtime_gather_output=True)
    weighted(logits).backward()
    finalize_model_grads([chunk], None)
    named = [(spec.name, torch.empty(spec.shape)) for spec in weights.specs()]
    weights.gather(named, GatherGroups.model_parallel(), lambda weight: weight.main_grad)
    return dict(named)


def refused_options(folder: Path) -> dict[str, str]:
    """Messages by option, and what a known one became."""
    Layout().start(0)
    known_options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    built = build_model(
        folder / "qwen3", known_options | {"overlap_grad_reduce": True}, device=CPU, dtype=torch.float32
    )
    results = {"taken": f"{built.config.recompute_granularity} {built.config.recompute_num_layers}"}
    try:
        build_model(folder / "qwen3", {"recompute_granularity": "full"}, device=CPU, dtype=torch.float32)
    except ConfigError as error:
        results["recompute_method"] = str(error)
    return results


def router_losses(folder: Path) -> dict[str, dict[str, float]]:
    """Norms of a router's gradient by loss and by how often the rows are repeated, and as the formulas have it."""
    Layout().start(0)
    balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 3.0}
    return {
        "balance": _router_norms(folder, balance, lambda probs_T_E, logits_T_E: _switch_loss(probs_T_E)),
        "z": _router_norms(
            folder,
            {"moe_z_loss_coeff": 3.0},
            lambda probs_T_E, logits_T_E: 3 * logits_T_E.logsumexp(-1).square().mean(),
        ),
    }


def router_shares(folder: Path) -> dict[str, torch.Tensor]:
    """The gradient of a router from its losses of two micro-batches: both on one rank, and one on each of two ranks."""
    Layout().start(0)
    options = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 3.0, "moe_z_loss_coeff": 0.5}
    built = build_model(folder / "qwen3_moe", options, device=CPU, dtype=torch.float32)
    load_weights(ModelWeights(built), folder / "qwen3_moe")
    [chunk] = Training(built, learner_config("megatron", {}, 2), options).chunks
    chunk.train()
    router = built.chunks[0].decoder.layers[-1].mlp.router
    micros = [*zip(*(tensor.split([23, 23]) for tensor in rows()), (0.3, 0.7), strict=True)]

    def add_gradient(token_ids_L: torch.Tensor, positions_L: torch.Tensor, row_L: torch.Tensor, weight: float) -> None:
        packed = packed_tokens(built, positions_L, row_L, CPU, loss_weight=weight)
        (0 * chunk(token_ids_L[None], positions_L[None], None, packed_seq_params=packed).sum()).backward()

    chunk.zero_grad_buffer()
    for micro in micros:
        add_gradient(*micro)
    together = router.weight.main_grad.clone()
    chunk.zero_grad_buffer()
    add_gradient(*micros[dist.get_rank()])
    finalize_model_grads([chunk], None)
    return {"together": together, "divided": router.weight.main_grad}


def _switch_loss(probs_T_E: torch.Tensor) -> torch.Tensor:
    """3 E Σ f P, the fraction of tokens and the mean probability of each of E experts (Switch Transformer, equation 4)."""
    chosen = torch.zeros_like(probs_T_E).scatter(1, probs_T_E.topk(2).indices, 0.5)
    return 3 * probs_T_E.shape[1] * (chosen.mean(0) * probs_T_E.mean(0)).sum()


def _router_norms(
    folder: Path, options: dict[str, Any], loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> dict[str, float]:
    built = build_model(folder / "qwen3_moe", options, device=CPU, dtype=torch.float32)
    load_weights(ModelWeights(built), folder / "qwen3_moe")
    chunk = built.chunks[0].train()
    router = chunk.decoder.layers[-1].mlp.router
    states: list[torch.Tensor] = []
    router.register_forward_hook(lambda module, inputs, output: states.append(inputs[0].detach()))
    token_ids_L, positions_L, row_L = rows((100, 80, 60))

    def norm(repeats: int, weight: float, padding: int = 0) -> float:
        chunk.zero_grad()
        row_numbers = torch.cat([row_L + number * (int(row_L.max()) + 1) for number in range(repeats)])
        row_numbers = torch.cat([row_numbers, torch.full((padding,), -1, dtype=row_numbers.dtype)])
        ids, positions = (
            torch.cat([values.repeat(repeats), torch.arange(padding)]) for values in (token_ids_L, positions_L)
        )
        packed = packed_tokens(built, positions, row_numbers, CPU, loss_weight=weight)
        (0 * chunk(ids[None], positions[None], None, packed_seq_params=packed).sum()).backward()
        return float(router.weight.grad.norm())

    norms = {"1": norm(1, 1.0), "4": norm(4, 1.0), "half": norm(1, 0.5)}
    norms["padded"] = norm(1, 1.0, padding=64)
    chunk.zero_grad()
    logits_T_E = router.gating(states[0]).flatten(0, 1)[row_L >= 0]
    loss(logits_T_E.softmax(-1), logits_T_E).backward()
    return norms | {"expected": float(router.weight.grad.norm())}


class _FailingOnRank1(ShardedFiles):
    def _write_part(self) -> list[Any]:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "no space left")
        return super()._write_part()


def failed(folder: Path) -> list[str]:
    """Errors of both ranks; the second could not write."""
    Layout().start(0)
    model, out = build_model(folder / "qwen3", {}, device=CPU, dtype=torch.float32), folder / "failed"
    out.mkdir(exist_ok=True)
    try:
        _FailingOnRank1(sharded_weights(model), out).write()
    except (LearnerError, OSError) as error:
        message = f"{type(error).__name__}: {error}".replace(str(out), "FOLDER")
    assert not is_distributed_checkpoint(out)
    messages: list[Any] = [None, None]
    dist.all_gather_object(messages, message)
    return messages


DISTRIBUTED = {"gpt_oss": TP | SP | EP | {"expert_tensor_parallel_size": 1}, "mixtral": PP}


def distributed(folder: Path) -> None:
    """Two ranks write distributed checkpoints of Megatron-Core."""
    for name, options in DISTRIBUTED.items():
        Layout.from_options(options).start(0)
        built = build_model(folder / name, options, device=CPU, dtype=torch.float32)
        load_weights(ModelWeights(built), folder / name)
        (folder / f"distributed {name}").mkdir(exist_ok=True)
        save_distributed(built, folder / f"distributed {name}")
        del built
        end_layout()


def distributed_alone(folder: Path) -> dict[str, list[str]]:
    """One rank reads them; weights that differ from the files."""
    Layout().start(0)
    differing = {}
    for name in DISTRIBUTED:
        built = build_model(folder / name, {}, device=CPU, dtype=torch.float32)
        weights, files = ModelWeights(built), load_file(folder / name / "model.safetensors")
        load_distributed(built, folder / f"distributed {name}", "folder")
        read = dict(weights.full_tensors())
        assert read.keys() == files.keys()
        differing[name] = [key for key, tensor in read.items() if not torch.equal(tensor, files[key])]
    return differing


def refused_folders(folder: Path) -> dict[str, str]:
    """Messages by what is wrong with the weights of a folder."""
    Layout().start(0)
    built = build_model(folder / "qwen2", {}, device=CPU, dtype=torch.float32)
    weights, files = ModelWeights(built), load_file(folder / "qwen2" / "model.safetensors")
    embedding, norm = files["model.embed_tokens.weight"], "model.norm.weight"
    changed = {
        "missing": {name: weight for name, weight in files.items() if name != norm},
        "shape": files | {norm: torch.ones(7)},
        "integers": files | {norm: files[norm].to(torch.int8)},
        "untied": files | {"lm_head.weight": embedding + 1},
        "tied": files | {"lm_head.weight": embedding.clone()},
    }
    results = {}
    for name, tensors in changed.items():
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
        try:
            load_weights(weights, folder / name)
        except ModelError as error:
            results[name] = str(error).partition(": ")[2]
    return results


def converted(folder: Path) -> dict[str, Any]:
    """Files that differ after a conversion to a distributed checkpoint and back, on other numbers of ranks; a refusal."""
    try:
        convert(folder / "qwen2", folder / "refused", 5)
    except ConfigError as error:
        refused = str(error)
    return {"refused": refused} | {
        name: _there_and_back(folder / name, folder / f"{name}-{first_count}-{back}", first_count, back)
        for name, first_count, back in (("drafting", 3, 1), ("qwen2", 1, 1), ("float8", 1, 1))
    }


def _there_and_back(source: Path, out: Path, first_count: int, back: int) -> list[str]:
    """Return the names of files and weights that differ; a float8 folder has what its weights are in a file beside it."""
    out.mkdir()
    convert(source, out / "megatron", first_count)
    convert(out / "megatron", out / "hf", back)
    files, weights = (load_file(model_folder / "model.safetensors") for model_folder in (source, out / "hf"))
    if (expected := source.with_suffix(".safetensors")).exists():
        files = {name: tensor.to(weights[name].dtype) for name, tensor in load_file(expected).items()}
    other_paths = {path.name for path in source.iterdir()} ^ {path.name for path in (out / "hf").iterdir()}
    return [*other_paths, *(name for name in {*files, *weights} if not torch.equal(files[name], weights[name]))]


def _computed(folder: Path, options: dict[str, Any]) -> tuple[list[str], torch.Tensor | None]:
    """Return the weights that differ from the files on any rank, and logits."""
    built = build_model(folder, options, device=CPU, dtype=torch.float32)
    weights = ModelWeights(built)
    load_weights(weights, folder)
    files = load_file(folder / "model.safetensors")
    into = [(spec.name, torch.full(spec.shape, 7.0)) for spec in weights.specs()]
    weights.gather(into, GatherGroups.model_parallel())
    assert {name for name, _ in into} == files.keys()
    wrong = [name for name, out in into if not torch.equal(out, files[name])]
    wrong += _wrong_parts(weights, files)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, wrong)
    logits = None if "pipeline_model_parallel_size" in options else _logits(built)
    return [name for names in everywhere for name in names], logits


def _wrong_parts(weights: ModelWeights, files: dict[str, torch.Tensor]) -> list[str]:
    """Gather what each sender sends; return the weights that differ from the files, or do not come from one sender."""
    wrong, sent = [], []
    for part in rank_parts(weights, 600.0):
        into = [(name, torch.full(files[name].shape, 7.0)) for name in sorted(part.names)]
        weights.gather(into, part.groups)
        if part.ranks[0] == dist.get_rank():
            sent += [name for name, _ in into]
            wrong += [name for name, out in into if not torch.equal(out, files[name])]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, sent)
    names = [name for names in by_rank for name in names]
    return wrong + [name for name in files if names.count(name) != 1]


class _Weights(WeightSource):
    """What a learner rank is to the parts of its weights."""

    gathers_on = CPU

    def __init__(self, weights: ModelWeights) -> None:
        self.specs, self.gather = weights.specs, lambda into: None  # type: ignore[method-assign]


def few_senders(folder: Path) -> list[str]:
    """Four expert-parallel ranks of which two send; return what is wrong."""
    options = EP | {"expert_model_parallel_size": 4}
    Layout.from_options(options).start(0)
    weights = ModelWeights(build_model(folder / "qwen3_moe", options, device=CPU, dtype=torch.float32))
    load_weights(weights, folder / "qwen3_moe")
    most, megatron_senders.MOST_SENDERS = megatron_senders.MOST_SENDERS, 3
    try:
        streams = [part.ranks for part in rank_parts(weights, 600.0)]
        wrong = _wrong_parts(weights, load_file(folder / "qwen3_moe" / "model.safetensors"))
    finally:
        megatron_senders.MOST_SENDERS = most
        parallel_state.destroy_model_parallel()
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (streams, wrong))
    assert [each for each, _ in by_rank] == [[(0, 1), (0,)], [(0, 1)], [(2, 3)], [(2, 3)]], by_rank
    return [name for _, names in by_rank for name in names]


def senders(folder: Path) -> dict[str, Any]:
    """Four ranks, two of each stage, each with half of the stage's experts: by size of buckets, what each sender sends.

    All of it, and then the changes after one half of each pair of latent attention has changed.
    """
    options = TP | SP | PP | EP | {"expert_tensor_parallel_size": 1}
    Layout.from_options(options).start(0)
    built = build_model(folder / "deepseek_v3", options, device=CPU, dtype=torch.float32)
    weights = ModelWeights(built)
    load_weights(weights, folder / "deepseek_v3")
    parts = rank_parts(weights, 600.0)
    groups = make_groups([part.ranks for part in parts if len(part.ranks) > 1], CommandGroup)
    sizes = [*sorted({total_bytes(spec) for spec in weights.specs()})[::3], 1 << 30]
    results: dict[str, Any] = {"streams": [part.ranks for part in parts], "wrong": [], "sent": {}}
    for size in sizes:
        exporter = WeightExporter(NamedTensors({}))
        for base, version in ((None, "a"), ("a", "b")):
            load_weights(weights, folder / "deepseek_v3")
            files = load_file(folder / "deepseek_v3" / "model.safetensors")
            if base:
                for rank_weight in weights.rank_weights:
                    if any("kv_a_proj_with_mqa" in piece.tensor.name for piece in rank_weight.slices):
                        rank_weight.tensor.data += 1
                files |= {name: file + 1 for name, file in files.items() if "kv_a_proj_with_mqa" in name}
            sent: list[Any] = []
            for part in parts:
                source = PartSource(part, _Weights(weights), weights, nullcontext, torch.Tensor.detach)
                stream = RankStream(exporter.gather_buckets(source, size, None), groups.get(part.ranks))
                if part.ranks[0] != dist.get_rank():
                    stream.follow()
                    continue
                while (bucket := stream.next()) is not None:
                    results["wrong"] += [name for name, out in bucket.tensors() if not torch.equal(out, files[name])]
                    sent.append([header.name for header in bucket.changes(base, version).parts])
            results["sent"][size, version] = sent
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, results)
    end_layout()
    return {"names": [spec.name for spec in weights.specs()], "ranks": everywhere, "few": few_senders(folder)}


@torch.no_grad()
def _logits(built: MegatronModel) -> torch.Tensor:
    """Return logits ``[L, V]`` of `rows`."""
    token_ids_L, positions_L, row_L = rows()
    [chunk] = built.chunks
    packed, local = packed_tokens(built, positions_L, row_L, CPU), local_tokens(len(row_L))
    chunk.eval()
    inputs = token_ids_L[local][None], positions_L[local][None]
    [logits] = chunk(*inputs, None, packed_seq_params=packed, runtime_gather_output=True)
    parts = [torch.empty_like(logits) for _ in range(built.layout.context_parallel_size)]
    dist.all_gather(parts, logits, group=parallel_state.get_context_parallel_group())
    return torch.cat(parts)
