"""Runs whose judge has the GPUs of policy and learner in turn with them, in virtual time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.rewards import RewardConfig
from agentrl.core.errors import EngineError, RunStopped
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.obs.progress import Stopwatch
from agentrl.obs.rollouts import read_rollouts, rollout_files
from agentrl.rewards.engine_judge import EngineJudge
from agentrl.rewards.grader import Grader, RewardGrader
from agentrl.testing import FakeLearner, ScriptedSampler
from tests.unit.train.async_world import RENDERER, World, make_config, steps, train
from tests.unit.train.test_shared_gpus import Shared, SharedEngines

CALL_S = 1.0
"""Of a judgement."""


def score(request: Any) -> str:
    """A score of the prompt; some texts have none."""
    value = zlib.crc32(repr(request.prompt.token_ids).encode())
    return f"[[{value % 11}]]" if value % 7 else "Who knows?"


class JudgeEngines(ScriptedSampler):
    """A fleet of a judge that is its own only engine. It holds memory, or generations wait; never while others hold it."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(score, encode=RENDERER.encode, end_token_id=RENDERER.end_token_id)
        self.log = log
        self.others: list[SharedEngines | JudgeEngines] = []
        self.held = asyncio.Event()
        self.waiting = self.running = 0
        self.memory = self
        self.live = (self,)
        self.refuses = False
        self.dies_at = 0
        """The judgement that ends the run."""
        self._demand: Callable[[], None] = lambda: None

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting)

    def on_demand(self, call: Callable[[], None]) -> None:
        self._demand = call

    def restart_in(self, context: AbstractAsyncContextManager[None]) -> None: ...

    async def start(self) -> None:
        assert not any(other.held.is_set() for other in self.others), "it starts on GPUs that others have left"
        self.held.set()

    async def check_now(self) -> None: ...

    async def wait_ended(self) -> None: ...

    async def release(self) -> None:
        assert not self.running
        if self.held.is_set():
            self.log.append("judge sleeps")
        self.held.clear()

    async def resume(self, tag: str) -> None:
        assert not any(other.held.is_set() or other.running for other in self.others)
        if self.refuses:
            raise EngineError("judge-0: out of memory")
        if tag == "kv_cache":
            self.log.append("judge wakes")
            self.held.set()

    async def generate(self, prompt: Prompt, params: SamplingParams, **names: Any) -> Generation:
        self.waiting += 1
        self._demand()
        try:
            await self.held.wait()
            self.running += 1
            try:
                await asyncio.sleep(CALL_S)
            finally:
                self.running -= 1
            self.log.append("judgement")
            if self.log.count("judgement") == self.dies_at:
                raise RunStopped("killed")
            return await super().generate(prompt, params, **names)
        finally:
            self.waiting -= 1
            self._demand()


class PolicyEngines(SharedEngines):
    """The policy's engines, which log when they get and release memory."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(0)
        self.log = log
        self.others: list[JudgeEngines] = []

    async def _release(self, cut: str | None = None) -> None:
        if self.held.is_set():
            self.log.append("policy sleeps")
        await super()._release(cut)

    async def _resume(self, tag: str) -> None:
        assert not any(other.held.is_set() or other.running for other in self.others)
        if tag == "kv_cache" and not self.held.is_set():
            self.log.append("policy wakes")
        await super()._resume(tag)


class Alone(FakeLearner):
    """Trains only while no engine holds memory, unless it has its own GPUs."""

    def __init__(self, engines: list[PolicyEngines | JudgeEngines], log: list[str]) -> None:
        super().__init__()
        self.engines, self.log = engines, log

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        assert not any(engine.held.is_set() or engine.running for engine in self.engines)
        self.log.append("train")
        return super().train_step(batch)


class Disaggregated(World):
    """The policy's engines must hold memory when they get weights."""

    async def sync_weights(self, learner: Any, version: int, watch: Stopwatch) -> None:
        await super().sync_weights(learner, version, watch)
        (engine,) = self.services.fleet.live
        assert engine.held.is_set()


JUDGE = {"judge": {"model": "small", "rubric": "R"}, "function": "judge"}


