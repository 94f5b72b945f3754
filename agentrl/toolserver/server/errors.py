"""What a tool server does not do, and the status of HTTP that says so."""

from __future__ import annotations

from typing import ClassVar


class Refusal(Exception):
    """A request that the server does not do, and why."""

    status: ClassVar[int] = 400
    """The status of HTTP that says the same."""


class UnknownSession(Refusal):
    """There is no such session, as far as the server remembers."""

    status = 404


class SessionGone(Refusal):
    """The session was closed."""

    status = 410


class Conflict(Refusal):
    """The call's id belongs to another call of the session, or to one whose result is no longer kept."""

    status = 409


class Full(Refusal):
    """All sessions are taken and none became free in time."""

    status = 503


class Draining(Refusal):
    """The server is about to stop."""

    status = 503
