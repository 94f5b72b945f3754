"""A sampler that says what a script tells it to."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that a `ScriptedSampler` got."""

    prompt: Prompt
    """What is to be continued."""
    params: SamplingParams
    """How to sample."""
    session_id: str
    """The episode's session."""
    request_id: str
    """The request."""
    turn: int
    """Which request of its session this is, from 0."""
    policy: str = "main"
    """Which policy was asked."""


Answer = str | Sequence[int] | Exception
"""Text to encode, ids to give as they are, or an error to raise."""

Script = Callable[[Asked], Answer] | Sequence[Answer] | Mapping[str, Sequence[Answer]]
"""A function, or the answers of a session's turns in order (for all sessions alike, or by session id)."""


class ScriptedSampler:
    """Implements `agentrl.core.sampler.Sampler` without a model.

    A text that ends with none of the request's stop strings gets the end token, as a policy would have to say it.
    Log-probabilities are drawn from a generator seeded by session and turn: they do not depend on who asks first.

    Example::

        sampler = ScriptedSampler(["<search> Sadova </search>", "<answer> Remu </answer>"], encode=tokenizer.encode)
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        end_token_id: int | None = None,
        version: int = 0,
        seed: int = 0,
        gate: asyncio.Event | None = None,
    ) -> None:
        """Follow ``script``.

        Args:
            script: what to say.
            encode: turns text answers into ids; needed where the script holds text.
            end_token_id: ends text answers without a stop string; None adds nothing.
            version: the policy version that samples; may be set anew at any time.
            seed: seed of the log-probabilities.
            gate: requests wait for this event; one that is aborted meanwhile gives the first half of its tokens.
        """
        self.version = version
        self.gate = gate
        self.asked: list[Asked] = []
        self.closed: list[str] = []
        self.running = 0
        self.most_running = 0
        self._script = script
        self._encode = encode
        self._end_token_id = end_token_id
        self._seed = seed
        self._turns: Counter[str] = Counter()
        self._aborts: dict[str, asyncio.Event] = {}

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Answer as the script says.

        Raises:
            Exception: the script holds one in this place.
            AssertionError: the script has no answer left for this session.
        """
        asked = Asked(prompt, params, session_id, request_id, self._turns[session_id], policy)
        self._turns[session_id] += 1
        self.asked.append(asked)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            aborted = await self._wait(request_id)
        finally:
            self.running -= 1
        return self._generation(asked, aborted)

    async def _wait(self, request_id: str) -> bool:
        if self.gate is None:
            await asyncio.sleep(0)
            return False
        abort = self._aborts[request_id] = asyncio.Event()
        waits = [asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(abort.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            del self._aborts[request_id]
        return abort.is_set()

    def _generation(self, asked: Asked, aborted: bool) -> Generation:
        answer = self._answer(asked)
        if isinstance(answer, Exception):
            raise answer
        ids = self._ids(answer, asked.params)
        reason = FinishReason.STOP
        if aborted:
            ids, reason = ids[: len(ids) // 2], FinishReason.ABORT
        elif len(ids) > asked.params.max_new_tokens:
            ids, reason = ids[: asked.params.max_new_tokens], FinishReason.LENGTH
        rng = np.random.default_rng([self._seed, zlib.crc32(asked.session_id.encode()), asked.turn])
        logprobs = tuple(rng.uniform(-2.0, 0.0, len(ids)).tolist())
        return Generation(ids, logprobs, reason, ((0, self.version),), 0, asked.request_id)

    def _answer(self, asked: Asked) -> Answer:
        if callable(self._script):
            return self._script(asked)
        script = self._script[asked.session_id] if isinstance(self._script, Mapping) else self._script
        assert asked.turn < len(script), f"the script has {len(script)} answers; session {asked.session_id} wants more"
        return script[asked.turn]

    def _ids(self, answer: str | Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        if not isinstance(answer, str):
            return tuple(answer)
        assert self._encode is not None, "a script of texts needs encode="
        ids = tuple(self._encode(answer))
        ends = self._end_token_id is None or any(answer.endswith(stop) for stop in params.stop)
        return ids if ends else (*ids, int(self._end_token_id or 0))

    async def abort(self, request_id: str) -> None:
        """Stop a request that waits for the gate; any other is over already."""
        if request_id in self._aborts:
            self._aborts[request_id].set()

    async def close_session(self, session_id: str) -> None:
        """Note the session in ``closed``."""
        self.closed.append(session_id)
