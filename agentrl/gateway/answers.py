"""Answers of a session that a client's retry gets again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.gateway.dialects.base import Reply

ANSWERS = 64
"""Answers that a session keeps for retries."""


Client = Callable[[], bool]
"""Returns whether the client of a request has closed the connection."""


@dataclass(slots=True, eq=False)
class Answer:
    """The turn that answers a request, in progress or finished."""

    digest: bytes
    """Digest of path and body."""
    key: str
    """The header ``Idempotency-Key``; empty without one."""
    task: asyncio.Task[Reply]
    """Returns the reply."""
    clients: list[Client] = field(default_factory=list)
    """Those that wait for it, or have waited until they closed the connection."""
    delivered: bool = False
    """Whether a client has got it."""

    @property
    def is_abandoned(self) -> bool:
        """Whether no client waits for it or has got it."""
        return not self.delivered and all(has_disconnected() for has_disconnected in self.clients)


class Answers:
    """The last answers of a session."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []

    def find(self, digest: bytes, key: str, retry: int | None) -> Answer | None:
        """Return the answer that a request repeats; None if it is a request for a separate turn.

        It repeats one if it has the same path and body, and either the same ``Idempotency-Key``, or a retry count above 0, or
        no client has got the first answer yet. With a retry count of 0 a client says that it is no retry: then only if no
        client waits for the first one.

        Args:
            digest: of path and body.
            key: the header ``Idempotency-Key``; empty without one.
            retry: the header ``x-stainless-retry-count``; None without one.
        """
        equal = [answer for answer in self._answers if answer.digest == digest]
        if not equal:
            return None
        if key:
            return next((answer for answer in equal if answer.key == key), None)
        if retry:
            return next((answer for answer in equal if answer.is_abandoned), equal[-1] if equal else None)
        pending = [answer for answer in equal if answer.is_abandoned or (retry is None and not answer.delivered)]
        return pending[0] if pending else None

    def add(self, answer: Answer) -> None:
        """Keep an answer; the oldest finished ones are dropped."""
        self._answers.append(answer)
        surplus = len(self._answers) - ANSWERS
        if surplus > 0:
            for old in [old for old in self._answers if old.task.done()][:surplus]:
                self._answers.remove(old)

    def drop(self, answer: Answer) -> None:
        """Forget an answer, which is an error: the request may be sent again."""
        if answer in self._answers:
            self._answers.remove(answer)
