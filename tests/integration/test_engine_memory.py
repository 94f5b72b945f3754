"""Memory release of the embedded engine: what is freed, and what is allocated again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from deadlines import until
from engine_tiny import save_model

from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.replies import BadRequestError
from agentrl.inference.embedded.request import parse_generate
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.stop_strings import StopMatcher
from agentrl.models.load import load_model, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def scheduler(folder: Path) -> Scheduler:
    model = Model(folder, torch.float32, slots=4, context=64)
    return Scheduler(model, StopMatcher(load_tokenizer(folder), model.vocabulary), slots=4, seed=0, version="0")


def test_weights_and_cache_are_freed(scheduler: Scheduler, folder: Path) -> None:
    model = scheduler.model

    def allocated_bytes() -> int:
        kept_tensors = [tensor for _, tensor in model.parameters()]
        cached = [*model.cache._keys.values(), *model.cache._values.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in (*kept_tensors, *cached))

    async def run() -> None:
        allocated = allocated_bytes()
        await scheduler.release_memory(["kv_cache"])
        assert 0 < allocated_bytes() < allocated
        await scheduler.release_memory(["weights"])
        assert allocated_bytes() == 0
        for use in (model.load_folder, model.load_weights):
            with pytest.raises(BadRequestError, match="call /resume_memory_occupation first"):
                use(folder if use == model.load_folder else [])
        scheduler.resume_memory(["weights", "kv_cache"])
        assert all(tensor.isnan().all() for _, tensor in model.parameters())
        model.load_folder(folder)
        expected = dict(load_model(folder).named_parameters())
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.parameters())

    asyncio.run(run())


def test_running_requests_end_first_and_new_ones_wait(scheduler: Scheduler, folder: Path) -> None:
    async def run() -> None:
        loop = asyncio.create_task(scheduler.run())
        inputs, _ = parse_generate({"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 20}})
        running = scheduler.submit(inputs[0])
        await until(lambda: bool(running.output))
        releasing = asyncio.create_task(scheduler.release_memory(["weights", "kv_cache"]))
        await asyncio.sleep(0)
        late = scheduler.submit(inputs[0])
        await releasing
        assert running.done.done()
        await asyncio.sleep(0.05)
        scheduler.resume_memory(["kv_cache"])
        await asyncio.sleep(0.05)
        assert not late.output
        scheduler.resume_memory(["weights"])
        async with scheduler.update("1"):
            scheduler.model.load_folder(folder)
        await late.done
        assert [version for _, version in late.versions] == ["1"]
        loop.cancel()

    asyncio.run(run())


def test_releases_that_would_kill_sglang_are_refused(scheduler: Scheduler) -> None:
    async def run() -> None:
        with pytest.raises(BadRequestError, match="was not released"):
            scheduler.resume_memory(["weights"])
        with pytest.raises(BadRequestError, match=r"tags=\['disk'\]"):
            await scheduler.release_memory(["disk"])
        scheduler.begin_update()
        with pytest.raises(BadRequestError, match="update is in progress"):
            await scheduler.release_memory(["weights"])
        scheduler.end_update()
        await scheduler.release_memory(["weights"])
        with pytest.raises(BadRequestError, match=r"\['weights'\] was released already"):
            await scheduler.release_memory(["weights", "kv_cache"])

    asyncio.run(run())
