"""The session of one episode: an agent program's requests, answered by the policy and recorded as one rollout."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from agentrl.core.errors import ConversationError, EpisodeError
from agentrl.core.types import Failure, FinishReason, MaskReason, Message, Rollout, StopReason
from agentrl.episode.chat import Agent, Chat
from agentrl.gateway.answers import Answers
from agentrl.gateway.dialects.base import BadRequestError, ChatRequest, Finish, Ignored, Reply, assistant_message
from agentrl.gateway.joining import ConversationTree, JoinPoint, Root, shown_calls

_log = logging.getLogger(__name__)
_logged = set[tuple[str, str]]()
"""Fields without effect that were logged, with the reason."""
_SAMPLING = "the run's sampling parameters (sampler.*) hold"

_CHANGED = (
    "with other white space: the conversation continues in a new row (rollout/forks/context), in which the turn is read as it "
    "was sent, and not as it was sampled. Send turns back as they came"
)

LIMITS = {
    StopReason.MAX_TURNS: "The limit of turns of this episode (rollout.max_turns) is reached.",
    StopReason.MAX_TOKENS: "The limit of tokens of this conversation (rollout.max_tokens) is reached.",
    StopReason.MAX_TIME: "The time limit of this episode (rollout.max_seconds) is reached.",
    StopReason.ABORTED: "This episode is over.",
}
"""What an agent program reads in place of a turn."""


class SessionOverError(Exception):
    """A request to a session whose episode has ended or failed; the message is for the agent program."""


class EpisodeProgress:
    """What the sessions of one episode share."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[EpisodeError] = asyncio.get_running_loop().create_future()
        """What the infrastructure failed with; it ends the episode."""
        self._steps = itertools.count()

    def next_step(self) -> int:
        """Return the number of the turn that is requested now, of all agents, from 0."""
        return next(self._steps)

    def fail(self, error: EpisodeError) -> None:
        """Set what the infrastructure failed with, if it is the first failure."""
        if not self.failure.done():
            self.failure.set_result(error)


