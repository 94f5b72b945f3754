import numpy as np
import pytest
from PIL import Image as pil

from agentrl.core.images import load_image
from agentrl.core.types import MaskReason, Provenance, Rollout, Row, RowKey, StopReason


def build(pieces, number=0, prompt_id="p", **changes):
    """A rollout whose one row is `pieces`: (provenance, mask reason, [ids])."""
    ids = [token for _, _, tokens in pieces for token in tokens]
    who = (
        np.concatenate([np.full(len(tokens), kind, np.uint8) for kind, _, tokens in pieces])
        if pieces
        else np.zeros(0, "u1")
    )
    why = (
        np.concatenate([np.full(len(tokens), kind, np.uint8) for _, kind, tokens in pieces])
        if pieces
        else np.zeros(0, "u1")
    )
    sampled = who == Provenance.SAMPLED
    stretch = np.cumsum(np.diff(sampled.astype(int), prepend=0) > 0) - 1
    row = Row(
        key=RowKey(prompt_id, f"r{number}"),
        token_ids=np.array(ids, np.int32),
        provenance=who,
        mask=(why == MaskReason.NONE).astype(np.uint8),
        mask_reason=why,
        logprobs=np.where(sampled, -np.arange(1, len(ids) + 1) / 8, 0).astype(np.float32),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        requests=np.where(sampled, stretch, -1).astype(np.int32),
        request_ids=tuple(f"q{n}" for n in range(int(stretch.max(initial=-1)) + 1)),
    )
    fields = {
        "reward": 0.5,
        "stop_reason": StopReason.TERMINATED,
        "prompt": "What?",
        "sampled_tokens": int(sampled.sum()),
    }
    return Rollout(prompt_id, f"r{number}", [row] if pieces else [], **(fields | changes))


@pytest.fixture
def picture():
    return load_image(pil.new("RGB", (3, 2), "red"))


@pytest.fixture
def make_rollout():
    return build


@pytest.fixture
def pieces():
    observed = (Provenance.OBSERVED, MaskReason.OBSERVED)
    return [
        (*observed, [5, 9]),
        (Provenance.SAMPLED, MaskReason.NONE, [7, 5, 7]),
        (*observed, [70_000]),
        (Provenance.SAMPLED, MaskReason.STALE, [1]),
    ]
