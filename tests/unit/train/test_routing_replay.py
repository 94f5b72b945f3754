"""Routing replay: the learner computes what the engine sampled with, though its own routers would choose other experts."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.core.errors import ConfigError, SamplerError
from agentrl.core.types import Generation, Row, RowKey, SamplingParams
from agentrl.episode.trajectory import Trajectory
from agentrl.inference.client.generation import generate_body, read_reply
from agentrl.inference.client.segments import Vocabulary, experts_options
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.replies import BadRequestError
from agentrl.inference.embedded.request import parse_generate
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.models.load import load_model, read_routing
from agentrl.models.routing import Routing
from tests.algo_config import make_algo
from tests.batches import pack_rows
from tests.unit.learner.learners import Learners, make_rows
from tests.unit.learner.megatron.models import make_model

FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
STOPS: Any = SimpleNamespace(text=lambda *args, **options: "")
NEW = 8


@pytest.fixture(scope="module", params=FAMILIES)
def sampled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Row]:
    """A family, its folder, and a row of two turns that the embedded engine sampled, the second behind a cached prefix."""
    sizes = {"num_experts": 16, "mlp_only_layers": []} if request.param == "qwen3_moe" else {}
    folder = make_model(tmp_path_factory.mktemp("routing") / "model", request.param, num_hidden_layers=2, **sizes)
    if request.param == "qwen3_moe":
        change(folder, folder, lambda name, tensor: tensor[-1].zero_() if name.endswith("mlp.gate.weight") else None)
    # The embedded engine has no latent attention.
    row = of_transformers(folder) if request.param == "deepseek_v3" else asyncio.run(two_turns(folder))
    return request.param, folder, row


def of_transformers(folder: Path) -> Row:
    """A row with log-probabilities and experts of transformers."""
    [row] = make_rows([24])
    hf: Any = load_model(folder)
    experts = np.zeros((24, 2, 4), np.uint8)
    for number, layer in enumerate(hf.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(
                lambda *hook_arguments, at=number: experts.__setitem__((slice(None), at), hook_arguments[-1][2])
            )
    ids = torch.from_numpy(row.token_ids).long()
    with torch.no_grad():
        logprobs = hf(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    experts[-1] = 255
    return replace(
        row, key=RowKey("p", "r"), logprobs=np.append(0, logprobs).astype(np.float32) * row.mask, experts=experts
    )


async def two_turns(folder: Path) -> Row:
    scheduler = Scheduler(Model(folder, torch.float32, 2, 64), STOPS, 2, 0, "0")
    vocabulary = Vocabulary(96, str, read_routing(folder))
    engine = asyncio.create_task(scheduler.run())
    try:
        trajectory, prompt = Trajectory(), (5, 6, 7, 8, 9)
        for turn in range(2):
            trajectory.extend_to(prompt)
            params = SamplingParams(
                max_new_tokens=NEW, seed=turn, ignore_eos=True, experts_from=trajectory.routed_tokens
            )
            generation = await generate(scheduler, prompt, params, vocabulary)
            trajectory.append_sampled(generation)
            assert trajectory.routed_tokens == len(prompt) + NEW - 1
            prompt = (*prompt, *generation.token_ids, 11, 12)
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
    [row] = trajectory.rows("p", "r")
    return row


async def generate(
    scheduler: Scheduler, prompt: tuple[int, ...], params: SamplingParams, vocabulary: Vocabulary
) -> Generation:
    body = generate_body(list(prompt), params, NEW, "q") | experts_options(params, None)
    [generate_input], _ = parse_generate(body)
    request = scheduler.submit(generate_input)
    await request.done
    reply = scheduler.reply(request)
    silent = reply | {"meta_info": {key: value for key, value in reply["meta_info"].items() if key != "routed_experts"}}
    with pytest.raises(
        SamplerError, match="has no routed_experts; start the engine with --enable-return-routed-experts"
    ):
        read_reply(json.dumps(silent).encode(), body, "q", vocabulary)
    return read_reply(json.dumps(reply).encode(), body, "q", vocabulary).generation


@pytest.fixture(scope="module")
def changed(sampled: tuple[str, Path, Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with routers that choose other experts, and give those of the engine the same weights."""
    family, folder, row = sampled
    assert row.experts is not None
    unused, generator = 15, torch.Generator().manual_seed(0)
    assert family != "qwen3_moe" or not (row.experts[:-1] == unused).any()

    def other_choice(name: str, tensor: torch.Tensor) -> None:
        if name.endswith("e_score_correction_bias"):
            tensor += torch.randn(tensor.shape, generator=generator) * 5
        elif family == "qwen3_moe" and name.endswith("mlp.gate.weight"):
            tensor[unused] = torch.randn(tensor.shape[1], generator=generator) * 5

    changed_folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(folder, changed_folder)
    change(folder, changed_folder, other_choice)
    return changed_folder


def change(folder: Path, other_path: Path, edit: Callable[[str, torch.Tensor], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        edit(name, tensor)
    save_file(weights, other_path / "model.safetensors", {"format": "pt"})


@pytest.fixture
def learners(changed: Path) -> Iterator[Learners]:
    opened = Learners(changed)
    yield opened
    opened.close()


def test_the_learner_computes_what_the_engine_sampled_with(sampled, learners: Learners) -> None:
    _, _, row = sampled
    batch = pack_rows([row], {"r": 1.0}, data_parallel_size=1, tokens_per_micro=64, pad_id=0)
    assert batch.metrics["batch/replayed_share"] == (len(row.mask) - 1) / len(row.mask)
    at = row.mask.astype(bool)
    differences = {}
    for replay in (False, True):
        rank = learners.open(algo=make_algo(routing_replay=replay), recompute="selective" if replay else "none").rank
        [logprobs] = rank.logprobs(batch).values()
        differences[replay] = np.abs(logprobs[at] - row.logprobs[at]).max()
    assert differences[True] < 1e-4
    assert differences[False] > 1e-2
    routers = {name: p for name, p in rank.model.hf.named_parameters() if name.endswith("mlp.gate.weight")}
    state_before = {name: p.detach().clone() for name, p in routers.items()}
    metrics = rank.train_step(batch)
    assert routers
    assert not metrics["train/nonfinite_gradients"]
    assert all((p != state_before[name]).any() for name, p in routers.items())


def test_experts_of_other_models_are_refused(tmp_path: Path) -> None:
    dense = make_model(tmp_path / "dense", "qwen2", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"algo\.routing_replay=true, but .* model_type='qwen2'"):
        read_routing(dense)
    scheduler = Scheduler(Model(dense, torch.float32, 2, 32), STOPS, 2, 0, "0")
    [generate_input], _ = parse_generate(
        {"input_ids": [1], "return_routed_experts": True, "sampling_params": {"max_new_tokens": 1}}
    )
    with pytest.raises(BadRequestError, match="the model has no experts"):
        scheduler.submit(generate_input)


def test_the_payload_of_qwen3_30b_a3b() -> None:
    """384 bytes a token in rows and batches; replies of SGLang have 2048."""
    routing = Routing(layers=48, per_token=8, experts=128)
    reply = base64.b64encode(np.arange(48 * 8, dtype=np.int32) % 128).decode()
    assert (len(reply), routing.read(reply, 1).nbytes) == (2048, 384)
