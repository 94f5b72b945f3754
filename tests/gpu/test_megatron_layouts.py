"""Megatron-Core learners on one, two and four GPUs compute what one FSDP rank does, policy and critic. No engine takes part.

Layouts of four ranks take four GPUs if there are so many. On two GPUs with two ranks each, only the layout of tensor and pipeline
ranks runs: NCCL refuses two ranks of a group on one GPU. There only groups of all ranks have such, and they communicate by gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.base import RankOptions, Role, RowScores
from agentrl.learner.device import collectives, pick_device
from agentrl.learner.registry import make_backend
from tests.algo_config import make_algo
from tests.batches import pack_rows
from tests.unit.learner.learners import make_rows
from tests.unit.learner.megatron.models import CP, EP, PP, SP, TP, make_critic_model, make_model

pytestmark = pytest.mark.gpu

LENGTHS = (30, 50, 20, 7, 41, 64)
CRITIC = {"optimizer": {"lr": 1e-3, "max_grad_norm": 1e9}}
ALGOS: dict[Role, AlgoConfig] = {
    "policy": make_algo(entropy_coef=0.1),
    "critic": make_algo(advantage={"name": "gae"}, critic=CRITIC),
}
DENSE, EXPERTS = "qwen3", "qwen3_moe"
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, DENSE, {}),
    "one rank, experts": (1, EXPERTS, {}),
    "TP2": (2, DENSE, TP),
    "TP2, SP": (2, DENSE, TP | SP),
    "PP2": (2, DENSE, PP),
    "DP2": (2, DENSE, {}),
    "CP2": (2, DENSE, CP),
    "EP2": (2, EXPERTS, EP),
    "TP2, SP, PP2": (4, DENSE, TP | SP | PP),
    "TP4, SP": (4, DENSE, {"tensor_model_parallel_size": 4} | SP),
    "PP4": (4, DENSE, {"pipeline_model_parallel_size": 4}),
    "CP4": (4, DENSE, {"context_parallel_size": 4}),
    "DP4": (4, DENSE, {}),
    "EP4": (4, EXPERTS, {"expert_model_parallel_size": 4}),
    "TP2, SP, EP4": (4, EXPERTS, TP | SP | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}),
}
"""By name: ranks, model, and the options ``learner.megatron``."""
COMPILED = ("TP2, SP",)
"""Layouts whose layers are compiled, which takes longer than all else here."""
SHARED_GPUS = (0, 1, 1, 0)
"""The GPU of each of four ranks on two: ranks 0 and 1, 2 and 3 (tensor), 0 and 2, 1 and 3 (pipeline) are on different ones."""
ON_SHARED_GPUS = ("TP2, SP, PP2",)
Found = tuple[dict[str, float], RowScores]
"""Metrics of a step, and scores of rows after it."""


def gpus_of(ranks: int) -> tuple[int, ...] | None:
    """Return the GPU of each rank; None if there are too few."""
    count = torch.cuda.device_count()
    if count >= ranks:
        return tuple(range(ranks))
    return SHARED_GPUS if count >= 2 and ranks == len(SHARED_GPUS) else None


def layouts_of(ranks: int) -> dict[str, tuple[int, str, dict[str, Any]]]:
    """The layouts of so many ranks that run on the GPUs of this machine."""
    gpus = gpus_of(ranks)
    layouts = {name: layout for name, layout in LAYOUTS.items() if layout[0] == ranks and gpus}
    return {name: layouts[name] for name in ON_SHARED_GPUS if name in layouts} if gpus == SHARED_GPUS else layouts


def use_gloo_on_shared_gpus(gpus: Sequence[int]) -> None:
    """Let groups with two ranks on one GPU communicate by gloo."""
    make = dist.new_group

    def new_group(ranks: list[int] | None = None, *, backend: str | None = None, **options: Any) -> Any:
        of_group = [gpus[rank] for rank in ranks or range(len(gpus))]
        shares = len(set(of_group)) < len(of_group)
        return make(ranks, backend="gloo" if shares else backend, **options)

    dist.new_group = new_group


def compute(rank: int, folder: str, ranks: int) -> None:
    """Write what each layout of ``ranks`` ranks finds, and with one rank FSDP too."""
    store = dist.FileStore(f"{folder}/store{ranks}", ranks)
    fsdp = {f"fsdp, {model}": (1, model, None) for model in (DENSE, EXPERTS)} if ranks == 1 else {}
    gpus = gpus_of(ranks)
    assert gpus is not None
    use_gloo_on_shared_gpus(gpus)
    results = {}
    for number, (name, (_, model, options)) in enumerate({**fsdp, **layouts_of(ranks)}.items()):
        given: dict[str, Any] = {"backend": "fsdp"} if options is None else {"backend": "megatron", "megatron": options}
        optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=1e9)
        given |= {"precision": "float32", "compile": name in COMPILED}
        config = LearnerConfig(device="cuda", ranks=ranks, optimizer=optimizer, **given)
        device = pick_device(config, local_rank=gpus[rank])
        if number == 0:
            dist.init_process_group(collectives("cuda"), store=store, rank=rank, world_size=ranks)
        backend = make_backend(config)
        make, results[name] = backend.rank_class(), {}
        for role, batch in batches(backend.data_parallel_size).items():
            learner = make(
                RankOptions(Path(folder, model, role), config, ALGOS[role], device=device, seed=0, role=role)
            )
            mine = replace(batch, micro=(batch.micro[learner.data_parallel_rank],), metrics={})
            score = learner.logprobs if role == "policy" else learner.values
            results[name][role] = gathered(learner.train_step(mine), score(mine))
        if options is not None:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
    if rank == 0:
        torch.save(results, Path(folder, f"found{ranks}.pt"))
    dist.destroy_process_group()


def batches(data_parallel_size: int) -> dict[Role, GlobalBatch]:
    """PPO's batches: an advantage, or a value and a return, for each token."""
    rows, rng = make_rows(LENGTHS), np.random.default_rng(1)
    advantages, values, returns = (
        {row.key: rng.normal(size=len(row.mask)).astype(np.float32) for row in rows} for _ in range(3)
    )
    sizes: dict[str, Any] = {"data_parallel_size": data_parallel_size, "tokens_per_micro": 64, "pad_id": 0}
    return {
        "policy": pack_rows(rows, advantages, **sizes),
        "critic": pack_rows(rows, kind="value", values=values, returns=returns, **sizes),
    }


