"""Remote reward models: samples go to an HTTP server in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.clients.http import Json, ServiceClient, UnusableReplyError
from agentrl.config.rewards import RewardFunctionConfig
from agentrl.core.errors import JudgeError, ServiceError
from agentrl.core.types import json_state
from agentrl.rewards.functions import read_score, short_text
from agentrl.rewards.sample import Sample
from agentrl.rewards.scoring import Outcome


@dataclass(slots=True)
class _Batch:
    """Samples that wait for their request, or for its reply."""

    samples: list[Sample] = field(default_factory=list)
    is_full: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[list[object]] | None = None
    waiters: int = 0


class RemoteScorer:
    """Implements `agentrl.rewards.scoring.Scorer` by ``POST URL``. Samples of any tasks share a request.

    Args:
        config: with the section ``remote``.
        key: configuration key of that section, for messages.
        client: sends the requests; by default one for the section.
    """

    group = False
    metric_prefix = ""

    def __init__(self, config: RewardFunctionConfig, key: str, client: ServiceClient | None = None) -> None:
        assert config.remote is not None
        self._remote = config.remote
        self._reward_key = config.key
        self._client = client or ServiceClient(config.remote, key)
        self._batch = _Batch()

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the server's rewards; a null, or an error of the request, is none."""
        async with self._client:  # connections stay open while samples are scored
            return list(await asyncio.gather(*map(self._score, samples)))

    async def _score(self, sample: Sample) -> Outcome:
        try:
            result = await self._reply(sample)
            if result is None:
                raise JudgeError(f"{self._remote.url} returned no reward (null)")
            return read_score(result, self._reward_key)
        except (ServiceError, JudgeError) as error:
            return Outcome(error=error)
        except ValueError as error:
            return Outcome(error=JudgeError(f"{self._remote.url}: {error}"))

    async def _reply(self, sample: Sample) -> object:
        """Return the server's reply for a sample, from the request that takes it along."""
        if self._remote.batch_size is None:
            return await self._client.post("", sample_to_wire(sample), lambda reply: reply)
        batch = self._batch
        index = len(batch.samples)
        batch.samples.append(sample)
        batch.waiters += 1
        if batch.task is None:
            batch.task = asyncio.create_task(self._send(batch), name="remote rewards")
        if len(batch.samples) == self._remote.batch_size:
            self._batch = _Batch()
            batch.is_full.set()
        try:
            return (await asyncio.shield(batch.task))[index]
        finally:
            batch.waiters -= 1
            if not batch.waiters and not batch.task.done():  # all of its episodes were canceled
                batch.task.cancel()

    async def _send(self, batch: _Batch) -> list[object]:
        try:
            await asyncio.wait_for(batch.is_full.wait(), self._remote.wait_s)
        except TimeoutError:
            pass
        finally:
            if self._batch is batch:
                self._batch = _Batch()
        body: Json = {"samples": [sample_to_wire(sample) for sample in batch.samples]}
        return await self._client.post("", body, lambda reply: read_rewards(reply, len(batch.samples)))


def sample_to_wire(sample: Sample) -> Json:
    """Return what a server gets of a sample. ``prompt``, ``response`` and ``label`` are those of slime's ``remote_rm``."""
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "final": sample.final,
        "label": json_state(sample.label),
        "metadata": json_state(sample.metadata),
        "prompt_id": sample.prompt_id,
        "rollout_id": sample.rollout_id,
    }


def read_rewards(reply: object, count: int) -> list[object]:
    """Return the rewards in a reply: a list of numbers, mappings or nulls, alone or as ``rewards``.

    Raises:
        UnusableReplyError: there is none, or it has another length.
    """
    rewards = reply.get("rewards") if isinstance(reply, Mapping) else reply
    if not isinstance(rewards, list):
        raise UnusableReplyError(f"the reply has no list of rewards: {short_text(reply)}")
    if len(rewards) != count:
        raise UnusableReplyError(f"{count} samples were sent, and the reply has {len(rewards)} rewards")
    return rewards
