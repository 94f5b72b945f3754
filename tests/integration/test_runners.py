"""Runner processes against an engine whose replies are a function of the request: the same rollouts as in one process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import RunnerError
from agentrl.core.task import Task
from agentrl.core.types import Message, Rollout, Row
from agentrl.data.jobs import TaskJobs
from agentrl.data.order import TaskOrder
from agentrl.data.task_sources import NoTasks
from agentrl.models.resolve import resolve_model
from agentrl.runtime.runners.pool import RunnerPool
from agentrl.runtime.runners.runner import RemoteRunners
from agentrl.runtime.services import Services, open_services
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.scheduler import GroupScheduler, open_scheduler
from agentrl.train.rollout_source import TaskPosition
from tests.deadlines import until, wait_for_exit

pytestmark = pytest.mark.slow

ENVIRONMENT = """
import os, pathlib, signal
from agentrl.core.env import Env
from agentrl.core.types import Message

class Walk(Env):
    '''Ends at a number of turns that its generator draws. A task may kill its process, while a file says so.'''

    def __init__(self, folder=""):
        self.folder = pathlib.Path(folder)

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        self.left = int(self.np_random.integers(1, 5))
        self.crash = self.folder / f"crash-{options['task'].id}"
        self.fault = self.folder / f"fault-{options['task'].id}"
        return observation, info

    def step(self, action):
        self.left -= 1
        if self.fault.exists():
            raise ValueError("no such move")
        if self.crash.exists() and not self.left:
            if self.crash.read_text() == "once":
                self.crash.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        text = f"{self.np_random.integers(1000)} {len(action.content)}"
        return (() if not self.left else (Message("user", text),)), float(len(action.content)), not self.left, False, {}
