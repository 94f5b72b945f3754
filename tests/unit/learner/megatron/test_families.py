"""Every family on one rank: logits of packed rows against transformers, and weights that come back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from agentrl.learner.megatron.cpu import computing_on
from agentrl.learner.megatron.layout import Layout
from agentrl.learner.megatron.model import build_model, packed_tokens
from agentrl.learner.megatron.weights import GatherGroups, ModelWeights, load_weights
from agentrl.models.load import load_model
from tests.unit.learner.megatron.models import FAMILIES, make_model

CPU, LENGTHS = torch.device("cpu"), (23, 9, 14)


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from megatron.core import parallel_state

    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with computing_on(CPU):
        Layout().start(0)
        yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.mark.usefixtures("rank")
def test_logits_are_those_of_transformers_and_weights_come_back(folder: Path) -> None:
    built = build_model(folder, {}, device=CPU, dtype=torch.float32)
    weights = ModelWeights(built)
    load_weights(weights, folder)
    files = load_file(folder / "model.safetensors")
    into = [(spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in weights.specs()]
    weights.gather(into, GatherGroups.of_megatron())
    assert {name for name, _ in into} == files.keys()
    assert all(torch.equal(out, files[name]) for name, out in into)

    token_ids_L = torch.randint(96, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions_L = torch.cat([torch.arange(length) for length in LENGTHS])
    row_L = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    packed = packed_tokens(positions_L, row_L, CPU, torch.float32)
    [chunk] = built.chunks
    with torch.no_grad():
        found = chunk(token_ids_L[None], positions_L[None], None, packed_seq_params=packed)[0]
        hf = load_model(folder)
        expected = torch.cat([hf(ids[None]).logits[0] for ids in token_ids_L.split(LENGTHS)])
    assert torch.allclose(found, expected, atol=2e-5, rtol=0), (found - expected).abs().max()
