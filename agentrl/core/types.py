"""The words of agentrl as data: messages, tool calls, turns, episodes and why they end.

Nothing here imports torch, Ray or an engine, so every other module may import it. All classes are
small and most are frozen: a value that was observed once does not change afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["system", "user", "assistant", "tool"]
"""Who speaks in a message, in the words of chat templates."""

Info = dict[str, Any]
"""What an environment says beside its observation. The key ``metrics`` holds figures of the episode
(a ``dict[str, float]``), logged as ``rollout/<key>`` in training and ``eval/<key>`` in evaluation."""


class ToolStatus(StrEnum):
    """How a tool call ended. Everything but ``OK`` is answered to the policy as text that names the fault."""

    OK = "ok"
    """The tool ran; ``content`` is its answer."""
    ERROR = "error"
    """The tool ran and failed in a way the policy may see (a traceback, a bad argument)."""
    INVALID = "invalid"
    """The call did not fit the tool's schema, or named no known tool; nothing ran."""
    TIMEOUT = "timeout"
    """The tool did not answer in its time."""
    UNAVAILABLE = "unavailable"
    """The server could not be reached or failed itself: an infrastructure failure, never the policy's fault."""
    OUT_OF_MEMORY = "out_of_memory"
    """Code used more memory than its sandbox may."""
    OUTPUT_CUT = "output_cut"
    """Code was ended because it printed more than it may; ``content`` holds the beginning."""
    KILLED = "killed"
    """A signal ended the code, such as a segmentation fault."""
    SANDBOX_FAILURE = "sandbox_failure"
    """The sandbox failed itself: an infrastructure failure, never the policy's fault. Clients raise `SandboxFailure`."""


class CallStatus(StrEnum):
    """What became of the policy's attempt to call a tool, before anything ran."""

    OK = "ok"
    """It names a tool and fits its schema."""
    INVALID_JSON = "invalid_json"
    """It cannot be read in the format that the policy was taught: mostly broken JSON."""
    UNKNOWN_TOOL = "unknown_tool"
    """It names no tool that there is."""
    SCHEMA_VIOLATION = "schema_violation"
    """Its arguments do not fit the tool's schema."""
    TRUNCATED = "truncated"
    """The turn ended within it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One request to run a tool. Example: ``ToolCall("c1", "search", {"query": "Tamo Rilek"})``."""

    id: str
    """Unique in the episode; a retry sends the same id, so a server may answer from its first run. Empty where a
    renderer parsed it and its format has none."""
    name: str
    """The tool's registered name; empty where the policy's attempt could not be read so far."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able arguments."""
    status: CallStatus = CallStatus.OK
    """Only what is ``OK`` is run; everything else is answered with ``fault``."""
    fault: str = ""
    """What is wrong, in words for the policy."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered. Example: ``ToolResult("c1", ToolStatus.OK, "Paris is in France.")``."""

    call_id: str
    """The ``ToolCall.id`` this answers."""
    status: ToolStatus
    """How the call ended."""
    content: str
    """What the policy may read."""
    data: Any = None
    """The same answer as JSON-able data, for environments that format it themselves."""


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Returned by ``Env.step`` in place of messages: run these, then step again with their ``ToolResults``."""

    calls: tuple[ToolCall, ...]
    """In the order their results are wanted."""


@dataclass(frozen=True, slots=True)
class ToolResults:
    """Given to ``Env.step`` after it returned ``ToolCalls``: one result a call, in the same order."""

    results: tuple[ToolResult, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. Example: ``Message("user", "What is the capital of France?")``."""

    role: Role
    """Who speaks."""
    content: str
    """The text."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that an assistant message makes."""
    tool_call_id: str | None = None
    """In a tool message, the call it answers."""
    inline: bool = False
    """The text continues the policy's own unfinished turn, as protocols such as Search-R1 want it:
    it is appended as it is, without the chat template's turn markers."""
    token_ids: tuple[int, ...] = ()
    """The ids that ``content`` was decoded from, where the policy sampled it; without the token that ended the turn."""


