"""State of an episode between two turns: everything needed to resume it, as JSON-able data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.core.chat_endpoint import Usage
from agentrl.core.images import Image, ImageSpan, PlacedImage
from agentrl.core.types import (
    ForkReason,
    Generation,
    Message,
    Turn,
    json_state,
    message_from_dict,
    message_to_dict,
)
from agentrl.episode.trajectory import Trajectory
from agentrl.obs.rollout_format import turn_from_dict, turn_to_dict


@dataclass(slots=True, eq=False)
class EpisodeCounters:
    """Counted over all conversations of an episode."""

    turns: int = 0
    """Turns of the policy, those in progress included."""
    call_ids: set[str] = field(default_factory=set)
    """Ids of all tool calls so far."""
    usage: Usage = field(default_factory=Usage)
    """Tokens of all requests to an endpoint so far."""


PROMPT_END = 16
"""Tokens of `TurnEnd.prompt_end`."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnEnd:
    """The end of a sampled turn, from which other conversations can continue. It copies nothing of the conversation."""

    message: Message
    """The policy's message."""
    generation: Generation
    """What was sampled, without log-probabilities, experts and sampling support."""
    prompt_tokens: int
    """Tokens before the turn."""
    prompt_end: tuple[int, ...]
    """The last of them, which show whether the prompt opened the reasoning."""
    tip: int
    """`Trajectory.tip` after the turn."""
    _messages: list[Message]
    _count: int

    @property
    def earlier_messages(self) -> list[Message]:
        """The conversation before the turn."""
        return self._messages[: self._count]