"""
TASKS = [Task(f"t{number}", (Message("user", f"go {number}"),), metadata={"number": number}) for number in range(12)]


class Engine:
    """Answers ``/generate`` as SGLang does, with tokens that the prompt and the seed alone decide."""

    def __init__(self) -> None:
        self.requests = 0
        self.held = asyncio.Event()
        self.held.set()
        self.first_released = asyncio.Event()
        """The first request waits for it, the others do not."""
        self.first_released.set()
        self.calls: list[str] = []
        """Other endpoints, in order."""

    async def generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.requests += 1
        if self.requests == 1:
            await self.first_released.wait()
        await self.held.wait()
        sampling, ids = body["sampling_params"], body["input_ids"]
        rng = random.Random(zlib.crc32(json.dumps([ids, sampling["sampling_seed"], sampling["temperature"]]).encode()))
        count = rng.randint(1, min(12, sampling["max_new_tokens"]))
        tokens = [rng.randrange(100, 200) for _ in range(count)]
        entries = [[-rng.random(), token, None] for token in tokens]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "length", "length": count},
            "prompt_tokens": len(ids),
            "completion_tokens": count,
            "cached_tokens": 1,
            "weight_version": "0",
            "output_token_logprobs": entries,
        }
        return web.json_response({"output_ids": tokens, "meta_info": meta})

    async def answer(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        return web.json_response({"success": True, "max_req_input_len": 4096, "weight_version": "0"})


@asynccontextmanager
async def running_engine() -> AsyncIterator[tuple[Engine, str]]:
    engine, app = Engine(), web.Application(client_max_size=2**26)
    app.router.add_post("/generate", engine.generate)
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield engine, f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def make_config(folder: Path, url: str, *settings: str) -> Config:
    (folder / "walk.py").write_text(ENVIRONMENT)
    fixed = (
        f"env.name={folder}/walk.py:Walk", f"env.options={{folder: {folder}}}", "sampler.backend=sglang", f"sampler.url={url}",
        "sampler.max_running=8", "rollout.batch_size=3", "rollout.n_samples_per_prompt=2", "rollout.concurrency=8",
        "rollout.max_tokens=512", "train.steps=3", "train.eval_every=0",
    )  # fmt: skip
    return load_config(None, [*fixed, *settings])


@asynccontextmanager
async def opened(config: Config, folder: Path, *, runners: RemoteRunners | None = None) -> AsyncIterator[Services]:
    folder.mkdir(exist_ok=True)
    model = resolve_model(config.model.path)
    async with open_services(config, {"": NoTasks()}, model, folder, 0, runners=runners) as services:
        yield services


def scheduler_of(services: Services, journal: Journal, done: list[str]) -> GroupScheduler:
    jobs = TaskJobs(services.config, TaskOrder(TASKS, 0))
    return open_scheduler(
        services.config,
        0,
        TaskPosition(),
        journal,
        runner=services.runner(),
        group_jobs=jobs.group,
        guard=nullcontext,
        on_done=lambda rollout: done.append(rollout.rollout_id),
        self_play=None,
    )


async def take_steps(services: Services, folder: Path, steps: int) -> tuple[list[Rollout], list[str]]:
    """The rollouts of the first steps, and the ids in the order in which they were finished."""
    journal, done = Journal(folder).begin(), list[str]()
    scheduler = scheduler_of(services, journal, done)
    rollouts = [rollout for _ in range(steps) for rollout in (await scheduler.take()).rollouts]
    await scheduler.aclose()
    journal.close()
    return rollouts, done


def comparable(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """All of rollouts but their times."""

    def of_row(row: Row) -> list[Any]:
        values = [getattr(row, field.name) for field in fields(row)]
        return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]

    left_out = ("rows", "seconds", "tool_seconds", "tool_uses", "record")
    return [
        {field.name: getattr(rollout, field.name) for field in fields(rollout) if field.name not in left_out}
        | {"rows": [of_row(row) for row in rollout.rows]}
        for rollout in rollouts
    ]


def pool_of(services: Services) -> RunnerPool:
    assert services.pool is not None
    return services.pool


def test_two_runners_give_the_rollouts_of_one_process_also_if_one_is_killed(tmp_path: Path) -> None:
    """In the last pass a task kills its process once, and a runner is killed while its requests wait, and as it starts again."""

    async def main() -> None:
        async with running_engine() as (engine, url):
            config = make_config(tmp_path, url, "rollout.runners=0")
            async with opened(config, tmp_path / "one") as services:
                expected, _ = await take_steps(services, tmp_path / "one", 3)
                first_requests = engine.requests
            config = make_config(tmp_path, url, "rollout.runners=2")
            async with opened(config, tmp_path / "two") as services:
                rollouts, done = await take_steps(services, tmp_path / "two", 3)
                assert comparable(rollouts) == comparable(expected)
                assert sorted(done) == sorted(rollout.rollout_id for rollout in expected)
                assert engine.requests == 2 * first_requests
                await until(lambda: services.fleet.sampler.counts["cached"] == first_requests)
                (tmp_path / f"crash-{expected[0].prompt_id}").write_text("once")
                engine.held.clear()
                taking = asyncio.create_task(take_steps(services, tmp_path / "three", 3))
                await until(lambda: engine.requests == 2 * first_requests + 6)
                killed = pool_of(services).pids[0]
                os.kill(killed, signal.SIGKILL)
                await until(lambda: pool_of(services).pids[0] != killed)
                os.kill(pool_of(services).pids[0], signal.SIGKILL)  # while it starts again
                engine.held.set()
                rollouts, done = await taking
                assert comparable(rollouts) == comparable(expected)
                assert sorted(done) == sorted(rollout.rollout_id for rollout in expected), "none lost, none twice"
                assert pool_of(services).restarts == 3
                pids = pool_of(services).pids
            for pid in pids:
                wait_for_exit(pid)
        assert not (tmp_path / f"crash-{expected[0].prompt_id}").exists(), "it has killed a runner"

    asyncio.run(main())


def test_a_run_that_is_cut_goes_on_in_a_runner_with_the_same_rollouts(tmp_path: Path) -> None:
    async def sample(runners: int, folder: Path) -> list[Rollout]:
        async with (
            running_engine() as (_, url),
            opened(make_config(tmp_path, url, f"rollout.runners={runners}"), folder) as services,
        ):
            return (await take_steps(services, folder, 1))[0]

    async def cut(folder: Path) -> list[str]:
        """The ids of the rollouts that had finished."""
        async with (
            running_engine() as (engine, url),
            opened(make_config(tmp_path, url, "rollout.runners=1"), folder) as services,
        ):
            journal, done = Journal(folder).begin(), list[str]()
            scheduler = scheduler_of(services, journal, done)
            engine.first_released.clear()
            taking = asyncio.create_task(scheduler.take())
            await until(lambda: bool(done))
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            await scheduler.aclose()
            journal.close()
            engine.first_released.set()
            return done

    expected = asyncio.run(sample(0, tmp_path / "one"))
    assert 0 < len(asyncio.run(cut(tmp_path / "two"))) < len(expected)
    assert comparable(asyncio.run(sample(1, tmp_path / "two"))) == comparable(expected)


def test_a_task_that_always_kills_its_runner_is_dropped_and_a_limit_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running_engine() as (_, url):
            (tmp_path / "crash-t3").write_text("always")
            (tmp_path / "fault-t5").touch()
            settings = ("rollout.runners=1", "rollout.failure.max_retries=1", "rollout.failure.max_failed_share=1")
            async with opened(make_config(tmp_path, url, *settings), tmp_path) as services:
                jobs = TaskJobs(services.config, TaskOrder(TASKS, 0)).groups(range(12))
                rollouts = await services.runner().run_many(jobs)
                failed = {rollout.prompt_id for rollout in rollouts if rollout.failure is not None}
                assert failed == {"t3", "t5"}, "the last try of what a loss has ended is alone in its runner"
                assert "runner 0: Walk.step raised ValueError: no such move" in caplog.text, (
                    "the run shows its warnings"
                )
                assert "runner 0 ended (signal SIGKILL) with" in caplog.text
                assert [rollout.rollout_id for rollout in rollouts] == [job.rollout_id for job in jobs]
                [failure] = {rollout.failure for rollout in rollouts if rollout.prompt_id == "t3"}
                assert failure is not None
                assert (failure.error, failure.message) == ("RunnerError", "runner 0 ended (signal SIGKILL)")
            async with opened(
                make_config(tmp_path, url, *settings, "rollout.max_runner_restarts=0"), tmp_path
            ) as services:
                with pytest.raises(
                    RunnerError, match=r"rollout\.max_runner_restarts=0 are used up, log: .*runner-0\.log"
                ):
                    await services.runner().run_many([job for job in jobs if job.task.id == "t3"])
                with pytest.raises(RunnerError):
                    services.check()

    asyncio.run(main())


def test_a_runner_that_hangs_is_killed_and_a_pause_reaches_requests_in_runners(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_engine() as (engine, url):
            config = make_config(tmp_path, url, "rollout.runners=1", "rollout.runner_timeout_s=2")
            async with opened(config, tmp_path) as services:
                jobs = TaskJobs(services.config, TaskOrder(TASKS, 0)).groups(range(3))
                expected = await services.runner().run_many(jobs)
                [client] = services.fleet.live
                await client.pause("retract")
                requests = engine.requests
                running = asyncio.create_task(services.runner().run_many(jobs))
                await until(lambda: pool_of(services)._runners[0].running > 0)
                assert await client._unanswered() == 0
                assert engine.requests == requests, "requests wait while the engine is paused"
                engine.held.clear()
                await client.resume()
                await until(lambda: engine.requests == requests + len(jobs))
                assert await client._unanswered() == len(jobs)
                [pid] = pool_of(services).pids
                os.kill(pid, signal.SIGSTOP)

                def is_replaced() -> bool:
                    services.check()
                    return pool_of(services).restarts == 1

                await until(is_replaced)
                wait_for_exit(pid)
                engine.held.set()
                assert comparable(await running) == comparable(expected)

    asyncio.run(main())
