"""The sampler contract: continues prompts, token ids in and token ids out."""

from __future__ import annotations

from typing import Protocol

from agentrl.core.types import Generation, Prompt, SamplingParams


class Sampler(Protocol):
    """Continues prompts, token ids in and token ids out."""

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample one turn. Turns of one ``session_id`` share a prefix that an engine may keep cached.

        Raises:
            SamplerError: the engine refused, failed or could not be reached.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a request; its `generate` returns the tokens so far with ``FinishReason.ABORT``."""

    async def close_session(self, session_id: str) -> None:
        """End a session: no further turn of it comes."""
