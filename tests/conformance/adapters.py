"""What an engine with adapters must do: each policy of a learner samples with its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from conformance.engine import GREEDY, prompt, until_sampling
from engine_tiny import reference_logprobs, save_model
from transformers import PreTrainedModel

from agentrl.config.learner import LearnerConfig, LoraConfig, OptimizerConfig
from agentrl.core.errors import SamplerError
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.inference.client.scoring import ScoringClient
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.models.load import load_model
from agentrl.weight_sync.adapter import AdapterSync, load_adapters, write_adapters
from tests.algo_config import make_algo
from tests.unit.learner.learners import make_batch

TWO = LoraConfig(rank=4, alpha=8, policies=["first", "second"])
PROMPT = prompt(3, 40)
LONG = SamplingParams(max_new_tokens=160, temperature=0.0)


@dataclass
class Policies:
    """A learner with two policies. Each `change` is a version."""

    folder: Path
    learner: LocalLearnerGroup
    version: int = 0

    def change(self, out: Path) -> dict[str, PreTrainedModel]:
        """Train each policy on other batches; return them as merged models of transformers, and write PEFT folders."""
        import peft

        self.version += 1
        for number, policy in enumerate(TWO.policies):
            for step in range(3):
                batch = make_batch([20, 12, 30], seed=7 * self.version + 100 * number + step)
                self.learner.train_step(replace(batch, policy=policy))
        write_adapters(self.learner, out, TWO, None)
        model = {name: peft.PeftModel.from_pretrained(load_model(self.folder), out / name) for name in TWO.policies}
        return {name: adapted.merge_and_unload() for name, adapted in model.items()}


@contextmanager
def two_policies(folder: Path) -> Iterator[Policies]:
    """Open a learner of two policies over a tiny model."""
    model = save_model(folder / "base")
    optimizer = OptimizerConfig(lr=2e-2, warmup_steps=0, max_grad_norm=1e6)
    config = LearnerConfig(device="cpu", threads=1, precision="float32", lora=TWO, optimizer=optimizer)
    learner = LocalLearnerGroup(model, config, make_algo(), seed=0)
    try:
        yield Policies(model, learner)
    finally:
        learner.close()


def distance(model: PreTrainedModel, generation: Generation, start: int = 0, end: int | None = None) -> float:
    """Largest difference of an engine's log-probabilities from a model's."""
    expected = reference_logprobs(model, PROMPT, list(generation.token_ids))
    return float(np.abs(np.subtract(generation.logprobs, expected))[start:end].max())


async def sample(client: SGLangClient, policy: str, params: SamplingParams, name: str) -> Generation:
    return await client.generate(Prompt(tuple(PROMPT)), params, session_id=name, request_id=name, policy=policy)


async def sample_all(client: SGLangClient) -> dict[str, Generation]:
    """Sample with all policies at the same time."""
    generations = await asyncio.gather(*(sample(client, name, GREEDY, f"r{name}") for name in TWO.policies))
    return dict(zip(TWO.policies, generations, strict=True))


async def scored(client: SGLangClient, policy: str, generation: Generation) -> list[float]:
    """Return the log-probabilities of sampled tokens as scores of a prompt, with the adapters of a policy."""
    scorer = ScoringClient(client.url, "the policy", timeout_s=60, vocabulary_size=384)
    scores = await scorer.score([*PROMPT, *generation.token_ids], len(PROMPT), client.adapter(policy))
    await scorer.aclose()
    return [float(score) for score in scores]


class Adapters:
    def test_each_policy_samples_with_its_adapters(self, policies: Policies, url: str, tmp_path: Path) -> None:
        async def play() -> None:
            client, sync = SGLangClient(url, timeout_s=60), AdapterSync(TWO, check="checksum")
            for _ in range(2):
                models = policies.change(tmp_path)
                await sync.sync_weights(policies.learner, [client], policies.version)
                first, again = await sample_all(client), await sample_all(client)
                for name, model in models.items():
                    assert first[name].versions == again[name].versions == ((0, policies.version),)
                    assert first[name].cached_tokens == 0, "keys and values of another policy or version"
                    assert again[name].cached_tokens == len(PROMPT) - 1
                    for actual in (first[name], again[name]):
                        assert distance(model, actual) < 1e-4
                    assert await scored(client, name, first[name]) == pytest.approx(first[name].logprobs, abs=1e-4)
                    [other_name] = [each for each in models if each != name]
                    assert distance(models[other_name], first[name]) > 0.05
            with pytest.raises(SamplerError, match=r"policy='main': the engine at .* serves first, second"):
                await sample(client, "main", GREEDY, "r")
            await client.aclose()

        asyncio.run(play())

    @pytest.mark.parametrize("mode", ["in_place", "abort"])
    def test_a_request_that_a_pause_interrupts_has_the_versions_that_sampled_it(
        self, policies: Policies, url: str, mode: str, tmp_path: Path
    ) -> None:
        async def play() -> None:
            client, sync = SGLangClient(url, timeout_s=60), AdapterSync(TWO)
            state_before = policies.change(tmp_path)["second"]
            await sync.sync_weights(policies.learner, [client], policies.version)
            task = asyncio.create_task(sample(client, "second", LONG, mode))
            await until_sampling(client, [task])
            await client.pause(mode)
            state_after = policies.change(tmp_path)["second"]
            await sync.sync_weights(policies.learner, [client], policies.version)
            await client.resume()
            actual = await task
            assert len(actual.token_ids) == LONG.max_new_tokens
            start = len(actual.token_ids)
            if mode == "abort":
                (_, old), (start, new) = actual.versions
                assert (old, new) == (policies.version - 1, policies.version)
                assert distance(state_after, actual, start) < 1e-4
            else:
                assert actual.versions == ((0, policies.version - 1),)
            assert distance(state_before, actual, 0, start) < 1e-4
            await client.aclose()

        asyncio.run(play())

    def test_snapshots_are_loaded_from_peft_folders(self, policies: Policies, url: str, tmp_path: Path) -> None:
        async def play() -> None:
            client = SGLangClient(url, timeout_s=60)
            models = policies.change(tmp_path)
            await load_adapters(client, tmp_path, TWO.policies, 70)
            for name, generation in (await sample_all(client)).items():
                assert generation.versions == ((0, 70),)
                assert distance(models[name], generation) < 1e-4
            await client.aclose()

        asyncio.run(play())
