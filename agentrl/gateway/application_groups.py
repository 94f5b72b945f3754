"""Groups of tasks that an application brings: which of its sessions are samples of the same task."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import orjson

from agentrl.core.errors import AgentProgramError
from agentrl.core.task import Task
from agentrl.core.types import Message
from agentrl.data.application_tasks import fill_placeholder
from agentrl.episode.state import EpisodeState
from agentrl.gateway.dialects.base import BadRequestError, message_of_pieces
from agentrl.gateway.dialects.chat_completions import ContentPart, read_content

TASK_BYTES = 2**20
"""Bytes of the largest task of an application, without its images: it is recorded with each rollout."""
IMAGE_BYTES = 16 * 2**20
"""Bytes of all images of a task: they are in memory as long as its group is remembered."""
_NAME_CHARACTERS = 500
_COMPLETE = 1024
"""Complete groups that are remembered for retries of their episodes."""
COMPLETE_IMAGE_BYTES = 256 * 2**20
"""Bytes of the images of their tasks; the oldest groups with more are forgotten."""


class _PromptMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart]


class TaskBody(msgspec.Struct):
    """``task`` of ``POST /v1/sessions``: a task that the application brings."""

    id: str
    prompt: str | list[_PromptMessage] = ""
    answer: Any = None
    metadata: dict[str, Any] = {}

    def check(self) -> None:
        """Check what the types do not say.

        Raises:
            BadRequestError: the id is empty or too long, or the task is too long, or has what is not recorded, or an image
                that is no ``data:`` URL or is in a message of the assistant.
        """
        if not 0 < len(self.id) <= _NAME_CHARACTERS:
            raise BadRequestError(f"task.id has {len(self.id)} characters; it must have 1 to {_NAME_CHARACTERS}")
        messages = self._messages()
        for message in messages:
            if message.role == "assistant" and message.images:
                raise BadRequestError(
                    "task.prompt: a message of the role assistant has an image; it may have texts alone"
                )
        image_bytes = sum(len(image.data) for message in messages for image in message.images)
        if image_bytes > IMAGE_BYTES:
            raise BadRequestError(f"task.prompt has images of {image_bytes} bytes; they may have {IMAGE_BYTES}", 413)
        try:
            size = len(orjson.dumps([self.answer, self.metadata, [message.content for message in messages]]))
        except (TypeError, ValueError) as error:
            raise BadRequestError(f"task has what no rollout can record: {error}") from None
        if size > TASK_BYTES:
            raise BadRequestError(f"task has {size} bytes; it may have {TASK_BYTES}", 413)

    def fill(self, placeholder: Task) -> Task:
        """Return the task in the place of a placeholder."""
        return fill_placeholder(placeholder, self.id, self._messages(), self.answer, self.metadata)

    def _messages(self) -> list[Message]:
        if isinstance(self.prompt, list):
            return [message_of_pieces(message.role, read_content(message.content)) for message in self.prompt]
        return [Message("user", self.prompt)] if self.prompt else []


@dataclass(slots=True, eq=False)
class TaskGroup:
    """The episodes of one placeholder: samples of the same task, once a session has brought it."""

    key: str
    """Key of the group in the run, such as ``3/0``."""
    source: str
    """Source of the task in a mixed run; else empty."""
    samples: int
    """``rollout.n_samples_per_prompt``."""
    task: Task | None = None
    """None until a session has brought it."""
    name: str = ""
    """The application's id of the task."""
    settled: set[str] = field(default_factory=set)
    """Ids of the episodes that were taken or have ended without a session."""

    @property
    def image_bytes(self) -> int:
        """Bytes of the images of its task."""
        messages = () if self.task is None else self.task.prompt
        return sum(len(image.data) for message in messages for image in message.images)


class TaskGroups:
    """The groups of the application's tasks, in a run."""

    def __init__(self) -> None:
        self._groups: dict[str, TaskGroup] = {}
        self._incomplete: dict[tuple[str, str], TaskGroup] = {}
        """Groups with a task whose episodes are not all settled, by source and the application's id."""
        self._complete: deque[str] = deque()
        """Keys of the groups whose episodes are all settled, the oldest first."""
        self._image_bytes = 0
        """Bytes of the images of their tasks."""

    def find(self, episode: EpisodeState, source: str, samples: int) -> TaskGroup:
        """Return the group of an episode, which a retry shares with the attempts before.

        Args:
            episode: whose ``rollout_id`` is such as ``3/0/1``.
            source: see `TaskGroup`.
            samples: see `TaskGroup`.

        Raises:
            AgentProgramError: it is a retry, and its task is forgotten.
        """
        key = episode.rollout_id.rpartition("/")[0]
        if key not in self._groups:
            if episode.attempt:
                raise AgentProgramError(
                    f"the task of {episode.rollout_id} is forgotten, after up to {_COMPLETE} others; it cannot be retried"
                )
            self._groups[key] = TaskGroup(key, source, samples)
        return self._groups[key]

    def incomplete(self, name: str, source: str | None) -> TaskGroup | None:
        """Return the group that has samples of a task left; None: there is none, and a session with it begins one.

        Args:
            name: the application's id.
            source: of a mixed run; None: any.
        """
        if source is not None:
            return self._incomplete.get((source, name))
        return next((group for group in self._incomplete.values() if group.name == name), None)

    def begin(self, group: TaskGroup, placeholder: Task, body: TaskBody) -> None:
        """Give a group the task of a session."""
        group.task, group.name = body.fill(placeholder), body.id
        self._incomplete[group.source, group.name] = group

    def settle(self, group: TaskGroup, rollout_id: str) -> None:
        """Record that an episode was taken, or has ended without a session."""
        if rollout_id in group.settled:
            return
        group.settled.add(rollout_id)
        if len(group.settled) < group.samples:
            return
        self._incomplete.pop((group.source, group.name), None)
        self._complete.append(group.key)
        self._image_bytes += group.image_bytes
        while len(self._complete) > _COMPLETE or (len(self._complete) > 1 and self._image_bytes > COMPLETE_IMAGE_BYTES):
            self._image_bytes -= self._groups.pop(self._complete.popleft()).image_bytes
