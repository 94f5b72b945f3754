"""Requests that a tool server refuses, each with its HTTP status.

::

    Refusal (400)
    ├── NeedsSession (400)
    ├── UnknownSession (404)
    ├── Conflict (409)
    ├── SessionGone (410)
    ├── ImageRefused (422)
    ├── Full (503)
    └── Draining (503)
"""

from __future__ import annotations

from typing import ClassVar


class Refusal(Exception):
    """A request that the server refuses, with the reason."""

    status: ClassVar[int] = 400
    """The HTTP status of the reply."""


class NeedsSession(Refusal):
    """A call of a tool with state, outside of a session."""


class UnknownSession(Refusal):
    """There is no such session, as far as the server remembers."""

    status = 404


class Conflict(Refusal):
    """The call's id belongs to another call of the session, or to one whose result is no longer kept."""

    status = 409


class SessionGone(Refusal):
    """The session was closed."""

    status = 410


class ImageRefused(Refusal):
    """The session may not have sandboxes from this image."""

    status = 422


class Full(Refusal):
    """The server has as many sessions as it may, and none ended in time."""

    status = 503


class Draining(Refusal):
    """The server is about to stop."""

    status = 503
