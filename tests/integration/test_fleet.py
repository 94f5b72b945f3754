"""Several real engines as one sampler: what becomes of requests and weights when one is killed or stopped."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deadlines import until
from engine_tiny import save_model

from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, EngineError, SamplerError
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.launch.launcher import EngineSpec, LocalLauncher
from agentrl.models.load import read_vocab_size
from agentrl.obs.progress import Stopwatch
from agentrl.runtime.interrupt import Interrupt
from agentrl.train.engine_weights import EngineWeights, open_gpus
from agentrl.train.sampling import Sampling
from agentrl.weight_sync.base import SyncedWeights

pytestmark = pytest.mark.slow

SETTINGS = [
    "rollout.max_tokens=512",
    "sampler.embedded.slots=16",
    "sampler.embedded.context=512",
    "sampler.embedded.threads=1",
    "sampler.health_interval_s=0.2",
    "sampler.stall_timeout_s=2",
    "sampler.update_timeout_s=2",
    "sampler.request_timeout_s=60",
]

NEEDS_ROUTER = pytest.mark.skipif(find_spec("sglang_router") is None, reason="sglang-router is not installed")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return save_model(root / "a", seed=0), save_model(root / "b", seed=1)


def configured(*settings: str) -> Config:
    return load_config(None, [*SETTINGS, *settings])


@asynccontextmanager
async def opened(config: Config, model: Path, folder: Path) -> AsyncIterator[Fleet]:
    launcher = LocalLauncher(EngineSpec(config.sampler, model, folder, 0))
    vocabulary = Vocabulary(read_vocab_size(model), lambda ids: "")
    fleet = Fleet(config.sampler, launcher, folder, vocabulary=vocabulary, max_tokens=config.rollout.max_tokens)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.aclose()


def pids(fleet: Fleet) -> list[int]:
    processes = [engine.process for engine in fleet._engines]
    return [process.child.pid for process in processes if process is not None]


async def play(fleet: Fleet, sessions: int, turns: int, tokens: int) -> dict[str, Generation]:
    """Play episodes of several turns, each after what was said before; what comes depends on weights and seeds alone."""
    generations: dict[str, Generation] = {}

    async def episode(number: int) -> None:
        source = random.Random(number)
        ids = tuple(source.randrange(2, 384) for _ in range(20))
        for turn in range(turns):
            name = f"{number}/{turn}"
            params = SamplingParams(max_new_tokens=tokens, seed=100 * number + turn)
            generation = await fleet.sampler.generate(Prompt(ids), params, session_id=str(number), request_id=name)
            assert name not in generations
            generations[name] = generation
            ids += (*generation.token_ids, 5, 6, 7)
        await fleet.sampler.close_session(str(number))

    await asyncio.gather(*(episode(number) for number in range(sessions)))
    return generations


def tokens(generations: dict[str, Generation]) -> dict[str, tuple[int, ...]]:
    return {name: generation.token_ids for name, generation in generations.items()}


@pytest.mark.parametrize("router", ["builtin", pytest.param("sglang", marks=[NEEDS_ROUTER, pytest.mark.long])])
def test_killed_and_stopped_in_mid_rollout(tmp_path: Path, models: tuple[Path, Path], router: str) -> None:
    """The same tokens come as without the faults; who comes back samples with the weights that were sent meanwhile."""
    first, second = models

    async def sync_weights(engine: Any) -> int:
        await engine.updates.from_disk(second, 3)
        return 3

    async def run() -> None:
        async with opened(configured("sampler.engines=2", f"sampler.router={router}"), first, tmp_path) as fleet:
            for client in fleet.live:
                await client.updates.from_disk(second, 3)
            fleet.set_weight_sync(sync_weights)
            calm = await play(fleet, sessions=8, turns=3, tokens=60)
            assert all(calm[f"{number}/2"].cached_tokens > 100 for number in range(8)), "each where its prefix is"
            metrics = fleet.metrics()
            assert metrics["rollout/cache_hit"] > 0.6
            assert metrics["rollout/engine_restarts"] == 0
            await fleet.flush()

            begun, pids_before = fleet.sampler.counts["prompt"], pids(fleet)
            playing = asyncio.ensure_future(play(fleet, sessions=8, turns=3, tokens=60))
            await until(lambda: fleet.sampler.counts["prompt"] > begun)
            os.kill(pids_before[0], signal.SIGKILL)
            await until(lambda: len(fleet.live) == 1)
            os.kill(pids_before[1], signal.SIGSTOP)
            faulty = await playing
            assert tokens(faulty) == tokens(calm)
            assert {generation.versions for generation in faulty.values()} == {((0, 3),)}
            await until(lambda: len(fleet.live) == 2)
            assert not set(pids(fleet)) & set(pids_before)
            assert not any(alive(pid) for pid in pids_before), "a stopped engine is not left behind"
            assert await asyncio.gather(*(client.version() for client in fleet.live)) == [3, 3]
            assert fleet.metrics()["rollout/engine_restarts"] == 2
            assert tokens(await play(fleet, sessions=8, turns=1, tokens=60)).items() <= tokens(calm).items()
            logs = [file.name for file in tmp_path.glob("*.log")]
            assert sorted(logs) == ["engine-0.log", "engine-1.log"] + ["router.log"] * (router == "sglang")

    asyncio.run(run())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class KillingSync:
    """Sends weights from a folder; at each sync the next fault strikes first."""

    def __init__(self, folder: Path, faults: list[Callable[[], None]]) -> None:
        self.folder = folder
        self.faults = faults
        self.pushes: list[tuple[int, int]] = []

    async def sync_weights(self, learner: Any, engines: Any, version: int) -> SyncedWeights:
        self.pushes.append((len(engines), version))
        if self.faults:
            self.faults.pop(0)()
        for engine in engines:
            await engine.updates.from_disk(self.folder, version)
        return SyncedWeights(version, 0)

    async def aclose(self) -> None:
        pass


def test_an_engine_that_goes_during_the_push_gets_its_weights_later(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """It is killed while all get new weights; and as it gets them after its restart, it is stopped."""
    first, second = models

    async def run() -> None:
        config = configured("sampler.engines=2")
        async with opened(config, first, tmp_path) as fleet:

            def strike(fault: signal.Signals) -> Callable[[], None]:
                return lambda: os.kill(pids(fleet)[1], fault)

            sync = KillingSync(second, [strike(signal.SIGKILL), lambda: None, strike(signal.SIGSTOP)])
            services: Any = SimpleNamespace(fleet=fleet)
            unused: Any = None
            records: Any = SimpleNamespace(journal=SimpleNamespace(batch=lambda step: None))
            weights = EngineWeights(config.weights, fleet, sync, open_gpus(config, fleet))  # type: ignore[arg-type]
            source = Sampling(config, services, unused, weights, records, Interrupt(print))
            learner: Any = object()
            await source.weights.open()
            await source.sync_weights(learner, 4, Stopwatch())
            assert len(fleet.live) == 1, "it waits for its weights"
            assert await fleet.live[0].version() == 4
            async with source.weights.learner_idle():
                rollout = await play(fleet, sessions=4, turns=1, tokens=20)
                await until(lambda: len(fleet.live) == 2)
            assert {generation.versions for generation in rollout.values()} == {((0, 4),)}
            assert [await client.version() for client in fleet.live] == [4, 4]
            assert sync.pushes == [(2, 4), (1, 4), (1, 4), (1, 4)]
            assert fleet.metrics()["rollout/engine_restarts"] == 2
            sync.folder = tmp_path / "nowhere"
            with pytest.raises(EngineError, match="is not a folder"):
                await source.sync_weights(learner, 5, Stopwatch())

    asyncio.run(run())


class Sleeper:
    """A learner of which only its turns are asked."""

    awake = True

    def sleep(self) -> None:
        self.awake = False

    def wake(self) -> None:
        self.awake = True


@pytest.mark.long
def test_an_engine_that_dies_in_the_learners_turn_waits_for_its_own(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """Starting it takes the memory that the learner works with."""
    first, second = models

    async def run() -> None:
        config = configured("placement.mode=colocate")
        async with opened(config, first, tmp_path) as fleet:
            services: Any = SimpleNamespace(fleet=fleet)
            unused: Any = None
            learner: Any = Sleeper()
            sync: Any = KillingSync(second, [])
            weights = EngineWeights(config.weights, fleet, sync, open_gpus(config, fleet))
            records: Any = SimpleNamespace(journal=SimpleNamespace(batch=lambda step: None))
            source = Sampling(config, services, unused, weights, records, Interrupt(print))
            watch = Stopwatch()
            await source.weights.open()
            await source.sync_weights(learner, 1, watch)
            assert not learner.awake
            async with source.weights.learner_idle():
                rollout_before = await play(fleet, sessions=4, turns=1, tokens=20)
            await source.release_gpus_for_training(learner, watch)
            [lost] = pids(fleet)
            os.kill(lost, signal.SIGKILL)
            await until(lambda: not fleet.live)
            await fleet.wait_ended()
            await asyncio.sleep(0.5)
            assert pids(fleet) == [lost], "nothing is started"
            assert learner.awake
            await source.sync_weights(learner, 2, watch)
            async with source.weights.learner_idle():
                rollout_after = await play(fleet, sessions=4, turns=1, tokens=20)
                assert not learner.awake
            assert {generation.versions for generation in rollout_before.values()} == {((0, 1),)}
            assert {generation.versions for generation in rollout_after.values()} == {((0, 2),)}
            assert tokens(rollout_before) == tokens(rollout_after), "the weights are the same"
            assert pids(fleet) != [lost]

    asyncio.run(run())


@pytest.mark.parametrize("router", ["builtin", pytest.param("sglang", marks=NEEDS_ROUTER)])
def test_attached_engines_and_the_end_of_the_last_one(tmp_path: Path, models: tuple[Path, Path], router: str) -> None:
    """Engines that run already are taken out when they stop answering, and back in once they do, with new weights."""
    first, second = models

    async def attached(other_fleet: Fleet, urls: list[str]) -> None:
        config = configured(f"sampler.url={urls[0]}, {urls[1]}", "sampler.max_running=2", f"sampler.router={router}")
        async with opened(config, first, tmp_path) as fleet:
            resent: list[SGLangClient] = []

            async def sync_weights(engine: Any) -> int:
                resent.append(engine)
                await engine.updates.from_disk(second, 2)
                return 2

            fleet.set_weight_sync(sync_weights)
            [stopped, _] = pids(other_fleet)
            os.kill(stopped, signal.SIGSTOP)
            try:
                rollout = await play(fleet, sessions=6, turns=2, tokens=20)
                assert len(rollout) == 12
                assert [client.url for client in fleet.live] == [urls[1]]
            finally:
                os.kill(stopped, signal.SIGCONT)
            await until(lambda: len(fleet.live) == 2)
            assert [client.url for client in resent] == [urls[0]]
            fleet.check()
            for pid in pids(other_fleet):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(SamplerError, match="no engine is left"):
                await play(fleet, sessions=6, turns=2, tokens=20)
            with pytest.raises(EngineError, match=r"no engine is left. engine-.*(cannot be reached|not answered)"):
                fleet.check()

    async def run() -> None:
        config = configured("sampler.engines=2", "sampler.stall_timeout_s=60", "sampler.max_restarts=0")
        async with opened(config, first, tmp_path) as other_fleet:
            urls = [client.url for client in other_fleet.live]
            with pytest.raises(ConfigError, match=r"sampler\.url=http://127.0.0.1:1: no healthy engine"):
                async with opened(configured(f"sampler.url={urls[0]},http://127.0.0.1:1"), first, tmp_path):
                    pass
            await attached(other_fleet, urls)
            with pytest.raises(SamplerError, match="no engine is left"):
                await play(other_fleet, sessions=1, turns=1, tokens=5)
            with pytest.raises(EngineError, match=r"(?s)no engine is left.*max_restarts=0.*SIGKILL.*engine-.\.log"):
                other_fleet.check()

    asyncio.run(run())
