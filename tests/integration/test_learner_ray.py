"""Two learner ranks in Ray actors, over gloo, against one rank in this process. Starting Ray takes seconds, so tests
share one group; the last of them ends it."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from deadlines import until
from ray._raylet import AuthenticationMode, get_authentication_mode
from safetensors.torch import load_file

from agentrl.batch.microbatch import GlobalBatch
from agentrl.cluster.learner_actor import LearnerActor
from agentrl.cluster.learner_group import RayLearnerGroup, start_critic, start_learners
from agentrl.cluster.rank_actors import RankActors
from agentrl.cluster.ray_runtime import RayRuntime, check_ray, raylet_ended
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.core.errors import CheckpointError, EngineError, LearnerError, ModelError, ProvenanceError
from agentrl.core.types import Provenance
from agentrl.distributed.broadcast_group import BroadcastGroup
from agentrl.distributed.flat_bucket import total_bytes, views
from agentrl.learner.in_process import LocalCritic, LocalLearnerGroup
from agentrl.obs.watchdog import Watchdog
from tests.algo_config import make_algo
from tests.unit.learner.learners import make_batch, make_model

LENGTHS = [30, 50, 20, 7, 60, 33, 12, 41]
ADAMW = OptimizerConfig(lr=1e-3)
MUON = OptimizerConfig(name="muon", lr=1e-3)
WITH_KL = make_algo(kl_coef=0.3)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of other sizes than the model, as a teacher would be; only its vocabulary must be the same."""
    return make_model(tmp_path_factory.mktemp("models") / "reference", hidden_size=48, intermediate_size=40)


@pytest.fixture(scope="module")
def group(
    model: Path, reference: Path, forked_workers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayLearnerGroup]:
    config = LearnerConfig(precision="float32", ranks=2, device="cpu", threads=1, optimizer=ADAMW, step_timeout_s=60)
    run = tmp_path_factory.mktemp("run")
    group = start_learners(model, config, WITH_KL, seed=0, run_dir=run, reference=reference, cluster=RayRuntime(cpus=6))
    yield group
    group.close()
    group.close()


@pytest.fixture(params=[ADAMW], ids=["adamw"])
def local(model: Path, reference: Path, request: pytest.FixtureRequest) -> Iterator[LocalLearnerGroup]:
    config = LearnerConfig(precision="float32", device="cpu", threads=1, optimizer=request.param)
    algo = WITH_KL if request.param is ADAMW else make_algo()
    learner = LocalLearnerGroup(model, config, algo, seed=0, reference=reference if algo.needs_reference else None)
    yield learner
    learner.close()


def one(shares: int, seed: int) -> GlobalBatch:
    return make_batch(LENGTHS, seed=seed, shares=shares, bin_=64, micro=64)


def weights(learner: RayLearnerGroup | LocalLearnerGroup, bucket: int = 1 << 30) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for part in learner.buckets(bucket) for name, tensor in part.tensors()}


def test_two_ranks_learn_what_one_learns(group, local, tmp_path):
    for seed in range(2):
        ours, theirs = group.train_step(one(2, seed)), local.train_step(one(1, seed))
        assert ours.keys() == theirs.keys()
        assert ours["train/kl"] > 0.1
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    expected = weights(local)
    actual = weights(group, bucket=5000)
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.allclose(actual[name], value, atol=1e-5), name
    for policy in ("main", "reference"):
        ours, theirs = group.logprobs(one(2, 9), policy), local.logprobs(one(1, 9), policy)
        assert ours.keys() == theirs.keys()
        assert all(abs(ours[key] - theirs[key]).max() < 1e-3 for key in theirs)

    # What two ranks wrote goes on on one, and on two again, bit for bit there.
    group.save(tmp_path / "two")
    group.finish_save()
    straight = group.train_step(one(2, 4))
    group.load(tmp_path / "two")
    assert group.train_step(one(2, 4)) == straight
    local.load(tmp_path / "two")
    alone = local.train_step(one(1, 4))
    assert alone["train/loss"] == pytest.approx(straight["train/loss"], rel=1e-4)
    weights_after = weights(local)
    assert all(torch.allclose(value, weights_after[name], atol=1e-5) for name, value in weights(group).items())