@dataclass(slots=True, eq=False)
class EpisodeState:
    """A conversation between two turns, with its branches; the state of the first conversation is the episode's.

    `to_dict` adds the environment's own state.
    """

    rollout_id: str
    """Unique in the run."""
    seed: int
    """Seeds the policy's samples."""
    attempt: int = 0
    """Failed attempts before this one."""
    reset_seed: int | None = None
    """Seeds the environment; if None, ``seed`` does."""
    trajectory: Trajectory = field(default_factory=Trajectory)
    """All tokens so far, each with its provenance."""
    prompt_ids: tuple[int, ...] = ()
    """The next turn's prompt; empty before the environment was reset."""
    images: tuple[PlacedImage, ...] = ()
    """Images of this prompt."""
    added: int | None = None
    """Tokens at the end of ``prompt_ids`` that were appended to the trajectory's; None if the prompt was rendered again."""
    fork: ForkReason | None = None
    """Why it was rendered again."""
    messages: list[Message] = field(default_factory=list)
    """The conversation, for templates that must be rendered again."""
    turns: list[Turn] = field(default_factory=list)
    """Turns of this conversation as text."""
    reward: float = 0.0
    """Sum so far."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the environment from the latest ``info``."""
    answer: str | None = None
    """The final answer from the latest ``info`` that names one; None: none does."""
    prompt: str = ""
    """The first prompt as text."""
    first_messages: tuple[Message, ...] = ()
    """The messages of the first prompt."""
    seconds: float = 0.0
    """Wall time used before the episode was last resumed."""
    counted_seconds: float = 0.0
    """The part of it that counts against ``rollout.max_seconds``; see `EpisodeClock`."""
    counters: EpisodeCounters = field(default_factory=EpisodeCounters)
    """Shared with all branches."""
    branches: list[EpisodeState] = field(default_factory=list)
    """Other conversations of the same rollout, such as subagents', in the order in which they were begun."""

    @property
    def env_seed(self) -> int:
        """Seed of the environment."""
        return self.seed if self.reset_seed is None else self.reset_seed

    @property
    def episode_id(self) -> str:
        """Id of this attempt at engines and tool servers; differs from earlier attempts, whose replies must not be reused."""
        return f"{self.rollout_id}~{self.attempt}" if self.attempt else self.rollout_id

    @property
    def name(self) -> str:
        """Name of the conversation; prefix of its request ids."""
        return "/".join((self.episode_id, *(f"branch-{number}" for number in self.trajectory.branch_name)))

    @property
    def all_turns(self) -> list[Turn]:
        """The turns of this conversation, then those of its branches."""
        return [*self.turns, *(turn for branch in self.branches for turn in branch.all_turns)]

    def branch(self, end: TurnEnd | None = None, fork: ForkReason = ForkReason.BRANCH) -> EpisodeState:
        """Return the state of another conversation of the rollout, which continues from the end of a turn; None: from here.

        Its rows fork for the reason ``fork``.
        """
        state = EpisodeState(self.rollout_id, self.seed, self.attempt, self.reset_seed, counters=self.counters)
        state.trajectory = self.trajectory.branch(None if end is None else end.tip, fork)
        if end is None:
            state.prompt_ids, state.images, state.added = self.prompt_ids, self.images, self.added
            state.fork = self.fork
            state.messages = list(self.messages)
        else:
            state.prompt_ids, state.added = state.trajectory.token_ids[: end.prompt_tokens], 0
            state.images = state.trajectory.placed_images(end.prompt_tokens)
            state.messages = end.earlier_messages
        state.prompt, state.first_messages = self.prompt, self.first_messages
        self.branches.append(state)
        return state

    def to_dict(self, env_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state as JSON-able data; ``env_state`` is the return value of ``Env.get_state``."""
        return {
            **self._conversation_to_dict(),
            "trajectory": self.trajectory.to_state(),
            "turns_begun": self.counters.turns,
            "call_ids": sorted(self.counters.call_ids),
            "env": json_state(env_state),
        }

    def _conversation_to_dict(self) -> dict[str, Any]:
        return {
            "rollout_id": self.rollout_id,
            "seed": self.seed,
            "attempt": self.attempt,
            "reset_seed": self.reset_seed,
            "prompt_ids": list(self.prompt_ids),
            "images": [[placed.span.start, placed.span.length, placed.image.data_url] for placed in self.images],
            "added": self.added,
            "fork": self.fork and self.fork.value,
            "messages": [message_to_dict(message) for message in self.messages],
            "turns": [turn_to_dict(turn) for turn in self.turns],
            "reward": self.reward,
            "metrics": dict(self.metrics),
            "answer": self.answer,
            "prompt": self.prompt,
            "first_messages": [message_to_dict(message) for message in self.first_messages],
            "seconds": self.seconds,
            "counted_seconds": self.counted_seconds,
            "branches": [branch._conversation_to_dict() for branch in self.branches],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> tuple[EpisodeState, dict[str, Any]]:
        """Return the states of the episode and of its environment from the return value of `to_dict`."""
        counters = EpisodeCounters(data["turns_begun"], set(data["call_ids"]))
        return cls._conversation_from_dict(data, Trajectory.from_state(data["trajectory"]), counters), dict(data["env"])

    @classmethod
    def _conversation_from_dict(
        cls, data: Mapping[str, Any], trajectory: Trajectory, counters: EpisodeCounters
    ) -> EpisodeState:
        names = (
            "rollout_id",
            "seed",
            "attempt",
            "reset_seed",
            "reward",
            "answer",
            "prompt",
            "seconds",
            "counted_seconds",
        )
        fields = {key: data[key] for key in names}
        branches = zip(data["branches"], trajectory.branches, strict=True)
        return cls(
            **fields,
            trajectory=trajectory,
            counters=counters,
            branches=[
                cls._conversation_from_dict(branch, its_trajectory, counters) for branch, its_trajectory in branches
            ],
            prompt_ids=tuple(data["prompt_ids"]),
            images=tuple(_placed_image(*placed) for placed in data.get("images", ())),
            added=data["added"],
            fork=ForkReason(data["fork"]) if data["fork"] else None,
            messages=[message_from_dict(message) for message in data["messages"]],
            first_messages=tuple(message_from_dict(message) for message in data["first_messages"]),
            turns=[turn_from_dict(turn) for turn in data["turns"]],
            metrics=dict(data["metrics"]),
        )


class SavedStates(Protocol):
    """Saves episodes between two turns, and has those of an earlier process."""

    def load(self, rollout_id: str, task_id: str) -> dict[str, Any] | None:
        """Return the saved state of an episode (`EpisodeState.to_dict`), or None if there is none.

        It is called when an episode begins.
        """

    def discard(self, rollout_id: str) -> None:
        """Remove the saved state of an episode that begins again."""

    def is_due(self, rollout_id: str) -> bool:
        """Return whether an episode is to be saved after its turn."""

    def save(self, rollout_id: str, task_id: str, state: Callable[[], dict[str, Any]]) -> None:
        """Save the state of an episode."""


def _placed_image(start: int, length: int, url: str) -> PlacedImage:
    image = Image.from_data_url(url)
    return PlacedImage(ImageSpan(start, length, image.digest), image)
