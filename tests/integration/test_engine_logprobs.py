"""The embedded engine's log-probabilities are those of a Hugging Face forward, whatever its cache reuses."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_tiny import FAMILIES, reference_logprobs, save_model

from agentrl.inference.embedded.forward_batch import ForwardBatch, Segment
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.request import GenerateInput, SamplingOptions
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.stop_strings import StopMatcher
from agentrl.models.load import load_model, load_tokenizer

TEMPERATURES = (1.0, 0.6, 0.0)


def make_scheduler(folder: Path, slots: int, threads: int) -> Scheduler:
    model = Model(folder, torch.float32, slots, 200, threads)
    return Scheduler(model, StopMatcher(load_tokenizer(folder), model.vocabulary), slots, 0, "0")


async def episode(scheduler: Scheduler, shared: list[int], index: int) -> list[tuple[list[int], float, dict[str, Any]]]:
    """Play three turns; later ones go on from the exact tokens of earlier ones."""
    source = random.Random(index)
    ids = shared + [source.randrange(2, 384) for _ in range(source.randrange(1, 25))]
    temperature = TEMPERATURES[index % 3]
    turns = []
    for turn in range(3):
        options = SamplingOptions(max_new_tokens=source.randrange(1, 16), temperature=temperature)
        request = scheduler.submit(GenerateInput(ids, options, f"{index}-{turn}", logprobs=True))
        await request.done
        reply = scheduler.reply(request)
        turns.append((ids, temperature, reply))
        ids = ids + reply["output_ids"] + [source.randrange(2, 384) for _ in range(source.randrange(1, 12))]
    return turns


@pytest.mark.parametrize(
    ("family", "slots", "threads"),
    [
        *((family, 5, 1) for family in FAMILIES),
        ("qwen3", 32, 2),
        ("mistral", 32, 2),
    ],  # threads know windows, not families
)
def test_many_turns_match_a_plain_forward(
    tmp_path: Path, family: str, slots: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 concurrent episodes share a prefix; with 5 slots their caches also push each other out."""
    monkeypatch.setattr("agentrl.inference.embedded.model._MIN_THREAD_TOKENS", 4)
    folder = save_model(tmp_path, family)
    scheduler = make_scheduler(folder, slots, threads)
    shared = [random.Random(99).randrange(2, 384) for _ in range(40)]

    async def play() -> list[list[tuple[list[int], float, dict[str, Any]]]]:
        loop = asyncio.create_task(scheduler.run())
        try:
            return await asyncio.gather(*(episode(scheduler, shared, index) for index in range(12)))
        finally:
            loop.cancel()

    episodes = asyncio.run(play())
    reference = load_model(folder)
    cached = 0
    for turns in episodes:
        for prompt, temperature, reply in turns:
            meta = reply["meta_info"]
            assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
            got = [entry[0] for entry in meta["output_token_logprobs"]]
            expected = reference_logprobs(reference, prompt, reply["output_ids"], temperature)
            np.testing.assert_allclose(got, expected, atol=1e-4)
            cached += meta["cached_tokens"]
    # All but the first reuse at least the shared prefix, from any slot.
    assert cached >= 40 * (len(episodes) * 3 - 1)


def test_gaps_between_active_slots_and_long_prompts(tmp_path: Path) -> None:
    """One batch with decoding slots that are not adjacent, a prompt longer than an attention block, and a continued one."""
    folder = save_model(tmp_path, "mistral")
    model = Model(folder, torch.float32, 16, 4096)
    assert model.context == 512, "at most the model's own"
    reference = load_model(folder)
    source = np.random.default_rng(0)
    tokens = {slot: source.integers(0, 384, length).astype(np.int32) for slot, length in
              {0: 30, 1: 80, 4: 33, 5: 31, 15: 90, 9: 500, 8: 64}.items()}  # fmt: skip
    last_positions = {slot: len(tokens[slot]) - 1 for slot in (15, 4, 0, 5, 1)} | {8: 50}
    model.forward(ForwardBatch([Segment(slot, 0, tokens[slot][:count]) for slot, count in last_positions.items()]))
    batch = ForwardBatch(
        [
            Segment(slot, last_positions.get(slot, 0), tokens[slot][last_positions.get(slot, 0) :])
            for slot in (9, *last_positions)
        ]
    )
    assert (batch.decoding, len(batch.runs)) == (5, 2)
    logits = model.forward(batch)
    for row, segment in enumerate(batch.segments):
        ids = torch.from_numpy(tokens[segment.slot].astype(np.int64))[None]
        with torch.no_grad():
            expected = reference(ids).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


def test_a_long_prompt_spans_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.inference.embedded.forward_batch._BLOCK_TOKENS", 32)
    folder = save_model(tmp_path, "llama")
    model = Model(folder, torch.float32, 2, 400)
    tokens = np.random.default_rng(1).integers(0, 384, 150).astype(np.int32)
    model.forward(ForwardBatch([Segment(1, 0, tokens[:20])]))
    batch = ForwardBatch([Segment(1, 20, tokens[20:])])
    assert len(batch.blocks) == 5
    with torch.no_grad():
        expected = load_model(folder)(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
    torch.testing.assert_close(model.forward(batch)[0], expected, atol=1e-4, rtol=0)


def test_bfloat16_runs_and_is_near(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3")
    model = Model(folder, torch.bfloat16, 4, 200)
    tokens = np.random.default_rng(2).integers(0, 384, 40).astype(np.int32)
    model.forward(ForwardBatch([Segment(0, 0, tokens[:-1])]))
    got = model.forward(ForwardBatch([Segment(0, 39, tokens[-1:])]))[0].log_softmax(-1)
    with torch.no_grad():
        expected = load_model(folder)(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1].log_softmax(-1)
    assert float((got - expected).abs().max()) < 0.3