def test_weights_that_ranks_cannot_divide_evenly_are_gathered(group):
    def gathered(actor: LearnerActor) -> list[bool]:
        """Gather weights of which the ranks have unequal shares, none or all of it, by several collectives."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        from agentrl.learner.fsdp import gather
        from agentrl.models.hub_tensors import HubTensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        shapes = ((5, 3), (1, 4), (4, 2), (3,), (2, 2, 2))
        whole_tensors = [torch.arange(math.prod(shape)).float().view(shape) for shape in shapes]
        into = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
        sharded = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole_tensors[:-1]]
        usual, gather._CHUNK_BYTES = gather._CHUNK_BYTES, 40
        try:
            gather.gather_weights(zip([*sharded, whole_tensors[-1]], into, strict=True))
            experts = torch.arange(48).float().view(3, 8, 2)
            fused = distribute_tensor(experts, mesh, [Shard(0)])
            # Halves of experts, and rows of all of them.
            rows = [HubTensor("", "", (4, 2), 4 * half, False) for half in range(6)] + [
                HubTensor("", "", (20, 2), 3, False)
            ]
            into += (halves := [torch.zeros(tensor.shape, dtype=torch.bfloat16) for tensor in rows])
            whole_tensors += [tensor.slice_weight(experts) for tensor in rows]
            gather.gather_rows([(fused, out, tensor) for out, tensor in zip(halves, rows, strict=True)])
        finally:
            gather._CHUNK_BYTES = usual
        return [torch.equal(*pair) for pair in zip(into, [tensor.bfloat16() for tensor in whole_tensors], strict=True)]

    assert group._call(gathered, "gather") == [[True] * 12] * 2


def until_it_raises(check: Callable[[], None]) -> None:
    """Call ``check`` for 30 s: Ray notices the end of a process after a moment."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        check()


def test_a_critic_has_its_own_ranks(group, local, model, tmp_path):
    algo = make_algo(advantage={"name": "gae"})
    config = LearnerConfig(precision="float32", device="cpu", threads=1)
    batch = one(1, 0)
    micros = tuple(
        replace(micro, returns_L=micro.advantages_L, values_L=torch.zeros_like(micro.advantages_L))
        for micro in batch.micro[0]
    )
    batch = replace(batch, micro=(micros,), kind="value")
    critic = start_critic(model, config, algo, seed=0, run_dir=tmp_path, policy=group)
    alone = LocalCritic(model, config, algo, seed=0)
    try:
        assert critic.train_step(batch) == pytest.approx(alone.train_step(batch), rel=1e-5)
        critic.save(tmp_path / "critic")
        critic.finish_save()
        ours, theirs = critic.values(batch), alone.values(batch)
        assert all(abs(ours[key] - theirs[key]).max() < 1e-6 for key in theirs)
        alone.load(tmp_path / "critic")
        assert critic.train_step(batch) == pytest.approx(alone.train_step(batch), rel=1e-5)
        for ranks in (group, critic):
            ranks.check()
        [rank] = processes(critic)
        rank.kill()
        with pytest.raises(LearnerError, match="rank 0 of 1 of the critic was lost"):
            until_it_raises(critic.check)
        group.check()
    finally:
        alone.close()
        critic.close()
    assert group.train_step(one(2, 0))["train/trained_tokens"], "the policy's ranks stay"


def test_ray_listens_on_the_loopback_and_requires_its_token(group):
    this_process = psutil.Process()
    rays = [child for child in this_process.children(recursive=True) if child.name() in ("gcs_server", "raylet")]
    assert len(rays) == 2
    listening = [
        connection.laddr.ip
        for process in (this_process, *rays)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 4
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert get_authentication_mode() == AuthenticationMode.TOKEN


def test_a_walk_over_the_weights_may_stop_early(group):
    full_weights = weights(group)
    for bucket in group.buckets(1000):
        with pytest.raises(LearnerError, match="not on a GPU"):  # on each rank, and they go on
            bucket.ipc_handles()
        break
    assert all(torch.equal(value, full_weights[name]) for name, value in weights(group, 1000).items())


def test_errors_come_typed_and_the_ranks_stay(group, tmp_path):
    batch = copy.deepcopy(one(2, 0))
    micro = batch.micro[1][0]
    micro.provenance_L[int(micro.mask_L.nonzero()[0])] = Provenance.OBSERVED
    with pytest.raises(ProvenanceError, match="no engine sampled it"):
        group.train_step(batch)
    micro.mask_L[int(micro.mask_L.nonzero()[0])] = False
    assert group.train_step(batch)["train/trained_tokens"] == batch.metrics["batch/trained_tokens"] - 1
    with pytest.raises(CheckpointError, match=r"learner\.json"):
        group.load(tmp_path / "none")
    bad = copy.deepcopy(one(2, 0))
    bad.micro[0][0].advantages_L[bad.micro[0][0].mask_L] = float("nan")
    assert group.train_step(bad)["train/nonfinite_gradients"] == 1
    assert group.train_step(one(2, 0))["train/grad_norm"] > 0


def test_ranks_that_slept_go_on_bit_for_bit(group, tmp_path):
    """Offloaded ranks export their weights and save; a learner that loads this continues identically."""
    group.save(tmp_path / "awake")
    group.finish_save()
    straight = [group.train_step(one(2, seed)) for seed in (5, 6)]
    expected = weights(group)

    group.load(tmp_path / "awake")
    group.sleep()
    offloaded = weights(group, 5000)
    group.save(tmp_path / "offloaded")
    group.finish_save()
    with pytest.raises(LearnerError, match="the learner sleeps"):
        group.train_step(one(2, 5))
    group.wake()
    assert all(torch.equal(value, offloaded[name]) for name, value in weights(group).items())
    metrics = [group.train_step(one(2, 5))]
    group.sleep()
    group.wake()
    metrics.append(group.train_step(one(2, 6)))
    assert metrics == straight
    actual = weights(group)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())

    group.load(tmp_path / "offloaded")
    assert group.train_step(one(2, 5)) == straight[0]


