"""SGLang with LoRA: it computes what the learner computes after every sync of adapters alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conformance.adapters import LONG, PROMPT, TWO, Adapters, Policies, two_policies
from conformance.engine import GREEDY, sample, until_sampling
from engine_tiny import reference_logprobs, save_model
from transformers import PreTrainedModel

from agentrl.config.learner import LearnerConfig, LoraConfig, OptimizerConfig
from agentrl.config.sampler import SamplerConfig
from agentrl.core.types import Generation
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import launch_sglang
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.models.load import load_model
from agentrl.weight_sync.adapter import AdapterSync, with_adapters
from tests.algo_config import make_algo
from tests.unit.learner.learners import make_batch, tensors

pytestmark = pytest.mark.sglang

LORA = LoraConfig(rank=4, alpha=8)


@dataclass
class Policy:
    """A learner with adapters; each `change` is a version, and its merged weights a model of transformers."""

    folder: Path
    learner: LocalLearnerGroup
    version: int = 0

    def change(self) -> PreTrainedModel:
        self.version += 1
        for number in range(3):
            self.learner.train_step(make_batch([20, 12, 30], seed=3 * self.version + number))
        model = load_model(self.folder)
        model.load_state_dict(tensors(self.learner), strict=False)
        return model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = save_model(tmp_path_factory.mktemp("adapters") / "base")
    config = LearnerConfig(
        device="cpu",
        threads=1,
        precision="float32",
        lora=LORA,
        optimizer=OptimizerConfig(lr=2e-2, warmup_steps=0, max_grad_norm=1e6),
    )
    learner = LocalLearnerGroup(folder, config, make_algo(), seed=0)
    yield Policy(folder, learner)
    learner.close()


@pytest.fixture(scope="module")
def policies(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policies]:
    with two_policies(tmp_path_factory.mktemp("policies")) as policies:
        yield policies


@pytest.fixture(scope="module")
def url(policy: Policy, sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = with_adapters(SamplerConfig(sglang={"device": "cpu"}), TWO, policy.folder).sglang
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    process = launch_sglang(policy.folder, log=log, options=options, python=sglang_python, timeout_s=200)
    yield process.url
    process.stop()


class TestPolicies(Adapters):
    pass


def distance(
    model: PreTrainedModel, ids: list[int], generation: Generation, start: int = 0, end: int | None = None
) -> float:
    """Largest difference of an engine's log-probabilities from a model's."""
    expected = reference_logprobs(model, ids, list(generation.token_ids))
    return float(np.abs(np.subtract(generation.logprobs, expected))[start:end].max())


def test_engine_and_learner_agree_after_every_sync(policy: Policy, url: str) -> None:
    """The prompt is the same every time: its keys and values of the version before lie in the prefix cache."""

    async def play() -> None:
        client, sync, base = SGLangClient(url), AdapterSync(LORA, check="checksum"), load_model(policy.folder)
        assert distance(base, PROMPT, await sample(client, PROMPT, GREEDY)) < 1e-4
        for _ in range(3):
            model = policy.change()
            await sync.sync_weights(policy.learner, [client], policy.version)
            first, again = await sample(client, PROMPT, GREEDY), await sample(client, PROMPT, GREEDY)
            assert first.versions == again.versions == ((0, policy.version),)
            assert await client.version() == policy.version
            assert first.cached_tokens == 0
            assert again.cached_tokens == len(PROMPT) - 1, "there was a cache to serve old adapters from"
            assert distance(model, PROMPT, first) < 1e-4
            assert distance(model, PROMPT, again) < 1e-4
            assert distance(base, PROMPT, first) > 0.1
        await client.aclose()

    asyncio.run(play())


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_a_request_that_a_pause_interrupts_has_the_versions_that_sampled_it(
    policy: Policy, url: str, mode: str
) -> None:
    async def play() -> None:
        client, sync = SGLangClient(url), AdapterSync(LORA)
        state_before = policy.change()
        await sync.sync_weights(policy.learner, [client], policy.version)
        task = asyncio.create_task(sample(client, PROMPT, LONG, mode))
        await until_sampling(client, [task])
        await client.pause(mode)
        state_after = policy.change()
        await sync.sync_weights(policy.learner, [client], policy.version)
        await client.resume()
        actual = await task
        assert len(actual.token_ids) == LONG.max_new_tokens
        if mode == "abort":
            (_, old), (start, new) = actual.versions
            assert (old, new) == (policy.version - 1, policy.version)
            assert distance(state_after, PROMPT, actual, start) < 1e-4
        else:
            start = len(actual.token_ids)
            assert actual.versions == ((0, policy.version - 1),)
        assert distance(state_before, PROMPT, actual, 0, start) < 1e-4
        assert distance(state_after, PROMPT, await sample(client, PROMPT, GREEDY)) < 1e-4
        await client.aclose()

    asyncio.run(play())
