"""CPU time of batch-invariant products in engine and learner, beside the usual ones: ``python -m benchmarks.batch_invariant``.

The shipped search policy (1.9M weights) answers prompts in the embedded engine, and the learner takes an optimizer step with
these rows. One thread each; CPU time of the process, so that other processes do not count.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
import torch

from agentrl.batch.packing import PackOptions, RowSignals, pack
from agentrl.config.load import load_config
from agentrl.core.types import MaskReason, Provenance, Row, RowKey
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.request import GenerateInput, Request, SamplingOptions
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.stop_strings import StopMatcher
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.models.load import load_tokenizer
from agentrl.models.resolve import resolve_model

POLICY = "multihop-warm"
REQUESTS, PROMPT, ANSWER = 32, 200, 64
"""Requests at the same time, and tokens of each."""


async def _sample(scheduler: Scheduler) -> list[Request]:
    rng = np.random.default_rng(0)
    options = SamplingOptions(max_new_tokens=ANSWER, ignore_eos=True)
    loop = asyncio.create_task(scheduler.run())
    try:
        prompts = rng.integers(0, scheduler.model.vocabulary, (REQUESTS, PROMPT)).tolist()
        requests = [
            scheduler.submit(GenerateInput(prompt, options, str(number), True)) for number, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(request.done for request in requests))
        return requests
    finally:
        loop.cancel()


def _row(number: int, request: Request) -> Row:
    token_ids = request.tokens()
    is_sampled = np.arange(len(token_ids)) >= PROMPT
    return Row(
        key=RowKey("prompt", str(number)),
        token_ids=token_ids,
        provenance=np.where(is_sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=is_sampled.astype(np.uint8),
        mask_reason=np.where(is_sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.array([0.0] * PROMPT + request.logprobs, np.float32),
        versions=np.where(is_sampled, 0, -1).astype(np.int32),
        requests=np.where(is_sampled, 0, -1).astype(np.int32),
        request_ids=("benchmark",),
    )


def measure(*, batch_invariant: bool) -> tuple[float, float, float]:
    """Return CPU seconds of sampling and of an optimizer step, and the largest difference of log-probabilities."""
    folder = resolve_model(POLICY)
    model = Model(folder, torch.float32, REQUESTS, PROMPT + ANSWER, batch_invariant=batch_invariant)
    scheduler = Scheduler(model, StopMatcher(load_tokenizer(folder), model.vocabulary), REQUESTS, 0, "0")
    begun = time.process_time()
    requests = asyncio.run(_sample(scheduler))
    sampling_s = time.process_time() - begun
    rows = [_row(number, request) for number, request in enumerate(requests)]
    words = str(batch_invariant).lower()
    keys = [f"learner.batch_invariant={words}", f"sampler.embedded.batch_invariant={words}"]
    config = load_config(None, ["learner.device=cpu", "learner.threads=1", "learner.precision=float32", *keys])
    learner = LocalLearnerGroup(folder, config.learner, config.algo, seed=0)
    try:
        advantages = {row.key: np.ones(len(row.token_ids), np.float32) for row in rows}
        batch = pack(rows, PackOptions(4096), RowSignals(advantages=advantages))
        logprobs = learner.logprobs(batch)
        begun = time.process_time()
        learner.train_step(batch)
        step_s = time.process_time() - begun
    finally:
        learner.close()
    gap = max(float(np.abs(logprobs[row.key] - row.logprobs)[PROMPT:].max()) for row in rows)
    return sampling_s, step_s, gap


def main() -> None:
    """Print both."""
    for batch_invariant in (False, True):
        sampling_s, step_s, gap = measure(batch_invariant=batch_invariant)
        print(
            f"{'batch-invariant' if batch_invariant else 'usual'}: sampling {sampling_s:.2f} s, optimizer step {step_s:.2f} s "
            f"of CPU; largest difference of log-probabilities {gap:.2g}"
        )


if __name__ == "__main__":
    main()
