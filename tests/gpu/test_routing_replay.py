"""Routing replay with SGLang: experts of a tiny random model come with the tokens, and bring the learner nearer to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_tiny import make_tokenizer
from safetensors.torch import load_file, save_file

from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.core.types import Prompt, Row, SamplingParams
from agentrl.episode.trajectory import Trajectory
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.launcher import visible_gpus
from agentrl.inference.launch.processes import EngineProcess, launch_sglang
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.models.load import read_routing
from agentrl.models.random_models import Shape, write_random_model
from tests.algo_config import make_algo
from tests.batches import pack_rows
from tests.gpu.engine_options import OPTIONS, START_S

pytestmark = pytest.mark.gpu

SHAPE = Shape(256, 512, 4, 4, 2, 64, 2048, False, 32, 4, 128)
EPISODES, NEW = 16, 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose routers choose clearly enough that most, but not all, choices survive bfloat16."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    write_random_model(folder, SHAPE, weights=True)
    make_tokenizer().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    scaled = {name: weight if "norm" in name else weight * 4 for name, weight in weights.items()}
    save_file(scaled, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    options = OPTIONS | {"enable_return_routed_experts": True}
    log = tmp_path_factory.mktemp("engine") / "log"
    process = launch_sglang(model, log=log, options=options, gpus=visible_gpus()[:1], timeout_s=START_S)
    yield process
    process.stop()


async def sample(url: str, model: Path) -> list[Row]:
    """Play episodes of two turns; the second begins behind a prefix in the engine's cache."""
    client = SGLangClient(url, timeout_s=120, vocabulary=Vocabulary(SHAPE.vocab_size, str, read_routing(model)))
    generator = np.random.default_rng(0)

    async def play(number: int) -> Row:
        trajectory = Trajectory()
        prompt = tuple(generator.integers(2, SHAPE.vocab_size, 100 + number).tolist())
        for turn in range(2):
            trajectory.extend_to(prompt)
            params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, experts_from=trajectory.routed_tokens)
            name = f"r{number}/{turn}"
            reply = await client.generate(Prompt(prompt), params, session_id=f"r{number}", request_id=name)
            trajectory.append_sampled(reply)
            assert trajectory.routed_tokens == len(prompt) + NEW - 1
            prompt = (*prompt, *reply.token_ids, *range(5, 25))
        [row] = trajectory.rows(f"p{number}", f"r{number}")
        return row

    try:
        return list(await asyncio.gather(*(play(number) for number in range(EPISODES))))
    finally:
        await client.aclose()


def test_experts_of_sglang_bring_the_learner_nearer(engine: EngineProcess, model: Path, figures: list[str]) -> None:
    rows = asyncio.run(sample(engine.url, model))
    batch = pack_rows(
        rows, {row.key.rollout_id: 1.0 for row in rows}, data_parallel_size=1, tokens_per_micro=8192, pad_id=0
    )
    assert batch.metrics["batch/replayed_share"] > 0.99
    gaps = {}
    for replay in (False, True):
        config = LearnerConfig(device="cuda", precision="bfloat16", optimizer=OptimizerConfig(lr=1e-4))
        learner = LocalLearnerGroup(model, config, make_algo(routing_replay=replay), seed=0)
        try:
            logprobs = learner.logprobs(batch)
            metrics = learner.train_step(batch)
        finally:
            learner.close()
        differences = [np.abs(logprobs[row.key] - row.logprobs)[row.mask.astype(bool)] for row in rows]
        gaps[replay] = np.concatenate(differences)
        assert not metrics["train/nonfinite_gradients"]
        figures.append(f"replay={replay}: mean gap {gaps[replay].mean():.5f}, max {gaps[replay].max():.4f}")
        torch.cuda.empty_cache()
    assert gaps[True].mean() < gaps[False].mean()
    assert gaps[True].max() < gaps[False].max()
