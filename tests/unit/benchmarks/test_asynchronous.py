"""The simulation of asynchronous training: engines that share decoding steps, drawn episodes, the best split."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given

from agentrl.core.errors import ConfigError
from agentrl.core.types import Generation, Prompt, Rollout, SamplingParams
from agentrl.obs.rollouts import RolloutFile
from agentrl.testing.virtual_time import run_virtual
from benchmarks.asynchronous import AsyncBench, Simulation, Split, best_split, byte_renderer
from benchmarks.scripted_engines import EngineRates, ScriptedEngines
from benchmarks.workload import (
    SHIPPED,
    EpisodePlan,
    Tail,
    drawn_groups,
    plan_from_rollout,
    read_groups,
    recorded_groups,
    write_groups,
)
from tests.unit.train.test_stale_masks import VERSION, mask_stale, rollouts

RATES = EngineRates(step_s=1.0, request_s=0.5, prefill_tokens_per_s=10.0, max_running=2)
PLANS = {
    "a/0": EpisodePlan(20, ((4, 10), (2, 0)), 0.0),
    "a/1": EpisodePlan(20, ((8, 0),), 0.0),
    "b/0": EpisodePlan(0, ((2, 0),), 0.0),
}


def sampled(script: list[tuple[float, str]], rates: EngineRates = RATES) -> dict[str, tuple[float, Generation]]:
    """When each session's request, begun at these seconds, ends, and its generation; new weights arrive at 9 s."""

    async def main() -> dict[str, tuple[float, Generation]]:
        loop, engines = asyncio.get_running_loop(), ScriptedEngines(PLANS, 1, rates, 1.0, 7, 8)

        async def one(start: float, session: str) -> tuple[float, Generation]:
            await asyncio.sleep(start)
            generation = await engines.sampler.generate(
                Prompt(()), SamplingParams(), session_id=session, request_id=session
            )
            return loop.time(), generation

        async def update() -> None:
            await asyncio.sleep(9)
            engines.pause()
            await asyncio.sleep(1)
            engines.resume(1)

        samples = await asyncio.gather(*(one(start, session) for start, session in script), update())
        return {
            session: sampled_turn
            for (_, session), sampled_turn in zip(script, samples, strict=False)
            if sampled_turn is not None
        }

    return run_virtual(main())


def test_requests_share_decoding_steps_and_the_prompt_of_a_group() -> None:
    actual = sampled([(0, "a/0")])
    assert actual["a/0"][0] == pytest.approx(2 + 4 * 1.5), "2 s of prefill, then 4 tokens alone"
    assert actual["a/0"][1].token_ids == (7, 7, 7, 8)
    actual = sampled([(0, "a/0"), (0, "a/1")], EngineRates(1.0, 0.5, 10.0, 2, keeps_cache=True))
    # Two requests: 2 s a token. At 9 s they have 3.5, then a pause of 1 s; the other goes on alone with 4 tokens.
    assert actual["a/0"][0] == pytest.approx(2 + 4 * 2 + 1), "one prefill for both"
    assert actual["a/1"][0] == pytest.approx(11 + 4 * 1.5)
    assert actual["a/1"][1].versions == ((0, 0), (3, 1)), "the version of each token"


def test_new_weights_drop_the_caches_unless_they_are_kept() -> None:
    with_cache = sampled([(0, "a/1")], EngineRates(1.0, 0.5, 10.0, 2, keeps_cache=True))
    dropped = sampled([(0, "a/1")])
    context = 20 + (9 - 2) / 1.5
    assert dropped["a/1"][0] - with_cache["a/1"][0] == pytest.approx(context / 10), "the context is computed again"


def test_a_request_waits_for_room_in_the_batch() -> None:
    actual = sampled([(0, "a/0"), (0, "a/1"), (0, "b/0")])
    assert actual["b/0"][0] > actual["a/0"][0]


@given(rollouts())
def test_recorded_rollouts_become_plans(rollout: Rollout) -> None:
    plan = plan_from_rollout(rollout)
    mask = rollout.rows[0].mask
    assert plan is not None
    assert (plan.sampled, plan.tokens, len(plan.turns)) == (mask.sum(), len(mask), len(rollout.rows[0].request_ids))
    mask_stale([rollout], VERSION, 0)
    assert plan_from_rollout(rollout) == plan, "masks do not matter"
    with TemporaryDirectory() as folder:
        RolloutFile(Path(folder, "rollouts", "step_000001.jsonl")).write(rollout)
        assert recorded_groups(Path(folder)) == [(plan,)]
        write_groups([(plan, PLANS["b/0"])], Path(folder, "groups.json"))
        assert read_groups(Path(folder, "groups.json")) == [(plan, PLANS["b/0"])]


def test_a_run_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--rollouts"):
        recorded_groups(tmp_path)


def test_the_shipped_episodes_and_a_longer_tail() -> None:
    groups = read_groups(SHIPPED)
    assert len(groups) == 128
    assert {len(group) for group in groups} == {8}

    def lengths(tail: Tail) -> np.ndarray:
        return np.array(
            [plan.sampled for group in itertools.islice(drawn_groups(groups, 8, tail, 0), 400) for plan in group]
        )

    recorded, longer = lengths(Tail()), lengths(Tail(1.0, 8.0))
    assert abs(longer.mean() / recorded.mean() - 1) < 0.15
    assert longer.max() > 4 * recorded.max()
    assert longer.max() <= 8 * recorded.max() + 4


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_simulated_run_trains_every_episode_within_the_bound(staleness: int) -> None:
    bench = AsyncBench(read_groups(SHIPPED), gpus=2, steps=4, prompts=2, samples=2)
    split = Split(1, 1) if staleness else Split(2, 2, colocated=True)
    actual = Simulation(bench, byte_renderer(), split, staleness, 0).run()
    assert actual.admitted == actual.trained == 16
    assert actual.ages_N.max() == staleness
    assert len(actual.ages_by_length) == 4
    assert 0 < actual.engines_idle < 1
    assert 0 < actual.learner_idle < 1


def test_engines_compute_the_prompt_of_a_group_once() -> None:
    groups = [(EpisodePlan(100, ((4, 0),), 0.0),) * 8] * 4
    bench = AsyncBench(groups, gpus=4, steps=2, prompts=4, samples=8, token_scale=1.0)
    assert Simulation(bench, byte_renderer(), Split(3, 1), 1, 0).run().prefilled == 8 * 100


def test_the_best_split_is_found_from_any_start() -> None:
    bench = AsyncBench([], gpus=8)
    seconds = {engines: 10 / engines + 3 / (8 - engines) for engines in range(1, 8)}
    measured: list[Split] = []

    def measure(split: Split) -> float:
        measured.append(split)
        return seconds[split.engines]

    assert {best_split(bench, measure, first).engines for first in range(1, 8)} == {5}
    assert all(split.engines + split.learner == 8 for split in measured)


def test_the_rows_of_a_group_share_their_prompt_in_each_micro_batch() -> None:
    bench = AsyncBench([], token_scale=1.0, shared_cost=1.0, tokens_per_micro=100)
    plan = EpisodePlan(50, ((10, 15),), 0.0)
    assert bench.computed_tokens([plan] * 2) == 2 * 25 + 50
    assert bench.computed_tokens([plan] * 4) == 4 * 25 + 2 * 50
    assert AsyncBench([], token_scale=1.0).computed_tokens([EpisodePlan(1, ((99, 0),), 0.0)]) == 100, "no gain, no cost"
