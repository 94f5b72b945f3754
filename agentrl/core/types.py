"""Data types: messages, tool calls, turns, episodes and their stop reasons.

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

from agentrl.core.experts import Experts
from agentrl.core.images import IMAGE_MARK, Image, ImageSource, ImageSpan, PlacedImage, load_image
from agentrl.core.sampling_support import SamplingSupport

Role = Literal["system", "user", "assistant", "tool"]
"""Author of a message, as chat templates name it."""

THINK, THINK_END = "<think>", "</think>"
"""Around the reasoning in the text of a turn."""

Info = dict[str, Any]
"""What an environment returns next to its observation. The key ``metrics`` holds metrics of the episode
(a ``dict[str, float]``), logged as ``rollout/<key>`` in training and ``eval/<key>`` in evaluation. ``final_answer`` holds the
final answer (`ANSWER`)."""


class ToolStatus(StrEnum):
    """How a tool call ended. For every status but ``OK`` the policy receives a text that names the fault."""

    OK = "ok"
    """The tool ran; ``content`` is its answer."""
    ERROR = "error"
    """The tool ran and failed in a way the policy may see (a traceback, a bad argument)."""
    INVALID = "invalid"
    """The call did not fit the tool's schema, or named no known tool; nothing ran."""
    TIMEOUT = "timeout"
    """The tool exceeded its timeout."""
    UNAVAILABLE = "unavailable"
    """The server was unreachable or failed: an infrastructure failure, not caused by the policy."""
    OUT_OF_MEMORY = "out_of_memory"
    """Code exceeded the memory limit of its sandbox."""
    OUTPUT_CUT = "output_cut"
    """Code was ended because it exceeded the output limit; ``content`` holds the beginning."""
    KILLED = "killed"
    """A signal ended the code, such as a segmentation fault."""
    SANDBOX_FAILURE = "sandbox_failure"
    """The sandbox failed: an infrastructure failure, not caused by the policy. Clients raise `SandboxFailure`."""


class CallStatus(StrEnum):
    """Whether the policy's attempt to call a tool is a valid call; determined before anything runs."""

    OK = "ok"
    """It names a tool and fits its schema."""
    INVALID_JSON = "invalid_json"
    """It cannot be parsed in the policy's tool call format: mostly broken JSON."""
    UNKNOWN_TOOL = "unknown_tool"
    """It names an unknown tool."""
    SCHEMA_VIOLATION = "schema_violation"
    """Its arguments do not fit the tool's schema."""
    TRUNCATED = "truncated"
    """The turn ended within it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One request to run a tool. Example: ``ToolCall("c1", "search", {"query": "Tamo Rilek"})``."""

    id: str
    """Unique in the episode; a retry sends the same id, so a server may return its first answer. Empty if a renderer
    parsed the call and its format has no ids."""
    name: str
    """The tool's registered name; empty if it could not be parsed."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able arguments."""
    status: CallStatus = CallStatus.OK
    """Only ``OK`` calls run; all others are answered with ``fault``."""
    fault: str = ""
    """What is wrong, as a text for the policy."""

    @property
    def is_readable(self) -> bool:
        """Whether it could be parsed; it may still name no tool, or not fit the tool's schema."""
        return self.status not in (CallStatus.INVALID_JSON, CallStatus.TRUNCATED)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer of a tool. Example: ``ToolResult("c1", ToolStatus.OK, "Paris is in France.")``."""

    call_id: str
    """The ``ToolCall.id`` this answers."""
    status: ToolStatus
    """How the call ended."""
    content: str
    """Text for the policy."""
    data: Any = None
    """The same answer as JSON-able data, for environments that format it themselves."""
    images: tuple[Image, ...] = ()
    """Images at the marks of ``content`` (`IMAGE_MARK`), in their order."""

    def __post_init__(self) -> None:
        """Check the number of images."""
        _require_marks(self.content, self.images)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Returned by ``Env.step`` in place of messages: the runner runs them and steps again with their ``ToolResults``."""

    calls: tuple[ToolCall, ...]
    """The calls, in the order of their results."""


