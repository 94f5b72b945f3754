"""Judges on real engines of a run, on a CPU: the policy, and a model on an engine of its own; also from a runner process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.config.load import load_config
from agentrl.core.task import Task
from agentrl.core.types import Message, Rollout
from agentrl.data.jobs import Job
from agentrl.data.task_sources import NoTasks
from agentrl.models.resolve import resolve_model
from agentrl.runtime.services import open_services

pytestmark = pytest.mark.long

POLICY = "multihop-warm"
JUDGES = {"policy": "policy", "own engine": "python-math-warm"}
GROUP = 3


def play_group(folder: Path, model: str, runners: int) -> list[Rollout]:
    """Return the rollouts of a group of which the judge compares each pair; the last of its letters a, b, c is its verdict."""
    judge = (
        f"{{model: {model}, mode: pairwise, pattern: '([a-cA-C])', max_new_tokens: 128, temperature: 1.0, tries: 30}}"
    )
    config = load_config(
        None,
        ["env.name=single_turn", f"model.path={POLICY}", "reward=judge", f"reward.judge={judge}", "sampler.embedded.context=2048",
         f"rollout.runners={runners}", "rollout.n_samples_per_prompt=3", "rollout.batch_size=1", "rollout.max_tokens=512"],
    )  # fmt: skip
    task = Task("t", (Message("user", "Who was born in Remu?"),))

    async def main() -> list[Rollout]:
        folder.mkdir()
        async with open_services(config, {"": NoTasks()}, resolve_model(config.model.path), folder, 0) as services:
            assert len(services.fleets) == (1 if model == "policy" else 2)
            return await services.runner().run_many([Job(task, number, f"r{number}") for number in range(GROUP)])

    return asyncio.run(main())


@pytest.mark.parametrize("runners", [0, 1])
@pytest.mark.parametrize("judge", JUDGES)
def test_pairs_of_a_group_are_compared_by_an_engine_of_the_run(tmp_path: Path, judge: str, runners: int) -> None:
    rollouts = play_group(tmp_path / "run", JUDGES[judge], runners)
    assert [rollout.failure for rollout in rollouts] == [None] * GROUP
    assert all(rollout.graded for rollout in rollouts)
    rewards = [rollout.reward for rollout in rollouts]
    assert sum(rewards) == pytest.approx(GROUP / 2), "what one wins of a pair, the other loses"
    assert all(0 <= reward <= 1 for reward in rewards)
    calls = sum(rollout.metrics["judge/calls"] for rollout in rollouts)
    assert calls >= GROUP * (GROUP - 1)
    assert sum(rollout.metrics["judge/prompt_tokens"] for rollout in rollouts) > 50 * calls
    assert all(0 <= rollout.metrics["judge/agreement"] <= 1 for rollout in rollouts)
