"""What every engine does after every kind of weight sync: it computes what the learner computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.engine import GREEDY, Engine, prompt, sample, until_sampling
from transformers import PreTrainedModel

from agentrl.core.errors import LearnerError, SamplerError
from agentrl.core.types import Generation, SamplingParams
from agentrl.distributed.flat_bucket import serialize_tensors
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.learner.base import WeightBucket
from agentrl.learner.export import NamedTensors, RankBucket, WeightExporter
from agentrl.models.load import load_model
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.registry import TRANSPORTS, make_transport

BUCKET = 40_000
"""Bytes: several buckets for the models here."""


def by_value(bucket: WeightBucket) -> WeightBucket:
    """Has the bucket share its weights by value: on a CPU there are no handles."""
    assert isinstance(bucket, RankBucket)
    bucket.ipc_handles = lambda: [serialize_tensors(bucket.tensors())]  # type: ignore[method-assign]
    return bucket


class Learner(WeightExporter):
    """Has the weights of a model, in memory that it uses again; one change of them is one version.

    They are numbers that ``dtype`` knows, so that an engine computes with what the model computes with.
    """

    def __init__(
        self, model: PreTrainedModel, fail_at: int | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(NamedTensors(dict(model.named_parameters())))
        self.model = model
        self.fail_at = fail_at
        self._dtype = dtype

    def change(self, seed: int, share: float = 1.0) -> None:
        """Change a share of the numbers."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < share
                changed = parameter + 0.05 * chosen * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(changed.to(self._dtype))

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        for number, bucket in enumerate(super().buckets(bucket_bytes, dtype)):
            if number == self.fail_at:
                raise LearnerError("rank 1 died")
            yield by_value(bucket)


class Syncs:
    """The tests of this module; a subclass named ``Test…`` runs them against its module's ``engine``."""

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_engine_and_learner_agree_after_every_sync(self, engine: Engine, transport: str, tmp_path: Path) -> None:
        """The prompt is the same every time: its keys and values of the version before lie in the prefix cache."""
        learner: Any = Learner(load_model(engine.folder), dtype=engine.traits.dtype)
        ids = prompt(90, 60)

        async def play(client: SGLangClient) -> None:
            sync = make_transport(
                transport,
                TransportOptions(bucket_bytes=BUCKET, folder=tmp_path, check=engine.traits.check, timeout_s=30),
            )
            try:
                for version, share in ((11, 1.0), (12, 1.0), (13, 0.02)):
                    learner.change(version, share)
                    await sync.sync_weights(learner, [client], version)
                    first, again = await sample(client, ids, GREEDY), await sample(client, ids, GREEDY)
                    assert first.versions == again.versions == ((0, version),)
                    assert first.cached_tokens == 0
                    assert again.cached_tokens == len(ids) - 1, "there was a cache to serve old weights from"
                    engine.assert_matches(learner.model, ids, first, 0.0)
                    engine.assert_matches(learner.model, ids, again, 0.0)
            finally:
                await sync.aclose()

        engine.drive(play)

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_half_an_update_is_never_sampled_with(self, engine: Engine, transport: str, tmp_path: Path) -> None:
        """The learner fails between two buckets: the engine has its old weights, or samples nothing until it has new."""
        learner: Any = Learner(load_model(engine.folder), dtype=engine.traits.dtype)
        broken: Any = Learner(load_model(engine.other), fail_at=2)
        ids = prompt(91, 40)

        async def play(client: SGLangClient) -> None:
            sync = make_transport(
                transport,
                TransportOptions(bucket_bytes=BUCKET, folder=tmp_path, check=engine.traits.check, timeout_s=30),
            )
            try:
                await sync.sync_weights(learner, [client], 21)
                with pytest.raises(LearnerError, match="rank 1 died"):
                    await sync.sync_weights(broken, [client], 22)
                assert await client.version() == 21
                if engine.traits.refuses_unfit_weights or transport == "disk":
                    engine.assert_matches(learner.model, ids, await sample(client, ids, GREEDY), 0.0)
                else:
                    with pytest.raises(SamplerError, match="only a part of an update"):
                        await sample(client, ids, GREEDY)
                learner.change(4)
                await sync.sync_weights(learner, [client], 23)
                generation = await sample(client, ids, GREEDY)
                assert generation.versions == ((0, 23),)
                engine.assert_matches(learner.model, ids, generation, 0.0)
            finally:
                await sync.aclose()

        engine.drive(play)

    @pytest.mark.parametrize("kept_mode", ["drop", "by_version", "keep"])
    def test_the_prefix_cache_after_a_sync(self, engine: Engine, kept_mode: str) -> None:
        """Only with ``keep`` an engine reuses keys and values of the weights before; the client knows their age."""
        ids = prompt(92, 130)

        async def play(_: SGLangClient) -> None:
            client = SGLangClient(engine.url, timeout_s=60, prefix_cache=kept_mode)
            for version, model in ((31, engine.model), (32, engine.other_model), (33, engine.other_model)):
                await client.updates.from_tensors(list(model.state_dict().items()), version, last=True)
                first, again = await sample(client, ids, GREEDY), await sample(client, ids, GREEDY)
                assert first.versions == again.versions == ((0, version),)
                reused = kept_mode == "keep" and version > 31
                assert first.cached_tokens == (len(ids) - 1 if reused else 0)
                assert again.cached_tokens == len(ids) - 1
                if kept_mode != "keep" or version == 31:
                    engine.assert_matches(model, ids, first, 0.0)
                if client.prefix_ages is not None:  # blocks of 64 tokens: two of the prompt
                    age = version - 31
                    assert client.prefix_ages.take() == (256 if age else 128, 256 if age else 0, 256 * age, age)
            await client.flush()
            assert (await sample(client, ids, GREEDY)).cached_tokens == 0
            await client.aclose()

        engine.drive(play)

    @pytest.mark.parametrize("kept_mode", ["by_version", "keep"])
    def test_a_request_goes_on_in_place_after_a_sync_that_keeps_the_cache(self, engine: Engine, kept_mode: str) -> None:
        async def play(_: SGLangClient) -> Generation:
            client = SGLangClient(engine.url, timeout_s=60, prefix_cache=kept_mode)
            await client.updates.from_tensors(list(engine.model.state_dict().items()), 41, last=True)
            task = asyncio.create_task(sample(client, prompt(93), SamplingParams(max_new_tokens=120)))
            await until_sampling(client, [task])
            await client.pause("in_place")
            await client.updates.from_tensors(list(engine.other_model.state_dict().items()), 42, last=True)
            await client.resume()
            reply_after = await sample(client, prompt(93), GREEDY, "after")
            assert reply_after.versions == ((0, 42),)
            if kept_mode == "by_version":
                assert reply_after.cached_tokens == 0
                engine.assert_matches(engine.other_model, prompt(93), reply_after, 0.0)
            actual = await task
            await client.aclose()
            return actual

        if engine.traits.changes_beside_held:
            generations = engine.drive(play)
            assert len(generations.token_ids) == 120
            assert {version for _, version in generations.versions} <= {41, 42}
