"""The narrow seams between the parts of agentrl. No torch at import.

Each protocol has its fake in `agentrl.testing`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.types import Fork, Generation, Message, Prompt, Rollout, RowKey, SamplingParams, ToolCall, ToolResult

if TYPE_CHECKING:
    import torch

    from agentrl.batch.microbatch import GlobalBatch
    from agentrl.tool import Tool


class Sampler(Protocol):
    """Continues prompts, token ids in and token ids out."""

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample one turn. Turns of one ``session_id`` share a prefix that an engine may keep cached.

        Raises:
            SamplerError: the engine refused, failed or could not be reached.

        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request; its `generate` returns the tokens so far with ``FinishReason.ABORT``."""
        ...

    async def close_session(self, session_id: str) -> None:
        """Say that no further turn of this session comes."""
        ...


class EngineControl(Protocol):
    """Steers an engine. All raise `EngineError` with the engine's own words when it refuses."""

    async def healthy(self) -> bool:
        """Return whether the engine answers."""
        ...

    async def pause(self, mode: str = "retract") -> None:
        """Stop sampling; ``mode`` is SGLang's: ``abort``, ``retract`` or ``in_place``."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def update_from_disk(self, folder: Path, version: int) -> None:
        """Load a Hugging Face folder's weights; the prefix cache is flushed."""
        ...

    async def update_from_tensors(self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool) -> None:
        """Take one bucket of weights by Hugging Face name; after the ``last`` one, ``version`` samples."""
        ...

    async def version(self) -> int:
        """Return the policy version that samples now."""
        ...

    async def flush(self) -> None:
        """Drop the prefix cache."""
        ...


class Renderer(Protocol):
    """Turns messages into tokens and back."""

    @property
    def end_token_id(self) -> int:
        """The token that ends a turn of the policy."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a turn of the policy when it samples them, `end_token_id` first."""
        ...

    @property
    def pad_token_id(self) -> int:
        """The token that fills batches."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """Return the whole conversation as a prompt that asks the policy to speak next."""
        ...

    def bridge(
        self,
        history: Sequence[Message],
        sampled_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> tuple[int, ...] | Fork:
        """Return what to append to ``sampled_ids``, the last message of ``history``: the rest of the turn's end, the
        ``new`` messages and the opener; or, where no proof exists that this is what the chat format would say, why not:
        the caller then renders anew and forks.
        """
        ...

    def parse(
        self, sampled_ids: Sequence[int], tools: Sequence[Tool] = (), *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Return what the policy said as an assistant message, its end token left out, with every attempt to call one
        of ``tools`` and its status. Never raises. ``prompt_ids`` are what it continues.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        ...


class ToolClient(Protocol):
    """Calls the tools of one server."""

    async def call(self, call: ToolCall, *, episode_id: str) -> ToolResult:
        """Run one call. The tool's own failures are results with a status; a retry sends the same call id.

        Raises:
            ToolFailure: the server failed or could not be reached, after all retries.

        """
        ...

    async def close_session(self, episode_id: str) -> None:
        """Say that the episode makes no further call."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


CallTool = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]
"""Runs a tool, by name and arguments, in the sessions of an episode that has ended."""


class Grader(Protocol):
    """Gives rollouts their reward after they have ended, in place of what the environment gave."""

    @property
    def group(self) -> bool:
        """Whether it wants all rollouts of a task at the same time; otherwise it gets one at a time."""
        ...

    async def grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool] | None = None) -> None:
        """Set ``reward`` (and figures in ``metrics``) of rollouts of one task; one that cannot be graded is dropped.

        ``tools`` run what the episodes could call, in their own sessions, by ``rollout_id``.

        Raises:
            RunStopped: a rollout cannot be graded, and the configuration stops the run over it.

        """
        ...


class LearnerGroup(Protocol):
    """The driver's side of a learner: global batch in, results on the CPU out."""

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Take one optimizer step and return its metrics.

        Raises:
            LearnerError: a rank failed; `ProvenanceError` where the batch may not be trained on.

        """
        ...

    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> dict[RowKey, Any]:
        """Return, by row key, float32 log-probabilities ``[T]`` of each token given those before it (0 for the first).

        Args:
            batch: rows to score, at its temperature.
            policy: whose: ``main`` is the trained one, ``reference`` the frozen one that the loss is held to.

        Raises:
            LearnerError: no such policy is loaded, or a rank failed.

        """
        ...

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Iterate over the weights by Hugging Face name, in buckets of at most ``bucket_bytes`` (one tensor at least)."""
        ...

    def save(self, folder: Path) -> None:
        """Write optimizer, scheduler and random states and the model as a Hugging Face folder ``folder/model``."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, on any number of ranks.

        Raises:
            CheckpointError: the folder is not whole, or of another model.

        """
        ...

    def close(self) -> None:
        """End the ranks."""
        ...


class WeightSync(Protocol):
    """Brings the learner's weights into the engines."""

    async def push(self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int) -> None:
        """Send the weights, then check that every engine samples with ``version``."""
        ...
