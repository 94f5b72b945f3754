"""Vision-language models on a GPU: SGLang and the learner compute the same of an episode with pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conformance.agreement import agreement, in_float32, sampled_row

from agentrl.config.learner import LearnerConfig
from agentrl.core.types import RowKey
from agentrl.inference.launch.launcher import visible_gpus
from agentrl.inference.launch.processes import EngineProcess, launch_sglang
from agentrl.learner.in_process import LocalLearnerGroup
from tests.algo_config import make_algo
from tests.gpu.engine_options import OPTIONS, START_S
from tests.sglang_images import PATCHES, Server, play_five_pictures, serving, write_model

pytestmark = pytest.mark.gpu

MOST_KL = 1e-3
"""Per token, as of text."""
HEAD_DIM = 64
"""Kernels of a GPU have no smaller one."""


@pytest.fixture(scope="module")
def servers(sglang: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    root = tmp_path_factory.mktemp("images")
    folders = {family: write_model(root / family, family, head_dim=HEAD_DIM) for family in PATCHES}
    options = OPTIONS | {"mm_attention_backend": "triton_attn", "mem_fraction_static": 0.1}

    def start(folder: Path, log: Path) -> EngineProcess:
        return launch_sglang(folder, log=log, options=options, gpus=visible_gpus()[:1], timeout_s=START_S)

    with serving(root, folders, start) as started:
        yield started


@pytest.mark.parametrize("family", PATCHES)
def test_five_pictures_over_four_turns(servers: dict[str, Server], family: str, figures: list[str]) -> None:
    """The engine in bfloat16, the learner in float32 with the engine's weights."""
    server = servers[family]
    prompt, sampled = play_five_pictures(server, PATCHES[family])
    assert len(prompt.images) == 5
    is_sampled, logprobs = np.zeros(len(prompt.token_ids), bool), np.zeros(len(prompt.token_ids), np.float32)
    for position, logprob in sampled:
        is_sampled[position], logprobs[position] = True, logprob
    spans = [placed.span for placed in prompt.images]
    row = sampled_row(RowKey("p0", "images"), prompt.token_ids, is_sampled, logprobs, images=spans)
    learner = LocalLearnerGroup(server.folder, LearnerConfig(device="cuda"), make_algo(), seed=0)
    images = {placed.image.digest: placed.image for placed in prompt.images}
    try:
        with in_float32(learner):
            actual = agreement(learner, [row], images)
    finally:
        learner.close()
    figures.append(f"{family}, five pictures: {actual}")
    assert actual.k3 < MOST_KL