class ForkReason(StrEnum):
    """Why a row does not go on where another row of its trajectory ended."""

    THINKING = "thinking"
    """The chat format leaves earlier reasoning out (``render.keep_thinking=true`` keeps it)."""
    TEMPLATE = "template"
    """The chat template changes earlier turns, or cannot be shown to leave them alone."""
    END_TOKEN = "end_token"
    """The policy ended its turn with another token than the chat format puts there."""
    CONTEXT = "context"
    """The conversation was put in other words, such as a summary of it."""
    BRANCH = "branch"
    """Another conversation of the same episode, such as a subagent's."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A renderer's answer where a conversation cannot go on by appending: the caller renders anew and forks."""

    reason: ForkReason
    """Why."""
    detail: str = ""
    """The same in words, with the value at fault."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Returned by ``Env.step`` in place of added messages: the policy goes on from these alone, such as a summary.

    What it said before stays in the rollout, in rows of its own.
    """

    messages: tuple[Message, ...]
    """The whole conversation from here on; the first is not ``inline``, unless it is a raw prompt."""

    def __post_init__(self) -> None:
        """Refuse an empty conversation, and what are no messages."""
        if not self.messages or not all(isinstance(message, Message) for message in self.messages):
            raise ValueError(f"Rewrite takes a tuple of one or more Messages, not {self.messages!r:.100}")


Observation = tuple[Message, ...] | ToolCalls | Rewrite
"""What an environment returns: the messages *added* since the policy last spoke, calls to run first, or another
conversation to go on from."""

Action = Message | ToolResults
"""What an environment receives: what the policy said, or the results of the calls it asked for."""


class StopReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"
    """The environment said the task is over."""
    TRUNCATED = "truncated"
    """The environment cut the episode short."""
    MAX_TURNS = "max_turns"
    """The policy used all turns of ``rollout.max_turns``."""
    MAX_TOKENS = "max_tokens"
    """The next turn would not fit ``rollout.max_tokens``, or the observation filled it."""
    MAX_TIME = "max_time"
    """The episode outlasted ``rollout.max_seconds``."""
    ABORTED = "aborted"
    """The run was stopped or no longer wanted the episode."""
    FAILED = "failed"
    """An error ended it; ``Rollout.error`` says which, the failure policy what follows."""


class FinishReason(StrEnum):
    """Why one generation ended."""

    STOP = "stop"
    """A stop string or the end token was sampled; it is part of the output."""
    LENGTH = "length"
    """``max_new_tokens`` were sampled."""
    ABORT = "abort"
    """The request was aborted; the tokens so far are kept."""


class Provenance(IntEnum):
    """Who made a token."""

    OBSERVED = 0
    """The prompt, an observation, or a boundary that the template adds."""
    SAMPLED = 1
    """An engine sampled it: id, log-probability, request and policy version came with it."""
    DEMONSTRATED = 2
    """A scripted expert wrote it; supervised fine-tuning only."""


class MaskReason(IntEnum):
    """Why a token has loss mask 0."""

    NONE = 0
    """It has mask 1."""
    OBSERVED = 1
    """It was not sampled by the policy."""
    SHARED = 2
    """It was sampled, and another row of the rollout trains it."""
    STALE = 3
    """It was sampled by a policy version too old to train on."""


class FailureKind(StrEnum):
    """Where a failure arose. The run's failure policy says for each kind what happens to the episode."""

    SAMPLER = "sampler"
    """The engine or the way to it failed."""
    ENVIRONMENT = "environment"
    """The environment's own code raised."""
    TOOL = "tool"
    """A tool or its server failed for reasons of its own."""
    SANDBOX = "sandbox"
    """A sandbox failed for reasons of its own."""
    TASK = "task"
    """The task itself is unusable."""
    REWARD = "reward"
    """The reward function raised, was late, or returned no number."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one turn."""

    max_new_tokens: int = 256
    """At most this many tokens."""
    temperature: float = 1.0
    """0 is greedy. Log-probabilities are those of the distribution at this temperature."""
    top_p: float = 1.0
    """Nucleus; 1 keeps all."""
    top_k: int = -1
    """Keep the k most likely; -1 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end the turn and stay in the output; one may end inside a token, which stays whole."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the turn and stay in the output."""
    seed: int | None = None
    """Seed of this request's own generator, where the engine has one."""
    ignore_eos: bool = False
    """Sample on whatever token comes, ``stop_token_ids`` included: for measurements."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an engine is asked to continue."""

    token_ids: tuple[int, ...]
    """The whole context, exactly as earlier turns sampled it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine sampled in one turn."""

    token_ids: tuple[int, ...]
    """The sampled ids, the end token or stop string included."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled id at the sampling temperature."""
    finish_reason: FinishReason
    """Why it ended."""
    versions: tuple[tuple[int, int], ...]
    """``(start, policy version)``: from output token ``start`` on, this version sampled."""
    cached_tokens: int = 0
    """Prompt tokens that the engine's prefix cache already held."""
    request_id: str = ""
    """The request that sampled these tokens."""


