"""What Megatron-Core learner ranks compute in the tests; see `forked`."""

from __future__ import annotations

import hashlib
import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import LearnerError
from agentrl.learner import sharded_files
from agentrl.learner.base import RankOptions, RowScores
from agentrl.learner.checkpoints import Checkpoints
from agentrl.learner.fsdp.rank import FsdpRank
from agentrl.learner.fsdp.weights import local
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.learner.megatron.rank import MegatronRank
from agentrl.learner.registry import make_backend
from agentrl.testing import check_learner
from tests.algo_config import make_algo
from tests.unit.learner.learners import contract_rows
from tests.unit.learner.megatron.cases import end_layout
from tests.unit.learner.megatron.rank_work import (
    FOUR,
    KILLS,
    LONG,
    LONG_OF_EXPERTS,
    ONE,
    OTHER_STATES,
    RESUMED,
    STATES,
    TWO,
    TWO_OF_EXPERTS,
    Found,
    algos_of,
    compute,
    critic_of,
    learner_config,
    make_batches,
    make_critic,
    make_rank,
    with_offload,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
Layouts = dict[str, dict[str, Any]]


def one_rank(folder: Path) -> dict[str, Found]:
    """One rank."""
    return {name: _computed(folder / "qwen3", name, options) for name, options in ONE.items()}


def contract(folder: Path) -> bool:
    """Check one rank against the contract of learners."""
    model, config = folder / "qwen3", learner_config("megatron")
    check_learner(lambda: LocalLearnerGroup(model, config, make_algo(), seed=0), contract_rows(), folder / "contract")
    return True


def new_head(folder: Path) -> RowScores:
    """Values of a critic that starts from a policy."""
    critic = make_critic(folder / "qwen3", MegatronRank, learner_config("megatron"))
    values: RowScores = critic.values(make_batches(1)["value"])
    return values


def two_ranks(folder: Path) -> dict[str, Found]:
    """Every layout of two ranks."""
    return _computed_in_turn(folder, TWO, TWO_OF_EXPERTS)


def long(folder: Path) -> dict[str, Found]:
    """Layouts of two ranks that others have in them."""
    return _computed_in_turn(folder, LONG, LONG_OF_EXPERTS)


def _computed_in_turn(folder: Path, dense: Layouts, of_experts: Layouts) -> dict[str, Found]:
    results = {}
    for model, layouts in (("qwen3", dense), ("experts", of_experts)):
        for name, options in layouts.items():
            results[name] = _computed(folder / model, name, options)
            end_layout()
    return results


def resumed(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics of the step after a checkpoint, of those that load it, and of those that write it: a policy, and a critic that
    sleeps."""
    results = {}
    for name, options in RESUMED.items():
        config = with_offload(learner_config("megatron", options, 2), name)
        batches, steps = make_batches(make_backend(config).data_parallel_size), {}
        policy, critic = folder / "experts", critic_of(folder / "qwen3")
        for kind, (make, model) in {"grpo": (make_rank, policy), "value": (make_critic, critic)}.items():
            rank, checkpoint = make(model, MegatronRank, config), folder / f"checkpoint of {kind}"
            batch = replace(batches[kind], micro=(batches[kind].micro[rank.data_parallel_rank],))
            if not results:
                rank.train_step(batch)
                if kind == "value":
                    rank.sleep()
                rank.save(checkpoint)
                rank.wake()
            else:
                rank.load(checkpoint)
            steps[kind] = rank.train_step(batch)  # what is written is the state before it
            rank.finish_save()
            check_offload(rank, config)
        results[name] = steps
        del rank
        end_layout()
    return results


def saved(folder: Path) -> None:
    """Two ranks write checkpoints without Hugging Face folders, of states of random numbers."""
    _pass_on(folder, None, "first", STATES)


def saved_by_one(folder: Path) -> None:
    """One rank loads them and writes them again, with Hugging Face folders."""
    _pass_on(folder, "first", "second", {name: {} for name in STATES})


def saved_by_two(folder: Path) -> None:
    """Two ranks load those and write them again, in other layouts and without Hugging Face folders."""
    _pass_on(folder, "second", "third", OTHER_STATES)


def _pass_on(folder: Path, loaded: str | None, written: str, layouts: Layouts) -> None:
    """Load the checkpoint ``loaded`` of each model, or fill the state with random numbers, and write it as ``written``."""
    for name, layout in layouts.items():
        backend = "fsdp" if name.startswith("fsdp ") else "megatron"
        config = learner_config(backend, layout, dist.get_world_size())
        precision = "bfloat16" if name == "mixtral" else "float32"
        config = config.model_copy(update={"save_hf": written == "second", "precision": precision})
        make = FsdpRank if backend == "fsdp" else MegatronRank
        rank: Any = make(
            RankOptions(folder / name.removeprefix("fsdp "), config, make_algo(), torch.device("cpu"), seed=0)
        )
        if loaded is not None:
            rank.load(folder / f"{loaded} of {name}")
        elif backend == "fsdp":
            _take_random_step(rank)
        else:
            _fill(rank)
        if loaded is not None and backend == "megatron":
            _check_copies(rank)
        rank.save(folder / f"{written} of {name}")
        rank.finish_save()
        del rank
        if backend == "megatron":
            end_layout()


@torch.no_grad()
def _fill(rank: MegatronRank) -> None:
    rank.step = 3
    rank.training.allocate_moments(["exp_avg", "exp_avg_sq"], 3)
    random = torch.Generator().manual_seed(dist.get_rank())
    for shard in rank.training.shards():
        for tensor in (shard.weight, *shard.moments.values()):
            tensor.normal_(generator=random)


def _check_copies(rank: MegatronRank) -> None:
    """Check that the model computes with the optimizer's float32 weights, and that these count the steps of the checkpoint."""
    assert rank.step == 3
    for shard in rank.training.shards():
        part = shard.parameter.detach().view(-1)[shard.start : shard.start + len(shard.weight.view(-1))]
        assert torch.equal(part, shard.weight.view(-1).to(part.dtype))
        assert part.dtype is rank.trained.model.config.params_dtype
    assert {int(s["step"]) for o in rank.training._optimizers() for s in o.optimizer.state.values()} == {3}


def _take_random_step(rank: FsdpRank) -> None:
    random = torch.Generator().manual_seed(dist.get_rank())
    for parameter in rank.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        shard = local(parameter.grad)
        shard.copy_(torch.randn(shard.shape, generator=random))
    rank.optimizer_states.step()
    rank.steps["main"] = 1
    rank._zero_grad()


def killed(folder: Path) -> None:
    """Two ranks save twice; in the second save one of them is killed."""
    for name, (victim, file) in KILLS.items():
        ranks = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                _save_twice(folder, name, rank, file if rank == victim else None)
                os._exit(0)
            ranks.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in reversed(ranks)]
        assert statuses[1 - victim] == signal.SIGKILL
        if victim == 1:
            assert statuses[1] == 0


class _KillingFiles(FileSystem):
    """Ends its process as a file is opened to be written."""

    file: str

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode == "wb" and self.file in Path(path).name:
                stream.write(b"half")
                stream.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            yield stream


class _OwnRank:
    """Rank 0 as the group of learners of `Checkpoints`; rank 1 calls the same in its process."""

    def __init__(self, rank: FsdpRank) -> None:
        self._rank, self.save = rank, rank.save

    def finish_save(self) -> None:
        """Wait for all ranks, as a group does."""
        self._rank.finish_save()
        dist.barrier()


def _save_twice(folder: Path, name: str, number: int, file: str | None) -> None:
    store = dist.FileStore(str(folder / f"{name}.store"), 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=60))
    config = learner_config("fsdp", {}, 2).model_copy(update={"save_hf": False})
    rank = FsdpRank(RankOptions(folder / "qwen3_moe", config, make_algo(), torch.device("cpu"), seed=0))
    _take_random_step(rank)
    checkpoints = Checkpoints(folder / "ends" / name, keep=3)
    group: Any = _OwnRank(rank)
    if number == 0:
        checkpoints.save(1, group, {})
        checkpoints.finish()
    else:
        rank.save(checkpoints.folder / "step_000001.partial")
        group.finish_save()
    dist.barrier()
    if file is not None:
        _KillingFiles.file = file
        sharded_files._Files = _KillingFiles
    try:
        if number == 0:
            checkpoints.save(2, group, {})
            checkpoints.finish()
        else:
            rank.save(checkpoints.folder / "step_000002.partial")
            group.finish_save()
    except (RuntimeError, LearnerError) as error:
        (folder / "ends" / f"{name}.txt").write_text(str(error))