def gathered(metrics: dict[str, float], scores: RowScores) -> Found:
    """The scores of all ranks."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, scores)
    return metrics, {key: row for rank_result in everywhere for key, row in rank_result.items()}


@pytest.fixture(scope="module")
def of_layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Role, Found]]:
    folder = tmp_path_factory.mktemp("layouts")
    for model in (DENSE, EXPERTS):
        policy = make_model(folder / model / "policy", model, num_key_value_heads=4)
        make_critic_model(policy, folder / model / "critic")
    results: dict[str, dict[Role, Found]] = {}
    for ranks in sorted({ranks for ranks, _, _ in LAYOUTS.values()}):
        if gpus_of(ranks):
            mp.spawn(compute, (str(folder), ranks), nprocs=ranks)  # type: ignore[no-untyped-call]
            results |= torch.load(folder / f"found{ranks}.pt", weights_only=False)
    return results


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_one_fsdp_rank_does(of_layouts, layout: str, role: Role):
    """PPO before and after an optimizer step of policy and critic, in float32."""
    ranks, model, _ = LAYOUTS[layout]
    if layout not in of_layouts:
        pytest.skip(f"{ranks} GPUs are wanted, there are {torch.cuda.device_count()}")
    (expected, rows), (metrics, actual) = of_layouts[f"fsdp, {model}"][role], of_layouts[layout][role]
    of_role = "train/entropy" if role == "policy" else "train/mean"
    for key in ("train/loss", "train/grad_norm", of_role, "train/trained_tokens"):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key
    assert actual.keys() == rows.keys()
    for key, row in rows.items():
        np.testing.assert_allclose(actual[key], row, atol=1e-3)