@dataclass(frozen=True, slots=True)
class ToolResults:
    """Given to ``Env.step`` after it returned ``ToolCalls``: one result a call, in the same order."""

    results: tuple[ToolResult, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. Example: ``Message("user", "What is the capital of France?")``."""

    role: Role
    """Its author."""
    content: str
    """The text."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that an assistant message makes."""
    tool_call_id: str | None = None
    """In a tool message, the call it answers."""
    inline: bool = False
    """The text continues the policy's own unfinished turn, as protocols such as Search-R1 need it:
    it is appended as it is, without the chat template's turn markers."""
    token_ids: tuple[int, ...] = ()
    """The ids that ``content`` was decoded from, if the policy sampled it; without the token that ended the turn."""
    images: tuple[Image, ...] = ()
    """Images at the marks of ``content`` (`IMAGE_MARK`), in their order."""

    def __post_init__(self) -> None:
        """Check the number of images."""
        _require_marks(self.content, self.images)


def _require_marks(content: str, images: tuple[Image, ...]) -> None:
    """Check that the text has a mark for each image.

    Raises:
        ValueError: it has more or fewer.
    """
    if images and (marks := content.count(IMAGE_MARK)) != len(images):
        raise ValueError(f"content has {marks} image marks (U+FFFC) for {len(images)} images: {content!r:.100}")


def message_with_images(role: Role, *parts: str | ImageSource) -> Message:
    """Return a message of texts and images in the order given, such as ``message_with_images("user", "Count:", picture)``.

    Args:
        role: its author.
        parts: a str is text; all else is an image, as `load_image` accepts it. A path is a `pathlib.Path`, not a str.

    Raises:
        ValueError: a text contains `IMAGE_MARK`, or an image cannot be read.
    """
    images = tuple(load_image(part) for part in parts if not isinstance(part, str))
    texts = [part if isinstance(part, str) else IMAGE_MARK for part in parts]
    if images and any(IMAGE_MARK in part for part in parts if isinstance(part, str)):
        raise ValueError(f"a text next to images contains U+FFFC, which stands for an image: {texts!r:.100}")
    return Message(role, "".join(texts), images=images)


class ForkReason(StrEnum):
    """Why a row does not continue the previous row of its trajectory."""

    THINKING = "thinking"
    """The chat format removes earlier reasoning (``render.keep_thinking=true`` keeps it)."""
    TEMPLATE = "template"
    """The chat template changes earlier turns, or cannot be shown to keep them."""
    END_TOKEN = "end_token"
    """The policy ended its turn with a token that differs from the chat format's."""
    CONTEXT = "context"
    """The conversation was rewritten, such as by a summary."""
    BRANCH = "branch"
    """Another conversation of the same episode, such as a subagent's."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A renderer's result if new messages cannot be appended: the caller renders the whole conversation and forks."""

    reason: ForkReason
    """Reason for the fork."""
    detail: str = ""
    """The reason in words, with the value at fault."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Returned by ``Env.step`` in place of added messages: the policy continues from these alone, such as a summary.

    What it sampled before stays in the rollout, in separate rows.
    """

    messages: tuple[Message, ...]
    """The whole conversation from now on; the first is not ``inline``, unless it is a raw prompt."""

    def __post_init__(self) -> None:
        """Check that there is at least one message, and nothing else."""
        if not self.messages or not all(isinstance(message, Message) for message in self.messages):
            raise ValueError(f"Rewrite takes a tuple of one or more Messages, not {self.messages!r:.100}")


Observation = tuple[Message, ...] | ToolCalls | Rewrite
"""What an environment returns: the messages *added* since the policy's last turn, calls to run first, or another
conversation to continue from."""

Action = Message | ToolResults
"""What an environment receives: the policy's message, or the results of the calls that it returned."""


class StopReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"
    """The environment ended it (Gymnasium's ``terminated``)."""
    TRUNCATED = "truncated"
    """The environment truncated it (Gymnasium's ``truncated``)."""
    MAX_TURNS = "max_turns"
    """The policy used all turns of ``rollout.max_turns``."""
    MAX_TOKENS = "max_tokens"
    """The next turn would not fit ``rollout.max_tokens``, or the observation filled it."""
    MAX_TIME = "max_time"
    """Environment and tools took longer than ``rollout.max_seconds``."""
    ABORTED = "aborted"
    """The run was stopped or no longer needed the episode."""
    FAILED = "failed"
    """An error ended it: ``Rollout.failure``. The failure policy decides what follows."""


class FinishReason(StrEnum):
    """Why one generation ended."""

    STOP = "stop"
    """A stop string or the end token was sampled; it is part of the output."""
    LENGTH = "length"
    """``max_new_tokens`` were sampled."""
    ABORT = "abort"
    """The request was aborted; the tokens so far are kept."""


class Provenance(IntEnum):
    """Origin of a token."""

    OBSERVED = 0
    """The prompt, an observation, or a turn boundary of the template."""
    SAMPLED = 1
    """An engine sampled it: id, log-probability, request and policy version came with it."""
    DEMONSTRATED = 2
    """A scripted expert, or the assistant of a chat, wrote it; supervised fine-tuning only."""


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
    AUXILIARY = 4
    """It answers a request of an agent program that is no step of its work, such as one for a title."""
    AMBIGUOUS = 5
    """It is unknown which of several equal turns an agent program continued."""
    CONVERTED = 6
    """A sample conversion of the user (``batch.convert``) has taken it out."""


class FailureKind(StrEnum):
    """Origin of a failure. The run's failure policy has a rule for each."""

    SAMPLER = "sampler"
    """The engine failed, or the connection to it."""
    ENVIRONMENT = "environment"
    """The environment's own code raised."""
    TOOL = "tool"
    """A tool or its server failed, not caused by its input."""
    SANDBOX = "sandbox"
    """A sandbox failed, not caused by the code in it."""
    TASK = "task"
    """The task itself is unusable, or its conversation cannot be written in the chat format."""
    AGENT = "agent"
    """The agent program (``rollout.agent``) failed, did not end, or sent no request."""
    RUNNER = "runner"
    """The runner process of the episode ended, such as by a crash in an environment's C code."""
    REWARD = "reward"
    """The reward function raised, timed out, or returned no number."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one turn."""

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
    """Seed of the request's own generator, if the engine supports it."""
    ignore_eos: bool = False
    """Continue after any token, ``stop_token_ids`` included: for measurements."""
    experts_from: int | None = None
    """The first token of the prompt whose experts the engine returns; None: it returns none."""
    support: Literal["ids", "logprobs"] | None = None
    """What the engine returns of the tokens that ``top_k`` and ``top_p`` leave: their ids, or also their log-probabilities. The
    log-probabilities of sampled tokens are then those of this distribution."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Input of an engine."""

    token_ids: tuple[int, ...]
    """The whole context, exactly as earlier turns sampled it; an image's tokens are there in full, once."""
    images: tuple[PlacedImage, ...] = ()
    """Its images, in the order of their tokens."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The output of an engine for one turn."""

    token_ids: tuple[int, ...]
    """The sampled ids, the end token or stop string included."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled id at the sampling temperature; with ``support`` among its ids."""
    finish_reason: FinishReason
    """Why it ended."""
    versions: tuple[tuple[int, int], ...]
    """``(start, policy version)``: from output token ``start`` on, this version sampled."""
    cached_tokens: int = 0
    """Prompt tokens that the engine's prefix cache already held."""
    request_id: str = ""
    """The request that sampled these tokens."""
    verified: int = 0
    """Forward passes that verified drafts; 0 without speculative decoding."""
    experts: Experts | None = None
    """``[n, layers, K]`` experts of the tokens of prompt and output from ``experts_from`` on, except the last, which the engine
    did not compute."""
    experts_from: int = 0
    """The first token of ``experts``."""
    support: SamplingSupport | None = None
    """What each sampled id was sampled from; None if it was not requested."""


@dataclass(slots=True)
class ToolUse:
    """Calls of one tool in an episode, such as ``ToolUse(calls=3, failed=1, seconds=0.8)``."""

    calls: int = 0
    failed: int = 0
    """Calls that ended with another status than ``OK`` or ``INVALID``: the tool ran, or should have, and failed."""
    seconds: float = 0.0
    """Sum of their wall times."""


@dataclass(slots=True)
class Turn:
    """One action of one agent with the observation that follows, as text for display."""

    action: str
    """The policy's message, as text."""
    observation: str
    """The observation that followed, as text; empty after the last turn."""
    finish_reason: FinishReason
    """Why the generation ended."""
    reward: float = 0.0
    """Reward of this step."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as data, sent with the rollout between processes and written to disk."""

    kind: FailureKind
    """Its origin."""
    error: str
    """The exception's class."""
    message: str
    """Its text, with the value at fault."""


@dataclass(frozen=True, slots=True, order=True)
class RowKey:
    """Key of a training row."""

    prompt_id: str
    """The task, and so the group."""
    rollout_id: str
    """The episode."""
    agent_id: str = "main"
    """The agent of the trajectory."""
    row: int = 0
    """Index of the root-to-leaf path in the trajectory."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One root-to-leaf path of a trajectory: what the learner trains on. ``T`` tokens, arrays all of that length."""

    key: RowKey
    """Key of the row."""
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
    turns: tuple[int, ...] = ()
    """For each of these requests, the index of its turn in ``Rollout.turns``; empty: turns have the order of the rows."""
    fork: ForkReason | None = None
    """Why it does not continue the previous row; None in a trajectory's first row."""
    temperature: float = 1.0
    """The sampling temperature; ``logprobs`` are those of the distribution at this temperature."""
    experts: Experts | None = None
    """``[T, layers, K]`` experts that the engine's routers chose for each token; the highest number of the dtype where they are
    not known. None: of no token. Not recorded in files."""
    images: tuple[ImageSpan, ...] = ()
    """Tokens that stand for images, in their order. All are observed."""
    support: SamplingSupport | None = None
    """The ids that each token was sampled from, if ``sampler.renormalise`` is ``engine``; ``logprobs`` are those of this
    distribution. None: of no token."""


@dataclass(frozen=True, slots=True)
class SeatRecord:
    """Who played an agent of a multi-agent episode, and when."""

    agent: str
    """Its name in the environment."""
    role: str
    """Its role."""
    player: str
    """``policy``, or the name of a snapshot, of a scripted player or of a model."""
    trained: bool
    """Whether it has a rollout to train on."""
    steps: tuple[int, ...]
    """For each of its turns the environment's step, from 0."""
    moves: tuple[str, ...] = ()
    """Its turns as text, if it is not trained."""


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One of several rewards of a rollout. Example: ``RewardTerm(0.5, weight=2.0)``."""

    value: float | None
    """The reward without its weight; None: the function that computes it has failed."""
    weight: float = 1.0
    """Its weight in the sum."""

    @property
    def weighted(self) -> float:
        """Its contribution to the sum."""
        return self.weight * (self.value or 0.0)


ANSWER = "agent_answer"
"""Key of `Rollout.metadata` with the final answer, of an agent program or as an environment names it; without it, it is the last
turn."""


@dataclass(frozen=True, slots=True)
class EndpointRecord:
    """The conversation of a model at an endpoint. Its tokens are not known, so it cannot be trained on."""

    model: str
    """Name of the model."""
    messages: tuple[Mapping[str, Any], ...]
    """The conversation in the format of OpenAI's chat completions, its last turn included."""
    tools: tuple[Mapping[str, Any], ...]
    """The tools that it offered, in that format."""
    prompt_tokens: int
    """Tokens of the prompts of all requests, as the endpoint counts them."""


@dataclass(slots=True, eq=False)
class Rollout:
    """All rows of one episode, with its reward and stop reason."""

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
    """The environment's metrics from the last ``info``, and those of the reward."""
    rewards: dict[str, RewardTerm] = field(default_factory=dict)
    """The rewards of ``reward.functions`` by name, whose weighted sum ``reward`` is; empty if there is a single one."""
    turns: list[Turn] = field(default_factory=list)
    """The turns as text, for display."""
    prompt: str = ""
    """The first prompt as text, for display."""
    failure: Failure | None = None
    """The error of a failed episode."""
    dropped: bool = False
    """The failure policy or a filter on groups keeps it out of training."""
    graded: bool = True
    """The reward is final. False until the grader, if there is one, has set it; `check_graded` refuses such rollouts."""
    filtered: str = ""
    """The filter on groups that dropped it (``rollout.filter_groups``); empty if none did, or the failure policy had."""
    seconds: float = 0.0
    """Wall time of the episode."""
    tool_seconds: float = 0.0
    """Part of it that was spent in tool calls."""
    tool_uses: dict[str, ToolUse] = field(default_factory=dict)
    """Tool calls of the episode, by the tool's name; calls of unknown tools are left out. If an episode has
    several rollouts, the first has them."""
    sampled_tokens: int = 0
    """Tokens that the policy sampled; those of a model at an endpoint as the endpoint counts them."""
    endpoint: EndpointRecord | None = None
    """The conversation, if a model at an endpoint played; ``rows`` is empty then."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The task's metadata."""
    label: Any = None
    """The task's answer, JSON-able."""
    messages: tuple[Message, ...] = ()
    """The messages of the first prompt. Not recorded in files."""
    tools: tuple[Any, ...] = ()
    """The `agentrl.core.tool.Tool`s that it offers. Not recorded in files."""
    agent: str = "main"
    """The agent's name in the environment; also the ``agent_id`` of its rows."""
    role: str = ""
    """The agent's role in a multi-agent environment; empty in an environment of one agent."""
    seat: int = 0
    """The agent's place in the order of the environment's agents, from 0."""
    policy: str = "main"
    """Name of the policy that played, in a run with several."""
    opponent: str = ""
    """Class of the other players in self-play: ``mirror``, ``past``, ``fixed:NAME`` or ``endpoint:NAME``; empty if there are
    none."""
    episode: str = ""
    """Id of a multi-agent episode, which its agents' rollouts share; empty if the rollout is the whole episode."""
    seat_rewards: tuple[float, ...] = ()
    """Rewards of all agents of a multi-agent episode, by seat."""
    seats: tuple[SeatRecord, ...] = ()
    """Who played the agents of a multi-agent episode, and when, by seat."""
    images: Mapping[str, Image] = field(default_factory=dict)
    """Images of the rows by digest."""
    record: bytes = field(default=b"", repr=False)
    """The rollout as its runner or the journal has encoded it (`agentrl.obs.records`), until it is in all files, or changes."""


def json_state(value: Any) -> Any:
    """Return ``value`` with NumPy scalars and tuples turned into JSON-able ones; for ``Env.get_state``."""
    if isinstance(value, Mapping):
        return {str(key): json_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_state(item) for item in value]
    return value.item() if hasattr(value, "item") and not isinstance(value, str) else value


def message_to_dict(message: Message) -> dict[str, Any]:
    """Return a message as JSON-able data."""
    calls = [
        {
            "id": call.id,
            "name": call.name,
            "arguments": json_state(call.arguments),
            "status": call.status.value,
            "fault": call.fault,
        }
        for call in message.tool_calls
    ]
    data = {
        "role": message.role,
        "content": message.content,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "inline": message.inline,
        "token_ids": list(message.token_ids),
    }
    return data | ({"images": [image.data_url for image in message.images]} if message.images else {})


def message_from_dict(data: Mapping[str, Any]) -> Message:
    """Return the message from the return value of `message_to_dict`."""
    calls = tuple(
        ToolCall(call["id"], call["name"], call["arguments"], CallStatus(call["status"]), call["fault"])
        for call in data["tool_calls"]
    )
    images = tuple(map(Image.from_data_url, data.get("images", ())))
    token_ids = tuple(data["token_ids"])
    return Message(data["role"], data["content"], calls, data["tool_call_id"], data["inline"], token_ids, images)
