"""The narrow seams between the parts of agentrl. No torch at import.

Each protocol has its fake in `agentrl.testing`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

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


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A ``torch.distributed`` group through which weights go. Example: ``WeightGroup("w1", "127.0.0.1", 29500, 3, "gloo")``."""

    name: str
    """Never used twice, as engines may know the earlier group still."""
    host: str
    """Where its store is."""
    port: int
    """Of the store."""
    size: int
    """Processes in it: the sender, which is rank 0, and those of all engines."""
    backend: str
    """``nccl`` or ``gloo``."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor of a bucket is. Example: ``TensorSpec("model.norm.weight", "float32", (64,))``."""

    name: str
    """Hugging Face's."""
    dtype: str
    """As ``torch`` has it, such as ``bfloat16``."""
    shape: tuple[int, ...]


MemoryPart = Literal["weights", "kv_cache"]
"""What of an engine's memory can be given back."""


class EngineControl(Protocol):
    """Steers an engine. All raise `EngineError` with the engine's own words when it refuses.

    Weights in several buckets take effect together with the last one. Where an engine may hold a mixture, because an
    update broke off, it samples nothing until a whole one has come.
    """

    @property
    def url(self) -> str:
        """Where it answers."""
        ...

    @property
    def number(self) -> int:
        """Which of the run's engines it is, from 0; the same once it was started again."""
        ...

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

    async def update_from_handles(self, handles: Sequence[str], version: int, *, last: bool) -> None:
        """Take one bucket of weights that lie on the engine's GPUs; otherwise as `update_from_tensors`.

        ``handles`` are one for each of its ranks, see `HeldBucket.share`.
        """
        ...

    async def release_memory(self) -> None:
        """Wait for generations under way, then give weights and KV cache back. Twice is once.

        Generations wait until all memory has been taken back. A paused engine, or one that gets weights, refuses.
        """
        ...

    async def take_back_memory(self, part: MemoryPart) -> None:
        """Take a part of the memory again; nothing where the engine holds it.

        After ``weights`` these are garbage: nothing is sampled until a whole update has come.
        """
        ...

    async def ranks(self) -> int:
        """Return how many processes of it join a `WeightGroup`."""
        ...

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """Join a group, its processes as ``first_rank`` and the next ones; returns when all ranks have joined."""
        ...

    async def leave_group(self, group: WeightGroup) -> None:
        """Leave a group; what it waits for there fails."""
        ...

    async def begin_update(self) -> None:
        """Let no generation start until the update has ended, and wait for those under way."""
        ...

    async def update_from_group(
        self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool
    ) -> None:
        """Take one bucket that rank 0 broadcasts; returns when it has come. Otherwise as `update_from_tensors`."""
        ...

    async def cancel_update(self) -> None:
        """Say that no further bucket comes. Does nothing where no update is under way."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Return a checksum of every weight by the engine's name for it; see `agentrl.weights.checksum`."""
        ...

    async def checksum_kind(self) -> Literal["sha256", "words"]:
        """Return how it makes `checksums`: ``sha256`` on a CPU, `agentrl.models.wordhash` on a GPU."""
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


class HeldBucket(Protocol):
    """Some of the learner's weights, whole, held by every rank on its device until the next bucket is asked for.

    Methods block.
    """

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """What is in it, in the order in which it is sent."""
        ...

    @property
    def last(self) -> bool:
        """Whether no bucket follows."""
        ...

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights on the CPU of the calling process; they must not be written to."""
        ...

    def save(self, file: Path) -> None:
        """Have rank 0 write them as safetensors."""
        ...

    def broadcast(self) -> None:
        """Have rank 0 send them, in order, in the group that `LearnerGroup.join_group` joined.

        Raises:
            EngineError: another process of the group is gone or too slow, or `leave_group` was called.
            LearnerError: no group was joined, or the learner sleeps and the group is of NCCL.
        """
        ...

    def share(self) -> list[str]:
        """Return by rank what opens the weights in another process on the same GPU.

        Each is what SGLang's ``/update_weights_from_tensor`` takes: a pickle of names and CUDA handles, in base64.

        Raises:
            LearnerError: they are not on a GPU.
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

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[HeldBucket]:
        """Iterate over the weights by Hugging Face name, tied ones once. Stopping early is allowed.

        Args:
            bucket_bytes: size of a bucket; a larger tensor makes one of its own.
            dtype: what they are cast to, such as ``bfloat16``; None leaves them as the learner holds them.

        """
        ...

    def open_group(self, urls: Sequence[str], size: int, backend: str, timeout_s: float) -> WeightGroup:
        """Open, in rank 0's process, the meeting point of a group, at an address that engines at ``urls`` can reach.

        Args:
            urls: where the engines answer.
            size: processes of the group, rank 0 included.
            backend: ``nccl`` or ``gloo``.
            timeout_s: seconds that joining, and later each tensor, may take.

        """
        ...

    def join_group(self, group: WeightGroup) -> None:
        """Have rank 0 join the group that `open_group` opened, as its rank 0; returns when all have joined.

        Raises:
            EngineError: not all were there in time, or `leave_group` was called.
        """
        ...

    def leave_group(self) -> None:
        """Leave the group, if there is one; what still joins or broadcasts in it fails. From any thread, at any time."""
        ...

    def sleep(self) -> None:
        """Give the device's memory back: weights, optimizer and reference go to the CPU. Twice is once.

        A sleeping learner gives `buckets`, whose ``share`` and whose ``broadcast`` by NCCL fail, saves and closes; all
        else raises `LearnerError`.
        """
        ...

    def wake(self) -> None:
        """Take the device's memory again. Nothing where the learner is awake.

        Raises:
            LearnerError: there is not enough; the learner sleeps on.
        """
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
        """Send the weights, then check the engines as ``weights.check`` says.

        Raises:
            EngineError: an engine failed, or the check did. Those that may hold a mixture sample nothing until a whole
                update has come.

        """
        ...

    async def aclose(self) -> None:
        """Give back what is kept from one update to the next."""
        ...
