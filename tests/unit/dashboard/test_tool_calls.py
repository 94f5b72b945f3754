"""Tool calls are read by the run's chat format from sampled tokens only."""

from dataclasses import replace

import numpy as np
import pytest
from gateway_episodes import make_test_renderer

from agentrl.core.types import MaskReason, Provenance, Rollout, RowKey
from agentrl.dashboard.tool_calls import rollout_calls
from agentrl.render.renderer import ChatRenderer
from benchmarks.viewer import synthetic_entries

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "who?"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "search", "arguments": \n</tool_call>'


@pytest.fixture(scope="module")
def chat_format() -> ChatRenderer:
    return make_test_renderer()


def rollout_of(chat_format: ChatRenderer, *texts: str) -> Rollout:
    """A rollout of observed and sampled texts by turns; the first is observed."""
    rollout = next(iter(synthetic_entries(1, 1))).rollout
    pieces = [chat_format.encode(text) for text in texts]
    provenance = np.repeat(np.arange(len(pieces)) % 2, [len(piece) for piece in pieces]).astype(np.uint8)
    length = len(provenance)
    row = replace(
        rollout.rows[0],
        key=RowKey("p", "r"),
        token_ids=np.array([token for piece in pieces for token in piece], np.int32),
        provenance=provenance * np.uint8(Provenance.SAMPLED),
        mask=provenance,
        mask_reason=np.where(provenance, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        requests=np.zeros(length, np.int32),
    )
    return replace(rollout, rows=[row])


def test_calls_have_their_turn_name_and_arguments(chat_format: ChatRenderer) -> None:
    rollout = rollout_of(chat_format, f"call it so: {CALL}", "I think.", "result", CALL, "more", BROKEN)
    calls = rollout_calls(rollout, chat_format)
    assert [(call["turn"], call["name"], call["arguments"]) for call in calls[:1]] == [
        (2, "search", '{"query":"who?"}')
    ]
    assert not calls[0]["fault"]
    assert [call["turn"] for call in calls[1:]] == [3]
    assert calls[1]["fault"]


def test_a_rollout_without_rows_has_no_calls(chat_format: ChatRenderer) -> None:
    assert rollout_calls(replace(rollout_of(chat_format, "a"), rows=[]), chat_format) == []
