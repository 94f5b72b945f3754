"""Checksums that SGLang makes on a GPU are those of the weights that were sent."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.engine import Engine
from conformance.syncs import BUCKET, Learner

from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.models.load import load_model
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.engines import Checksums
from agentrl.weight_sync.registry import make_transport

pytestmark = pytest.mark.gpu


def test_checksums_of_an_engine_on_a_gpu(tiny_engine: Engine, tmp_path: Path) -> None:
    learner = Learner(load_model(tiny_engine.folder))
    learner.change(5)

    async def play(client: SGLangClient) -> dict[str, str]:
        assert await client.checksum_kind() == "words"
        sync = make_transport("tensor", TransportOptions(bucket_bytes=BUCKET, folder=tmp_path, check="checksum"))
        await sync.sync_weights(learner, [client], 31)
        return await client.checksums()

    actual = tiny_engine.drive(play)
    learner.change(6)
    sums = Checksums(["words"])
    sums.add([(name, parameter.detach()) for name, parameter in learner.model.named_parameters()])
    assert f"{len(actual)} of {len(actual)} weights differ" in str(sums.difference(actual))
