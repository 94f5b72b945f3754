"""What the embedded engine holds in memory once it has given that back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from engine_tiny import save_model

from agentrl.inference.embedded.errors import BadRequestError
from agentrl.inference.embedded.model import Model
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


def test_weights_and_cache_are_really_dropped(scheduler: Scheduler, folder: Path) -> None:
    model = scheduler.model

    def held() -> int:
        kept = [tensor for _, tensor in model.parameters()]
        cached = [*model.cache._keys.values(), *model.cache._values.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in (*kept, *cached))

    async def play() -> None:
        whole = held()
        await scheduler.release(["kv_cache"])
        assert 0 < held() < whole
        await scheduler.release(["weights"])
        assert held() == 0
        for use in (model.load_folder, model.load_weights):
            with pytest.raises(BadRequestError, match="/resume_memory_occupation comes first"):
                use(folder if use == model.load_folder else [])
        scheduler.take_back(["weights", "kv_cache"])
        assert all(tensor.isnan().all() for _, tensor in model.parameters())
        model.load_folder(folder)
        wanted = dict(load_model(folder).named_parameters())
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.parameters())

    asyncio.run(play())


def test_what_runs_ends_first_and_what_comes_waits(scheduler: Scheduler, folder: Path) -> None:
    async def play() -> None:
        loop = asyncio.create_task(scheduler.run())
        asked, _ = parse_generate({"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 20}})
        running = scheduler.submit(asked[0])
        await asyncio.sleep(0.01)
        giving = asyncio.create_task(scheduler.release(["weights", "kv_cache"]))
        await asyncio.sleep(0)
        late = scheduler.submit(asked[0])
        await giving
        assert running.done.done()
        await asyncio.sleep(0.05)
        scheduler.take_back(["kv_cache"])
        await asyncio.sleep(0.05)
        assert not late.output
        scheduler.take_back(["weights"])
        async with scheduler.update("1"):
            scheduler.model.load_folder(folder)
        await late.done
        assert [version for _, version in late.versions] == ["1"]
        loop.cancel()

    asyncio.run(play())


def test_what_sglang_would_end_of_is_refused(scheduler: Scheduler) -> None:
    async def play() -> None:
        with pytest.raises(BadRequestError, match="was not given back"):
            scheduler.take_back(["weights"])
        with pytest.raises(BadRequestError, match=r"tags=\['disk'\]"):
            await scheduler.release(["disk"])
        scheduler.begin_update()
        with pytest.raises(BadRequestError, match="update is under way"):
            await scheduler.release(["weights"])
        scheduler.end_update()
        await scheduler.release(["weights"])
        with pytest.raises(BadRequestError, match=r"\['weights'\] was given back already"):
            await scheduler.release(["weights", "kv_cache"])

    asyncio.run(play())