def test_rank_0_sends_and_stops_when_the_group_is_left(group, tmp_path):
    """A broadcast without receivers ends as soon as the group is left, and the ranks stay usable."""
    joining = group.open_group(["http://127.0.0.1:9"], 2, "gloo", 60.0)
    with ThreadPoolExecutor(2) as threads:
        joining_thread = threads.submit(BroadcastGroup.join, joining, 1, timeout_s=60.0)
        group.join_group(joining)
        second_group = joining_thread.result()
        for number, bucket in enumerate(group.buckets(5000, "bfloat16")):
            flat = torch.zeros(total_bytes(*bucket.specs), dtype=torch.uint8)
            taken = threads.submit(second_group.broadcast, [flat])
            bucket.broadcast()
            taken.result()
            bucket.save(tmp_path / str(number))
            saved = load_file(tmp_path / str(number))
            for (name, tensor), (sent_name, sent) in zip(views(bucket.specs, flat), bucket.tensors(), strict=True):
                assert name == sent_name
                assert torch.equal(tensor, sent)
                assert torch.equal(tensor, saved[name])
        # A rank of two that is left alone in a new group waits for the other.
        waits = threads.submit(group.join_group, group.open_group(["http://127.0.0.1:9"], 2, "gloo", 60.0))
        time.sleep(0.5)
        begun = time.monotonic()
        group.leave_group()
        with pytest.raises(EngineError):
            waits.result(timeout=30)
        assert time.monotonic() - begun < 20
    second_group.close()
    assert group.train_step(one(2, 0))["train/grad_norm"] > 0


def processes(group: RankActors) -> list[psutil.Process]:
    """Return those of the ranks."""
    return [psutil.Process(pid) for pid in group._call(lambda actor: os.getpid(), "pid")]


def test_a_stopped_rank_is_named_as_long_as_it_is_waited_for(group):
    """By a call in which no rank waits for another."""

    def node(actor: LearnerActor) -> str:
        return actor.node(LearnerConfig())

    async def call(stopped: psutil.Process) -> str:
        messages: list[str] = []
        stopped.suspend()
        try:
            with Watchdog(0.5, messages.append):
                answers = asyncio.create_task(asyncio.to_thread(group._call, node, "node"))
                named = partial(re.findall, r"learner rank (\d) of 2, node, since")
                await until(lambda: bool(named("\n".join(messages))) or answers.done())
                stopped.resume()
                assert len(await answers) == 2
        finally:
            stopped.resume()
        return str(named("\n".join(messages))[0])

    assert {asyncio.run(call(rank)) for rank in processes(group)} == {"0", "1"}


