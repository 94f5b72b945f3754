"""Asynchronous training on GPUs that engines and learner share, in virtual time: episodes pause while the learner trains."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.batch.microbatch import GlobalBatch
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.obs.progress import Stopwatch
from agentrl.obs.rollouts import read_rollouts, rollout_files
from agentrl.testing import FakeLearner, ScriptedSampler
from agentrl.train.sampling import Sampling
from tests.unit.train.async_world import TRAIN_S, Engines, World, make_config, steps, train


class SharedEngines(Engines):
    """Engines whose memory the learner takes. A generation that is cut goes on with the weights that it finds."""

    def __init__(self, seed: int) -> None:
        """Draw latencies with ``seed``."""
        super().__init__(seed)
        self.memory = SimpleNamespace(release=self._release, resume=self._resume)
        self.held = asyncio.Event()
        self.held.set()
        self.cut = asyncio.Event()
        self.cuts: list[str | None] = []
        """How each release cut generations."""

    async def _release(self, cut: str | None = None) -> None:
        self.cuts.append(cut)
        if not self.held.is_set():
            return
        self.held.clear()
        if cut is not None:
            self.cut.set()
            await asyncio.sleep(0.01)
            self.cut.clear()
        assert self.running == 0

    async def _resume(self, tag: str) -> None:
        if tag == "kv_cache":
            self.held.set()

    async def generate(self, prompt: Prompt, params: SamplingParams, **names: Any) -> Generation:
        """Return the script's answer, with the versions that sampled its tokens."""
        clock, total = asyncio.get_running_loop(), min(60.0, self.latency.lognormvariate(0.0, 1.5))
        remaining_s, parts = total, []
        while remaining_s > 1e-6:
            await self.held.wait()
            begin, self.running = clock.time(), self.running + 1
            parts.append((1 - remaining_s / total, self.version))
            try:
                async with asyncio.timeout(remaining_s):
                    await self.cut.wait()
            except TimeoutError:
                break
            finally:
                self.running -= 1
            remaining_s -= clock.time() - begin
        full_generation = await ScriptedSampler.generate(self, prompt, params, **names)
        count = len(full_generation.token_ids)
        spans = dict.fromkeys([0], parts[0][1]) | {int(share * count): version for share, version in parts}
        return Generation(
            full_generation.token_ids,
            full_generation.logprobs,
            full_generation.finish_reason,
            tuple(spans.items()),
            0,
            names["request_id"],
        )


class Alone(FakeLearner):
    """Trains only while no engine runs anything."""

    engines: SharedEngines

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        assert self.engines.running == 0
        assert not self.engines.held.is_set()
        return super().train_step(batch)


class Shared(World):
    """Engines and learner take turns."""

    async def release_gpus_for_training(self, learner: Any, watch: Stopwatch) -> None:
        await Sampling.release_gpus_for_training(self, learner, watch)
        await asyncio.sleep(TRAIN_S)


def run(folder: Path, staleness: int, *overrides: str) -> tuple[SharedEngines, float]:
    """Train eight steps; return the engines, and the virtual seconds until the last step."""
    engines, learner, ends = SharedEngines(0), Alone(), [0.0]
    learner.engines = engines

    class Timed(Shared):
        async def sync_weights(self, learner: Any, version: int, watch: Stopwatch) -> None:
            await Shared.sync_weights(self, learner, version, watch)
            ends.append(asyncio.get_running_loop().time())

    config = make_config("train.steps=8", f"async.max_staleness={staleness}", "rollout.concurrency=40", *overrides)
    config.placement.mode = "colocate"
    train(folder, config, kind=Timed, learner=learner, engines=engines)
    return engines, ends[-1]


@pytest.mark.parametrize("staleness", [1, 4])
def test_episodes_pause_while_the_learner_trains_and_go_on_after_the_sync(tmp_path: Path, staleness: int) -> None:
    engines, seconds = run(tmp_path / "async", staleness)
    assert {*engines.cuts} == {"abort"}
    rows = steps(tmp_path / "async")
    assert max(row["async/staleness_max"] for row in rows) == staleness
    assert sum(row["async/mixed_rows"] for row in rows) > 0, "some were cut, and went on with new weights"
    assert {"time/wake_s", "time/sleep_s", "time/sync_s"} <= rows[1].keys()
    assert "time/pause_s" not in rows[1], "a sync cuts nothing"
    rollouts = [rollout for path in rollout_files(tmp_path / "async").values() for rollout in read_rollouts(path)]
    assert len({rollout.rollout_id for rollout in rollouts}) == len(rollouts) == 64
    engines, alone = run(tmp_path / "sync", 0)
    assert {*engines.cuts} == {None}
    assert alone > 1.2 * seconds, "the longest episodes of a step are not waited for"