class Session(ABC):
    """The requests of one agent in one episode.

    Args:
        agent: of the episode, or the one that joined it.
        model: the agent's name for programs.
        progress: of the episode; its own if the agent is the only one.
    """

    def __init__(self, agent: Agent, model: str, progress: EpisodeProgress | None = None) -> None:
        self.agent = agent
        self.model = model
        self.progress = progress or EpisodeProgress()
        """What the sessions of the episode share."""
        self.reward = 0.0
        """Reward of the rollout."""
        self.has_reward = False
        """Whether `reward` was set."""
        self.metrics: dict[str, float] = {}
        """Metrics of the rollout."""
        self.answers = Answers()
        """What retries get."""
        self.stop_reason: StopReason | None = None
        """The limit that the last answer was about."""
        self._id = re.sub(r"[^\w-]", "-", agent.episode_id)
        self._turns = 0
        self._turn_tasks = set[asyncio.Task[Reply]]()
        self._turn_ended_at = time.monotonic()

    @property
    def failure(self) -> asyncio.Future[EpisodeError]:
        """What the infrastructure failed with; it ends the episode, for all its agents."""
        return self.progress.failure

    @property
    def turns(self) -> int:
        """Turns so far, those in progress included."""
        return self._turns

    @property
    @abstractmethod
    def has_turns(self) -> bool:
        """Whether a turn is finished, or a limit was answered."""

    @property
    @abstractmethod
    def turn_steps(self) -> Sequence[int]:
        """For each turn the step of the episode; see `agentrl.episode.seats.SeatPlayer`."""

    @property
    @abstractmethod
    def moves(self) -> Sequence[str]:
        """The turns as text, in the same order, which is that of `Rollout.turns`."""

    @abstractmethod
    def last_turn(self) -> tuple[int, str] | None:
        """Return the step and text of the turn that was requested last, without auxiliary ones; None without turns."""

    @property
    def is_sampling(self) -> bool:
        """Whether a turn is in progress."""
        return bool(self._turn_tasks)

    @property
    def idle_s(self) -> float:
        """Seconds since the last turn has ended; 0 while one is in progress."""
        return 0.0 if self._turn_tasks else time.monotonic() - self._turn_ended_at

    def ignored_fields(self, request: ChatRequest) -> tuple[Ignored, ...]:
        """Return what a request sets that has no effect, such as sampling parameters other than the run's; logged once a run."""
        if not request.sampling and not request.unsupported:
            return ()
        sampling = self.agent.sampling
        values: Mapping[str, object] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        sampled = (
            Ignored(name, value, _SAMPLING) for name, value in request.sampling.items() if values.get(name) != value
        )
        ignored = (*sampled, *request.unsupported)
        for field in ignored:
            if (field.name, field.why) not in _logged:
                _logged.add((field.name, field.why))
                _log.warning(
                    "the agent sets %s=%s, which has no effect: %s. This is logged once for each field",
                    field.name,
                    field.value,
                    field.why,
                )
        return ignored

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt; nothing is sampled.

        Raises:
            BadRequestError: the chat format refuses the conversation.
        """
        try:
            return self.agent.prompt_tokens(request.messages, request.tools)
        except ConversationError as error:
            raise BadRequestError(str(error)) from None

    def submit(self, request: ChatRequest) -> asyncio.Task[Reply]:
        """Begin to answer a request. The turn continues, and is recorded, even if no client waits for it.

        The task raises `BadRequestError` if the chat format refuses the conversation, and `SessionOverError`.
        """
        task = asyncio.create_task(self._answer(request))
        self._turn_tasks.add(task)
        task.add_done_callback(self._on_turn_end)
        return task

    def _on_turn_end(self, task: asyncio.Task[Reply]) -> None:
        self._turn_tasks.discard(task)
        self._turn_ended_at = time.monotonic()

    @abstractmethod
    async def _answer(self, request: ChatRequest) -> Reply:
        """Answer a request."""

    def _check_open(self) -> None:
        """Check that the episode continues.

        Raises:
            SessionOverError: it has failed.
        """
        if self.failure.done():
            raise SessionOverError(f"this episode has failed: {self.failure.result()}")

    def _new_reply(self, request: ChatRequest) -> Reply:
        """Return the empty reply of a turn that begins now."""
        reply = Reply(self._turns, self._id, int(time.time()), request.model or self.model)
        self._turns += 1
        return reply

    def _fail(self, error: EpisodeError) -> SessionOverError:
        """Record a failure of the infrastructure; return what the agent program gets."""
        self.progress.fail(error)
        return SessionOverError(f"this episode has failed: {error}")

    async def close(self) -> None:
        """Abort the turns in progress."""
        tasks = list(self._turn_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True, eq=False)
class _TurnNote:
    """What is added to a turn when its rollout is made."""

    chat: Chat
    number: int
    """Number of the turn in its chat."""
    reward: float
    observation: str


class PolicySession(Session):
    """An agent that the policy plays: its turns are recorded as one rollout."""

    def __init__(self, agent: Agent, model: str, progress: EpisodeProgress | None = None) -> None:
        super().__init__(agent, model, progress)
        self._tree = ConversationTree()
        self._steps: dict[Chat, list[tuple[int, str]]] = {}
        self._notes: list[_TurnNote] = []

    @property
    @override
    def has_turns(self) -> bool:
        return self.stop_reason is not None or self._tree.has_turns

    @override
    async def _answer(self, request: ChatRequest) -> Reply:
        self._check_open()
        history = self._tree.history(request.messages, request.tools)
        point = self._tree.join(history, request.max_tokens)
        if point.changed:
            _warn_of_changed(point.changed[0])
        root, chat = self._open_chat(point, request)
        reply, step = self._new_reply(request), self.progress.next_step()
        try:
            message = await chat.sample(stop=request.stop, max_new_tokens=request.max_tokens)
        except ConversationError as error:
            if chat in self.agent.chats:
                self.agent.chats.remove(chat)
                self._tree.roots.remove(root)
            raise BadRequestError(str(error)) from None
        except EpisodeError as error:
            raise self._fail(error) from error
        self.stop_reason = chat.stop_reason
        if message is None:
            assert chat.stop_reason is not None, "sample sets it when it returns None"
            return replace(reply, text=LIMITS[chat.stop_reason])
        self._steps.setdefault(chat, []).append((step, message.content))
        reply = self._show(chat, message, reply, request)
        self._tree.add(point, root, chat, assistant_message(reply.text, reply.reasoning, reply.calls))
        return reply

    def _open_chat(self, point: JoinPoint, request: ChatRequest) -> tuple[Root, Chat]:
        """Return the chat that samples the turn of a request, and the conversation that it belongs to."""
        node, is_probe = point.node, point.mask is MaskReason.AUXILIARY
        if node is None:
            root = self._tree.begin(point, request.tools)
            if not self.agent.chats:
                chat = self.agent.chat(point.messages, tools=request.tools)
            else:
                chat = self.agent.chats[0].branch(point.messages, tools=request.tools, fork=point.fork)
            root.add(chat)
            return root, chat
        if node.is_continued or is_probe:
            chat = node.chat.branch(end=node.end, fork=point.fork)
            node.root.add(chat)
        else:
            chat, node.is_continued = node.chat, True
        if is_probe:
            chat.mask(MaskReason.AUXILIARY)
        chat.add(*point.messages)
        return node.root, chat

    def _show(self, chat: Chat, message: Message, reply: Reply, request: ChatRequest) -> Reply:
        """Return the reply that ``reply`` begins, with the turn that a chat has sampled."""
        end = chat.last_turn
        assert end is not None, "it has sampled"
        reasoning, text = self.agent.split_turn(end)
        stops = [stop for stop in request.stop if stop in text]
        stop = min(stops, key=text.index) if stops else None
        calls = shown_calls(message.tool_calls, reply.turn)
        finish: Finish = "stop" if stop is None else "stop_sequence"
        if end.generation.finish_reason is FinishReason.LENGTH:
            finish = "length"
        return Reply(
            reply.turn,
            reply.session,
            reply.created,
            reply.model,
            reasoning,
            text if stop is None else text[: text.index(stop)],
            calls,
            "tool_calls" if calls else finish,
            stop,
            prompt_tokens=end.prompt_tokens,
            completion_tokens=len(end.generation.token_ids),
            cached_tokens=end.generation.cached_tokens,
        )

    def annotate_last_turn(self, *, reward: float = 0.0, observation: str = "") -> None:
        """Add to the turn that was requested last, without auxiliary ones; without turns nothing is added.

        Args:
            reward: of the turn. A session with notes has the rewards of its turns from them alone.
            observation: for display, what followed if the program requests no turn after it.
        """
        self._tree.mask_auxiliary()
        chats = [chat for chat in self._steps if chat.mask_reason is not MaskReason.AUXILIARY]
        if chats:
            chat = max(chats, key=lambda chat: self._steps[chat][-1])
            self._notes.append(_TurnNote(chat, len(self._steps[chat]) - 1, reward, observation))

    def rollout(self, failure: Failure | None = None) -> Rollout:
        """Return the agent's turns as a rollout, once the program has ended; an empty one if it has none.

        Args:
            failure: what ended the episode.
        """
        self._tree.mask_auxiliary()
        if failure is None and self.agent.chats:
            reason = self.stop_reason or StopReason.TERMINATED
            rollout = self.agent.chats[0].rollout(self.reward, metrics=self.metrics, stop_reason=reason)
        else:
            reason = StopReason.FAILED if failure else StopReason.TERMINATED
            (rollout,) = self.agent.unfinished_rollouts(reason, failure)
            rollout.reward, rollout.metrics = self.reward, self.metrics
        if self._notes:
            self._apply_notes(rollout)
        return rollout

    def _apply_notes(self, rollout: Rollout) -> None:
        chats = [chat for first in self.agent.chats for chat in first.all_chats()]
        numbers = ((chat, number) for chat in chats for number in range(len(self._steps.get(chat, ()))))
        turns = dict(zip(numbers, rollout.turns, strict=True))
        for turn in rollout.turns:
            turn.reward = 0.0
        for note in self._notes:
            turn = turns[note.chat, note.number]
            turn.reward += note.reward
            turn.observation = turn.observation or note.observation

    @property
    @override
    def turn_steps(self) -> list[int]:
        return [step for step, _ in self._ordered_turns()]

    @property
    @override
    def moves(self) -> list[str]:
        return [text for _, text in self._ordered_turns()]

    @override
    def last_turn(self) -> tuple[int, str] | None:
        self._tree.mask_auxiliary()
        chats = (chat for chat in self._steps if chat.mask_reason is not MaskReason.AUXILIARY)
        return max((turn for chat in chats for turn in self._steps[chat]), default=None)

    def _ordered_turns(self) -> Iterator[tuple[int, str]]:
        for first in self.agent.chats:
            for chat in first.all_chats():
                yield from self._steps.get(chat, ())


def _warn_of_changed(message: Message) -> None:
    """Warn once that a turn was sent back with other white space."""
    if ("messages", _CHANGED) not in _logged:
        _logged.add(("messages", _CHANGED))
        text = message.content or [call.arguments for call in message.tool_calls]
        _log.warning(
            "the agent sends a turn of the policy back %s. This is logged once. The turn: %.200r", _CHANGED, text
        )