def play(
    folder: Path, *overrides: str, mode: str = "colocate", judges: int = 1, shared: bool = True, **faults: Any
) -> list[str]:
    """Train four steps, and return what happened in its order.

    Args:
        folder: of the run, which is resumed if it is there.
        overrides: of the configuration.
        mode: ``placement.mode``.
        judges: models of judges, each of which gives a reward.
        shared: whether they share GPUs; otherwise they are always awake.
        faults: attributes of the first judge.
    """
    log: list[str] = []
    policy, engines = PolicyEngines(log), [JudgeEngines(log) for _ in range(judges)]
    everyone: list[PolicyEngines | JudgeEngines] = [policy, *engines]
    if shared:
        for engine in everyone:
            engine.others = [other for other in everyone if other is not engine]  # type: ignore[misc]
    else:
        for engine in engines:
            engine.held.set()
    for name, value in faults.items():
        setattr(engines[0], name, value)
    config = make_config("train.steps=4", *overrides)
    config.placement.mode = mode  # type: ignore[assignment]
    names = [f"judge-{number}" for number in range(judges)]
    reward = RewardConfig.model_validate(JUDGE if judges == 1 else {"functions": dict.fromkeys(names, JUDGE)})
    models = {
        name: EngineJudge(name, RENDERER, engine)
        for name, engine in zip(["judge"] if judges == 1 else names, engines, strict=True)
    }
    grader: Grader = RewardGrader(reward, models)
    learner = Alone(everyone, log) if shared and mode == "colocate" else FakeLearner()
    train(
        folder, config, kind=Shared if mode == "colocate" else Disaggregated, learner=learner, engines=policy, grader=grader,
        judges=dict(zip(names, engines, strict=True)) if shared else None,
    )  # fmt: skip
    assert not shared or not any(engine.waiting for engine in engines)
    return log


def rewards(folder: Path) -> dict[str, float]:
    """The reward of each rollout that was trained; of one without a reward None."""
    rollouts = [rollout for path in rollout_files(folder).values() for rollout in read_rollouts(path)]
    return {rollout.rollout_id: None if rollout.dropped else rollout.reward for rollout in rollouts}


def phases(log: list[str]) -> list[str]:
    """The log without the numbers of judgements and optimizer steps in a row."""
    return [entry for entry, before in zip(log, ["", *log[:-1]], strict=True) if entry != before]


EVALUATION = ["policy sleeps", "judge wakes", "judgement"]
"""After the last step; the judge keeps the GPUs."""
START = ["policy sleeps", "judge sleeps", "policy wakes"]
STEP = ["policy sleeps", "judge wakes", "judgement", "judge sleeps", "train", "policy wakes"]


def test_policy_judge_and_learner_have_the_gpus_one_after_another(tmp_path: Path) -> None:
    log = play(tmp_path / "shared")
    assert phases(log) == [*START, *STEP * 4, *EVALUATION]
    rows = steps(tmp_path / "shared")
    assert len(rows) == 4
    assert all(row["time/judging_s"] >= 0 and row["time/judge_switch_s"] >= 0 for row in rows)
    given = rewards(tmp_path / "shared")
    assert len(given) == 32
    assert None in given.values()
    assert len({*given.values()}) > 5
    play(tmp_path / "beside", shared=False)
    assert given == rewards(tmp_path / "beside"), "as with a judge on its own GPUs"


def test_with_disaggregated_placement_the_policy_gets_weights_awake(tmp_path: Path) -> None:
    log = play(tmp_path / "run", mode="disaggregate")
    step = ["policy sleeps", "judge wakes", "judgement", "judge sleeps", "policy wakes"]
    assert phases(log) == [*START, *step * 4, *EVALUATION]
    play(tmp_path / "colocated")
    assert rewards(tmp_path / "run") == rewards(tmp_path / "colocated")


def test_groups_in_place_of_filtered_ones_and_evaluations_have_turns_too(tmp_path: Path) -> None:
    log = play(tmp_path / "run", "rollout.filter_groups.filters=[zero_variance]", "train.eval_every=2")
    again = ["policy sleeps", "judge wakes", "judgement", "judge sleeps", "policy wakes"]
    text = " ".join(phases(log))
    assert text.startswith(" ".join(START))
    assert text.count("judge wakes") > 4 + 2, "some steps needed further groups"
    assert " ".join([*again, "policy sleeps", "judge wakes"]) in text
    assert text.count("train") == 4


def test_two_judges_wake_one_after_another(tmp_path: Path) -> None:
    log = play(tmp_path / "run", judges=2)
    turn = ["judge wakes", "judgement", "judge sleeps"]
    assert phases(log)[: 4 + 2 * len(turn) + 2] == [
        "policy sleeps", "judge sleeps", "policy wakes", "policy sleeps", *turn, *turn, "train", "policy wakes",
    ]  # fmt: skip


def test_a_run_that_ends_among_judgements_is_resumed(tmp_path: Path) -> None:
    play(tmp_path / "whole")
    with pytest.raises(RunStopped, match="killed"):
        play(tmp_path / "cut", dies_at=20)
    assert len(steps(tmp_path / "cut")) < 4
    play(tmp_path / "cut")
    assert rewards(tmp_path / "cut") == rewards(tmp_path / "whole")


def test_a_judge_that_lives_and_does_not_wake_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="judge-0: out of memory"):
        play(tmp_path / "run", refuses=True)