@dataclass(slots=True)
class Turn:
    """One action of one agent with the observation that follows, kept for people to read."""

    action: str
    """What the policy said, as text."""
    observation: str
    """What it was answered, as text; empty after the last turn."""
    finish_reason: FinishReason
    """Why the generation ended."""
    reward: float = 0.0
    """Reward of this step."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as data: it travels with the rollout, between processes and to disk."""

    kind: FailureKind
    """Where it arose."""
    error: str
    """The exception's class."""
    message: str
    """Its text, with the value at fault."""


@dataclass(frozen=True, slots=True, order=True)
class RowKey:
    """Names one training row."""

    prompt_id: str
    """The task, and so the group."""
    rollout_id: str
    """The episode."""
    agent_id: str = "main"
    """Whose trajectory."""
    row: int = 0
    """Which root-to-leaf path of the trajectory."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One root-to-leaf path of a trajectory: what the learner trains on. ``T`` tokens, arrays all of that length."""

    key: RowKey
    """Names the row."""
    token_ids: NDArray[np.int32]
    """``[T]`` prompt, samples and observations in the order the policy saw them."""
    provenance: NDArray[np.uint8]
    """``[T]`` `Provenance` of each token."""
    mask: NDArray[np.uint8]
    """``[T]`` 1 where the token itself is trained on (it is predicted from those before it)."""
    mask_reason: NDArray[np.uint8]
    """``[T]`` `MaskReason`, ``NONE`` exactly where the mask is 1."""
    logprobs: NDArray[np.float32]
    """``[T]`` log-probability at the sampling temperature; 0 where the token was not sampled."""
    versions: NDArray[np.int32]
    """``[T]`` policy version that sampled the token; -1 elsewhere."""
    requests: NDArray[np.int32]
    """``[T]`` index into ``request_ids``; -1 where the token was not sampled."""
    request_ids: tuple[str, ...] = ()
    """The requests that sampled this row's tokens."""
    fork: ForkReason | None = None
    """Why it does not go on where another row ended; None in a trajectory's first row."""
    temperature: float = 1.0
    """The sampling temperature; ``logprobs`` are those of the distribution at it."""


@dataclass(slots=True, eq=False)
class Rollout:
    """All rows of one episode, with what it earned and why it ended."""

    prompt_id: str
    """The task's id; rollouts that share it form a group."""
    rollout_id: str
    """Unique in the run."""
    rows: list[Row]
    """Training rows; empty when the episode failed before anything was sampled."""
    reward: float
    """Sum of the episode's rewards."""
    stop_reason: StopReason
    """Why it ended."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's figures from the last ``info``."""
    turns: list[Turn] = field(default_factory=list)
    """For people to read."""
    prompt: str = ""
    """The first prompt as text, for people to read."""
    failure: Failure | None = None
    """What went wrong, when something did."""
    dropped: bool = False
    """The failure policy keeps it out of training."""
    seconds: float = 0.0
    """Wall time of the episode."""
    tool_seconds: float = 0.0
    """What of it was spent in calls of tools."""
    sampled_tokens: int = 0
    """Tokens that the policy sampled."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The task's metadata."""
    label: Any = None
    """The task's answer, JSON-able."""


def json_state(value: Any) -> Any:
    """Return ``value`` with NumPy scalars and tuples turned into what ``json`` writes; for ``Env.get_state``."""
    if isinstance(value, Mapping):
        return {str(key): json_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_state(item) for item in value]
    return value.item() if hasattr(value, "item") and not isinstance(value, str) else value
