"""How near an engine's log-probabilities are to the learner's, on tokens that the engine sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from agentrl.batch.microbatch import GlobalBatch
from agentrl.core.images import Image, ImageSpan
from agentrl.core.types import MaskReason, Prompt, Provenance, Row, RowKey, SamplingParams
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.learner.base import LearnerGroup
from agentrl.learner.in_process import LocalLearnerGroup
from tests.batches import pack_rows


@dataclass(frozen=True)
class Agreement:
    """Of log-probabilities, engine's and learner's."""

    tokens: int
    mean: float
    """Of the absolute differences."""
    largest: float
    k3: float
    """Schulman's estimate of the KL divergence of the engine's distribution from the learner's, per token."""

    def __str__(self) -> str:
        return f"{self.tokens} tokens, mean {self.mean:.5f}, max {self.largest:.4f}, k3 {self.k3:.2e}"


class OneEngine:
    """A fleet of one engine, which never fails."""

    def __init__(self, client: SGLangClient) -> None:
        self.live = (client,)

    async def check_now(self) -> None: ...

    async def wait_ended(self) -> None: ...


async def sample_rows(
    client: SGLangClient, prompts: Sequence[Sequence[int]], *, tokens: int, version: int, temperature: float = 1.0
) -> list[Row]:
    """Sample ``tokens`` tokens after each prompt, all beside each other, and return them as rows to train on."""
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature)

    async def play(number: int, ids: Sequence[int]) -> Row:
        name = f"{version}/{number}"
        reply = await client.generate(Prompt(tuple(ids)), params, session_id=name, request_id=name)
        assert reply.versions == ((0, version),)
        is_sampled = np.arange(len(ids) + len(reply.token_ids)) >= len(ids)
        logprobs = np.zeros(len(is_sampled), np.float32)
        logprobs[is_sampled] = reply.logprobs
        key = RowKey(f"p{number // 2}", name)
        return sampled_row(
            key, [*ids, *reply.token_ids], is_sampled, logprobs, version=version, temperature=temperature
        )

    return list(await asyncio.gather(*(play(number, ids) for number, ids in enumerate(prompts))))


def sampled_row(
    key: RowKey,
    token_ids: Sequence[int],
    is_sampled: NDArray[np.bool_],
    logprobs: NDArray[np.float32],
    *,
    version: int = 0,
    temperature: float = 1.0,
    images: Sequence[ImageSpan] = (),
) -> Row:
    """Return tokens ``[T]`` as a row that is trained on what was sampled, by one request; ``logprobs`` are 0 elsewhere."""
    return Row(
        key=key,
        token_ids=np.array(token_ids, np.int32),
        provenance=np.where(is_sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=is_sampled.astype(np.uint8),
        mask_reason=np.where(is_sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=logprobs,
        versions=np.where(is_sampled, version, -1).astype(np.int32),
        requests=np.where(is_sampled, 0, -1).astype(np.int32),
        request_ids=(key.rollout_id,),
        temperature=temperature,
        images=tuple(images),
    )


def batch_of(rows: Sequence[Row], images: Mapping[str, Image] | None = None) -> GlobalBatch:
    """Return rows as one rank's batch, the first of each two better than the second; ``images`` are theirs by digest."""
    advantages = {row.key.rollout_id: 1.0 - 2.0 * (number % 2) for number, row in enumerate(rows)}
    return pack_rows(
        rows,
        advantages,
        data_parallel_size=1,
        tokens_per_micro=16384,
        pad_id=0,
        temperature=rows[0].temperature,
        images=images,
    )


def agreement(learner: LearnerGroup, rows: Sequence[Row], images: Mapping[str, Image] | None = None) -> Agreement:
    """Have the learner score what the engine sampled; ``images`` are those of the rows by digest."""
    scored = learner.logprobs(batch_of(rows, images))
    pairs = [(np.asarray(scored[row.key])[row.mask == 1], row.logprobs[row.mask == 1]) for row in rows]
    ours, theirs = (np.concatenate(parts).astype(np.float64) for parts in zip(*pairs, strict=True))
    log_ratio = ours - theirs
    k3 = float(np.mean(np.exp(log_ratio) - 1 - log_ratio))
    difference = np.abs(log_ratio)
    return Agreement(len(difference), float(difference.mean()), float(difference.max()), k3)


@contextmanager
def in_float32(learner: LocalLearnerGroup) -> Iterator[None]:
    """Have a learner score in float32, with the weights that an engine in bfloat16 has: what differs is what that rounds.

    With its own weights it would not agree: a step changes most by less than half of what bfloat16 can tell apart.
    """
    rank: Any = learner.rank
    model = rank.model
    autocast, precision = model.autocast, torch.get_float32_matmul_precision()
    weights_before = [(parameter, parameter.clone()) for parameter in map(local, model.parameters())]
    try:
        model.autocast = False
        torch.set_float32_matmul_precision("highest")
        with torch.no_grad():
            for parameter, _ in weights_before:
                parameter.copy_(parameter.bfloat16())
        yield
    finally:
        model.autocast = autocast
        torch.set_float32_matmul_precision(precision)
        with torch.no_grad():
            for parameter, state_before in weights_before:
                parameter.copy_(state_before)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this process holds."""
    weight = parameter.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight
