"""On a GPU, computing shared prefixes once gives the gradient and the log-probabilities of computing all rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.learner import LearnerConfig
from agentrl.core.types import RowKey
from agentrl.learner.in_process import LocalLearnerGroup
from tests.algo_config import make_algo
from tests.batches import pack_rows
from tests.unit.learner.test_shared_prefixes import make_row

pytestmark = pytest.mark.gpu

VOCAB = 2048


@pytest.fixture(scope="module", params=[None, 300], ids=["full", "windows"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, the second with a sliding window where there are any."""
    torch.manual_seed(7)
    window = {"use_sliding_window": True, "sliding_window": request.param} if request.param else {}
    kinds = ["full_attention", "sliding_attention" if request.param else "full_attention"]
    sizes = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    made = tmp_path_factory.mktemp("model") / "qwen3"
    config = Qwen3Config(**sizes, **heads, **window, layer_types=kinds, initializer_range=0.1)
    Qwen3ForCausalLM(config).save_pretrained(made)
    return made


def make_batch(*, share_prefixes: bool) -> GlobalBatch:
    """Groups with prompts of several lengths, and an episode with forks, in several micro-batches."""
    rng = np.random.default_rng(0)
    rows = []
    for group, size in enumerate((500, 128, 700, 333)):
        prompt = rng.integers(2, VOCAB, size).tolist()
        for sample in range(6):
            completion = rng.integers(2, VOCAB, 60 + 30 * sample).tolist()
            rows.append(make_row(f"{group}/{sample}", 0, prompt + completion, range(size, size + len(completion))))
    turns = rng.integers(2, VOCAB, 800).tolist()
    for fork in range(1, 9):
        ids = turns[: 100 * fork] + rng.integers(2, VOCAB, 50).tolist()
        rows.append(make_row("forks", fork, ids, range(100 * fork, len(ids))))
    advantages = {row.key: 1.0 - 0.3 * (number % 7) for number, row in enumerate(rows)}
    return pack_rows(
        rows, advantages, data_parallel_size=1, tokens_per_micro=2048, pad_id=0, share_prefixes=share_prefixes
    )


def computed(
    folder: Path, *, share_prefixes: bool, **options: object
) -> tuple[list[torch.Tensor], dict[RowKey, np.ndarray]]:
    """Return the gradient of all weights of two steps that change nothing, and the log-probabilities."""
    config = LearnerConfig(device="cuda", **options)  # type: ignore[arg-type]
    learner = LocalLearnerGroup(folder, config, make_algo(), seed=0)
    try:
        batch = make_batch(share_prefixes=share_prefixes)
        assert any(micro.shares_prefixes for micro in batch.micro[0]) == share_prefixes
        gradients: list[torch.Tensor] = []

        def keep(lr_scale: float) -> dict[str, float]:
            parameters = learner.rank.model.parameters()  # type: ignore[attr-defined]
            gradients.append(torch.cat([parameter.grad.float().flatten() for parameter in parameters]).cpu())
            return {}

        learner.rank._update = keep  # type: ignore[attr-defined]
        for _ in range(2):
            learner.train_step(batch)
        return gradients, learner.logprobs(batch)
    finally:
        learner.close()


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_in_float32_they_are_equal(folder):
    (expected, _), logprobs = computed(folder, share_prefixes=False, precision="float32", compile=False)
    for compiled in (False, True):
        actual, shared = computed(folder, share_prefixes=True, precision="float32", compile=compiled)
        assert max(far(gradient, expected) for gradient in actual) < 1e-5
        assert all(np.abs(shared[key] - logprobs[key]).max() < 1e-4 for key in logprobs)


def test_in_bfloat16_they_are_as_far_from_float32_as_plain_rows(folder):
    (expected, _), logprobs = computed(folder, share_prefixes=False, precision="float32", compile=False)
    gradients, errors = [], []
    for share in (False, True):
        (actual, _), scored = computed(folder, share_prefixes=share, precision="bfloat16", compile=True)
        gradients.append(far(actual, expected))
        errors.append(float(np.mean([np.abs(scored[key] - logprobs[key]).mean() for key in logprobs])))
    assert gradients[1] < 1.3 * gradients[0]
    assert errors[1] < 1.3 * errors[0]
