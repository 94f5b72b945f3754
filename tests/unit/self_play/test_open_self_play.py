"""What self-play starts in a training run: engines of snapshots, and how snapshots are written."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from agentrl.config.load import load_config
from agentrl.inference.fleet import reserved_engines
from agentrl.inference.fleet.fleet import Fleet
from agentrl.self_play.training import open_self_play
from agentrl.train.engine_weights import open_eval_engines

GAME = ["env.name=kuhn_poker", "sampler.engines=2"]


@pytest.fixture
def started(monkeypatch):
    """GPUs before those of the engines that would start, each of which has one."""
    numbers = []

    class Launcher:
        def __init__(self, spec, first=0, first_gpu=None):
            self.first_gpu = first if first_gpu is None else first_gpu

        def launch(self, number):
            numbers.append(self.first_gpu + number)

    async def start(fleet):
        for number in range(fleet._config.engines):
            fleet._launcher.launch(number)

    monkeypatch.setattr(reserved_engines, "LocalLauncher", Launcher)
    monkeypatch.setattr(Fleet, "start", start)
    return numbers


def opened(folder, *words, evaluation=False):
    config = load_config(None, [*GAME, *words])
    services = SimpleNamespace(reserved=[], frozen={}, judge_models={}, fleet=SimpleNamespace(vocabulary=None))

    async def main():
        async with AsyncExitStack() as exits:
            play = await open_self_play(config, folder, folder, services.fleet.vocabulary, exits, None, None)
            if evaluation:
                await open_eval_engines(config, folder, folder, services, exits)
            return play

    return asyncio.run(main())


def test_engines_of_snapshots_and_of_evaluations_have_separate_gpus(tmp_path, started):
    opened(
        tmp_path,
        "self_play.engines=2",
        "eval.background=true",
        "sampler.groups.eval.serves=evaluation",
        evaluation=True,
    )
    assert started == [2, 3, 4], "0 and 1 are the policy's"


@pytest.mark.parametrize(
    ("words", "policies"),
    [
        ([], []),
        (["learner.lora.rank=2"], []),
        (["learner.lora.rank=2", "weights.adapters=only"], ["main"]),
        (["learner.lora.rank=2", "weights.adapters=only", "env.roles.first.policy=a", "env.roles.second.policy=b"], ["a", "b"]),
    ],
)  # fmt: skip
def test_a_snapshot_has_adapters_if_engines_get_nothing_else(tmp_path, started, words, policies):
    play = opened(tmp_path, "self_play.engines=1", *words)
    assert [engine.folder for engine in play.engines.engines] == [play.snapshots]
    assert ([] if play.snapshots.lora is None else play.snapshots.lora.policies) == policies
    assert set(play.policies.values()) == set(policies or ["main"])
