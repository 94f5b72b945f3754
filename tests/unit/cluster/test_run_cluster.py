"""The critic of a run: where its weights come from, at the start and after a resume. The ranks are in this process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.cluster import run_cluster
from agentrl.cluster.run_cluster import RunCluster
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError, LearnerError
from agentrl.learner.checkpoints import CRITIC
from tests.batches import pack_rows
from tests.in_process_learner import start_critic, start_learners
from tests.unit.learner.learners import make_model, make_rows


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_cluster, "start_learners", start_learners)
    monkeypatch.setattr(run_cluster, "start_critic", start_critic)


def test_a_critic_starts_from_the_policy_or_its_checkpoint(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    config = load_config(None, ["algo.advantage.name=gae", "learner.device=cpu", "learner.threads=1"])
    rows = make_rows([9, 14])
    returns = {row.key: np.ones(len(row.mask), np.float32) for row in rows}
    sizes = {"data_parallel_size": 1, "tokens_per_micro": 64, "pad_id": 0}
    batch = pack_rows(rows, kind="value", returns=returns, values=returns, **sizes)  # type: ignore[arg-type]

    async def values(checkpoint: Path | None, trains: bool = False) -> list[list[float]]:
        folder = model if checkpoint is None else checkpoint / "model"
        cluster = RunCluster(config, tmp_path, folder, folder, checkpoint)
        await cluster.open()
        cluster.load()
        try:
            learner, critic = await cluster.learner()
            assert critic is not None
            if trains:
                critic.train_step(batch)
                learner.save(tmp_path / "step")
                learner.finish_save()
                critic.save(tmp_path / "step" / CRITIC)
                critic.finish_save()
            return [row.tolist() for row in critic.values(batch).values()]
        finally:
            await cluster.aclose()

    assert not np.concatenate(asyncio.run(values(None))).any()
    trained = asyncio.run(values(None, trains=True))
    assert np.concatenate(trained).any()
    assert asyncio.run(values(tmp_path / "step")) == trained
    (tmp_path / "step" / CRITIC).rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"step has no critic; start a new run with model\.path="):
        asyncio.run(values(tmp_path / "step"))


def test_without_gae_there_is_no_critic(tmp_path: Path) -> None:
    config = load_config(None, ["learner.device=cpu", "learner.threads=1"])

    async def critic() -> Any:
        model = make_model(tmp_path / "model")
        cluster = RunCluster(config, tmp_path, model, model)
        await cluster.open()
        cluster.load()
        try:
            return (await cluster.learner())[1]
        finally:
            await cluster.aclose()

    assert asyncio.run(critic()) is None


def test_a_start_that_waits_for_a_dead_ray_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to Ray blocks for minutes after its GCS was killed."""
    called, released = threading.Event(), threading.Event()

    def blocked(*_: Any, **__: Any) -> None:
        called.set()
        released.wait()

    def check_ray() -> None:
        if called.is_set():
            raise LearnerError("Ray's process gcs_server has ended")

    monkeypatch.setattr(run_cluster, "start_learners", blocked)
    monkeypatch.setattr(run_cluster, "check_ray", check_ray)
    config = load_config(None, ["learner.device=cpu", "learner.threads=1"])

    async def learner() -> None:
        model = make_model(tmp_path / "model")
        cluster = RunCluster(config, tmp_path, model, model)
        await cluster.open()
        cluster.load()
        try:
            await cluster.learner()
        finally:
            await cluster.aclose()
            released.set()

    with pytest.raises(LearnerError, match="gcs_server has ended"):
        asyncio.run(asyncio.wait_for(learner(), 30))


def test_ranks_that_load_are_ended_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model loads for minutes, and Ray may end once no thread waits for a rank."""
    loading, ended, events = threading.Event(), threading.Event(), []

    class Ranks:
        def ready(self) -> None:
            loading.set()
            ended.wait()
            events.append("no thread waits")
            raise LearnerError("the run ends")

        def end(self, why: str) -> None:
            ended.set()

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr(run_cluster, "start_learners", lambda *_, **__: Ranks())
    config = load_config(None, ["learner.device=cpu", "learner.threads=1"])

    async def start() -> None:
        model = make_model(tmp_path / "model")
        cluster = RunCluster(config, tmp_path, model, model)
        await cluster.open()
        cluster.load()
        await asyncio.to_thread(loading.wait)
        await asyncio.wait_for(cluster.aclose(), 30)

    asyncio.run(start())
    assert events == ["no thread waits", "closed"]


def test_an_interrupt_ends_the_wait_for_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may use the GPUs of a cluster for as long as ``learner.start_timeout_s``."""
    waiting, events = threading.Event(), []

    def reserve(*arguments: Any) -> None:
        waiting.set()
        assert arguments[-1].wait(60), "cancelled"
        events.append("ended")
        raise LearnerError("Ray has not given them")

    monkeypatch.setattr(run_cluster.ReservedPlacement, "reserve", reserve)
    monkeypatch.setattr(run_cluster, "lay_out", lambda *_: SimpleNamespace(total={"CPU": 1}))
    config = load_config(None, ["placement.mode=disaggregate", "sampler.backend=sglang", "learner.threads=1"])

    async def start() -> None:
        model = make_model(tmp_path / "model")
        cluster = RunCluster(config, tmp_path, model, model)
        opening = asyncio.create_task(cluster.open())
        await asyncio.to_thread(waiting.wait)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await cluster.aclose()

    asyncio.run(start())
    assert events == ["ended"]
