"""A server in this process: how many episodes have a session there, and what is read once."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from agentrl.adapters.base import Json
from agentrl.adapters.openenv.options import OpenEnvOptions
from agentrl.adapters.openenv.session import KEY, HttpSession, Session, WebSocketSession
from agentrl.clients.http import ServiceClient, UnusableReplyError

_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, OpenEnvServer]] = WeakKeyDictionary()


class OpenEnvServer:
    """A server, for all episodes of an event loop.

    Args:
        options: address and limits.
    """

    def __init__(self, options: OpenEnvOptions) -> None:
        self.client = ServiceClient(options, KEY)
        """For requests besides the sessions."""
        self._options = options
        self._sessions = asyncio.Semaphore(options.concurrency)
        self._schema: Json | None = None

    async def acquire(self) -> None:
        """Wait until fewer than ``env.options.concurrency`` episodes have a session."""
        await self._sessions.acquire()

    def release(self) -> None:
        """Let another episode have a session."""
        self._sessions.release()

    def session(self) -> Session:
        """Return a new session, which connects with its first request."""
        return HttpSession(self.client) if self._options.transport == "http" else WebSocketSession(self._options)

    async def action_schema(self) -> Json:
        """Return the JSON schema of the environment's actions; requested once.

        Raises:
            ServiceError: the server does not answer, or has no schema.
        """
        if self._schema is None:
            self._schema = await self.client.get("/schema", _read_action_schema)
        return self._schema


def _read_action_schema(reply: object) -> Json:
    schema = reply.get("action") if isinstance(reply, dict) else None
    if not isinstance(schema, dict):
        raise UnusableReplyError(f"a reply without a schema of actions: {reply!r:.200}")
    return schema


def open_server(options: OpenEnvOptions) -> OpenEnvServer:
    """Return the server of ``options`` in the running event loop; the same one for equal options."""
    servers = _servers.setdefault(asyncio.get_running_loop(), {})
    name = options.model_dump_json()
    if name not in servers:
        servers[name] = OpenEnvServer(options)
    return servers[name]