def four_ranks(folder: Path) -> dict[str, Found]:
    """Every layout of four ranks."""
    return {name: _computed(folder / "tied", name, options) for name, options in FOUR.items()}


def _computed(model: Path, name: str, options: dict[str, Any]) -> Found:
    """Return what a layout computes; its name says what is computed again."""
    recompute = next((each for each in ("selective", "full") if each in name.split(", ")), "none")
    config = learner_config("megatron", options, dist.get_world_size()).model_copy(update={"recompute": recompute})
    config = with_offload(config, name)
    rank, critic = make_rank(model, MegatronRank, config), make_critic(critic_of(model), MegatronRank, config)
    rank.training.states._chunk_bytes = 20_000
    computed = compute(rank, critic, make_backend(config).data_parallel_size, algos_of(name))
    check_offload(rank, config)
    weights = {spec.name: torch.empty(spec.shape) for spec in rank.specs()}
    rank.gather([*weights.items()])
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights.values())).digest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    assert len({*digests}) == 1, "each rank gathers the same weights"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, computed)
    assert all(each.metrics == computed.metrics for each in everywhere)
    return Found(
        computed.metrics, *(_together([getattr(each, name) for each in everywhere]) for name in ("logprobs", "values"))
    )


def check_offload(rank: MegatronRank, config: LearnerConfig) -> None:
    """Check that moments, after a step, have memory if they are not offloaded, and none if they are."""
    optimizers = rank.training._optimizers()
    moments = [state[name] for inner in optimizers for state in inner.optimizer.state.values() for name in MOMENTS]
    assert len(moments) > 8
    has_memory = {bool(moment.untyped_storage().nbytes()) for moment in moments}
    assert has_memory == {config.cpu_offload == "none"}


def _together(of_ranks: list[RowScores]) -> RowScores:
    keys = [key for scores in of_ranks for key in scores]
    assert len(keys) == len(set(keys)), "each row comes from one rank"
    return {key: row for scores in of_ranks for key, row in scores.items()}