def test_a_full_disk_on_a_rank_is_the_error_of_the_disk_with_the_file(group, tmp_path):
    def pid(_: LearnerActor) -> int:
        return os.getpid()

    rank = psutil.Process(group._call(pid, "pid")[1])
    limits = rank.rlimit(psutil.RLIMIT_FSIZE)
    rank.rlimit(psutil.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        group.save(tmp_path / "full")
        with pytest.raises(OSError, match="File too large") as error:
            group.finish_save()
    finally:
        rank.rlimit(psutil.RLIMIT_FSIZE, limits)
    assert Path(error.value.filename).is_relative_to(tmp_path / "full" / "optimizer")
    assert group.train_step(one(2, 0))["train/grad_norm"] > 0


def test_a_killed_rank_is_an_error_and_no_hang(group):
    victims = processes(group)
    assert len(victims) == 2
    victims[1].send_signal(signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(LearnerError, match="rank"):
        group.train_step(one(2, 0))
    with pytest.raises(LearnerError, match="the learner has ended"):
        group.train_step(one(2, 0))
    assert time.monotonic() - start < 30
    psutil.wait_procs(victims, timeout=10)
    assert not any(p.is_running() for p in victims)


@pytest.mark.parametrize("local", [MUON], ids=["muon"], indirect=True)
def test_muon_on_sharded_matrices_takes_the_step_of_whole_ones(model, local, tmp_path):
    """Of two ranks that compute the only share of the batch together."""
    config = LearnerConfig(precision="float32", ranks=2, context_parallel=2, device="cpu", threads=1, optimizer=MUON)
    group = start_learners(model, config, make_algo(), seed=0, run_dir=tmp_path)
    try:
        weights_before = weights(local)
        ours, theirs = group.logprobs(one(1, 0)), local.logprobs(one(1, 0))
        assert ours.keys() == theirs.keys()
        assert all(abs(ours[key] - theirs[key]).max() < 1e-4 for key in theirs)
        ours, theirs = group.train_step(one(1, 0)), local.train_step(one(1, 0))
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-5)
        actual, expected = weights(group), weights(local)
        for name, value in expected.items():
            # In bfloat16 Muon makes percents of a step out of roundings of the gradient; a step from half matrices is
            # off by about half of it.
            step = (value - weights_before[name]).norm()
            assert (actual[name] - value).norm() < 0.2 * step, name
    finally:
        group.close()


def shard_sums(actor: LearnerActor) -> list[float]:
    """Return sums of a rank's shards of weights and of the optimizer's state, in float64."""
    from agentrl.learner.fsdp.weights import local

    [optimizer] = actor.learner.optimizers.values()
    moments = [optimizer.state[weight]["exp_avg_sq"] for weight in actor.learner.model.parameters()]
    return [local(tensor).double().sum().item() for tensor in (*actor.learner.model.parameters(), *moments)]


@pytest.mark.long
def test_copies_of_the_weights_learn_what_one_learns(tmp_path):
    """Two copies on two ranks each, whose checkpoint goes on with one rank, and that of one rank with them.

    `test_expert_ranks` has copies, and checkpoints that go on, without Ray.
    """
    model = make_model(tmp_path / "model", "qwen3_moe")
    options = {"precision": "float32", "device": "cpu", "threads": 1, "optimizer": ADAMW}
    local = LocalLearnerGroup(model, LearnerConfig(**options), make_algo(), seed=0)
    config = LearnerConfig(**options, ranks=4, replicas=2)
    group = start_learners(model, config, make_algo(), seed=0, run_dir=tmp_path)
    try:
        for seed in range(2):
            ours, theirs = group.train_step(one(4, seed)), local.train_step(one(1, seed))
            assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)
        sums = group._call(shard_sums, "sums")
        assert sums[0] == sums[2] != sums[1] == sums[3]
        actual, expected = weights(group, bucket=5000), weights(local)
        assert list(actual) == list(expected)
        assert all(torch.allclose(actual[name], value, atol=1e-5) for name, value in expected.items())
        for writer, reader, folder in ((group, local, tmp_path / "four"), (local, group, tmp_path / "one")):
            writer.save(folder)
            writer.finish_save()
            reader.load(folder)
            ours, theirs = group.train_step(one(4, 4)), local.train_step(one(1, 4))
            assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)
        after = weights(local)
        assert all(torch.allclose(value, after[name], atol=1e-5) for name, value in weights(group).items())
    finally:
        group.close()
        local.close()


def test_a_model_that_cannot_be_loaded_is_the_users_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    group = start_learners(
        tmp_path, LearnerConfig(precision="float32", device="cpu"), make_algo(), seed=0, run_dir=tmp_path
    )
    try:
        with pytest.raises(ModelError, match=r"model\.path"):
            group.ready()
        assert "ModelError" in (tmp_path / "learner.log").read_text()
    finally:
        group.close()


def test_the_end_of_a_process_of_ray_is_an_error_at_once(group):
    """The last test, because nothing can be started without Ray's GCS. (By itself Ray would end this process after a minute.)"""
    check_ray()
    [gcs] = [child for child in psutil.Process().children() if child.name() == "gcs_server"]
    gcs.kill()
    with pytest.raises(LearnerError, match="Ray's process gcs_server has ended; its log is in "):
        until_it_raises(check_ray)
    assert not raylet_ended()
