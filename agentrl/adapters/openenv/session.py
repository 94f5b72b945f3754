"""Sessions at an OpenEnv server: an episode's WebSocket, or stateless HTTP requests."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

import aiohttp

from agentrl.adapters.base import Json
from agentrl.adapters.openenv.options import OpenEnvOptions
from agentrl.clients.http import ServiceClient, UnusableReplyError, is_loopback, read_token
from agentrl.core.errors import ServiceError, ServiceRefusedError

KEY = "env.options"
CAPACITY = "CAPACITY_REACHED"
VALIDATION = "VALIDATION_ERROR"
EXECUTION = "EXECUTION_ERROR"
_MESSAGE_BYTES = 100 * 2**20
_HEARTBEAT_S = 20.0
_CLOSE_S = 2.0


class LostSessionError(Exception):
    """The session cannot continue: no connection, no reply in time, or a reply that is not of the protocol."""


class RefusedError(Exception):
    """The server answered with an error.

    Args:
        code: such as ``EXECUTION_ERROR``.
        message: of the server.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class StepReply:
    """What the server returns of a reset or a step."""

    observation: Json
    """Its fields, without reward and done."""
    reward: float
    """0 where the server names none."""
    done: bool
    """Whether the episode is over."""
    metadata: Json
    """Metadata of the observation."""


class Session(Protocol):
    """One episode at a server."""

    async def reset(self, parameters: Json) -> StepReply:
        """Start the episode.

        Raises:
            RefusedError: the server answered with an error.
            LostSessionError: see there.
        """

    async def step(self, action: Json) -> StepReply:
        """Take an action; see `reset`."""

    async def close(self) -> None:
        """End the session. Never fails."""


class WebSocketSession:
    """A session over ``/ws``, which the server ends with the connection.

    Args:
        options: address and limits.
    """

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, parameters: Json) -> StepReply:
        """See `Session.reset`."""
        return read_reply(await self._request("reset", parameters))

    async def step(self, action: Json) -> StepReply:
        """See `Session.step`."""
        return read_reply(await self._request("step", action))

    async def close(self) -> None:
        """See `Session.close`."""
        http, socket, self._http, self._socket = self._http, self._socket, None, None
        if socket is not None:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    if not socket.closed:
                        await socket.send_str(json.dumps({"type": "close"}))
                    while not socket.closed:
                        await socket.receive()  # the server has ended the session when it closes the connection
            await socket.close()
        if http is not None:
            await http.close()

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        """Return the connection.

        Raises:
            LostSessionError: there is none.
        """
        options = self._options
        if self._socket is not None:
            return self._socket
        token = read_token(options, KEY)
        self._http = aiohttp.ClientSession(trust_env=not is_loopback(options.url))
        url = options.url.rstrip("/") + "/ws"
        try:
            async with asyncio.timeout(options.connect_timeout_s):
                self._socket = await self._http.ws_connect(
                    url,
                    headers=None if token is None else {"authorization": f"Bearer {token}"},
                    heartbeat=_HEARTBEAT_S,
                    max_msg_size=_MESSAGE_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                )
        except TimeoutError:
            raise LostSessionError(
                f"no connection within {KEY}.connect_timeout_s={options.connect_timeout_s:g}"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise LostSessionError(f"no connection ({error or type(error).__name__})") from None
        return self._socket

    async def _request(self, kind: str, content: Json) -> Json:
        socket = await self._connect()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                with suppress(
                    aiohttp.ClientError, OSError
                ):  # a server that is full says so and closes, perhaps before this
                    await socket.send_str(json.dumps({"type": kind, "data": content}, allow_nan=False))
                received = await socket.receive()
        except TimeoutError:
            raise LostSessionError(f"no reply within {KEY}.timeout_s={self._options.timeout_s:g}") from None
        if received.type is not aiohttp.WSMsgType.TEXT:
            detail = socket.exception() or f"closed with code {socket.close_code}"
            raise LostSessionError(f"the connection was lost ({detail})")
        return read_message(cast("str", received.data))


def read_message(text: str) -> Json:
    """Return the data of a message.

    Raises:
        RefusedError: it is an error.
        LostSessionError: it is no message of the protocol.
    """
    try:
        message: Any = json.loads(text)
        kind, content = message["type"], message["data"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise LostSessionError(f"a message that is not of the protocol: {text!r:.200}") from None
    if not isinstance(content, dict):
        raise LostSessionError(f"a message without data: {text!r:.200}")
    if kind == "error":
        faults = content.get("errors")
        message = f"{content.get('message', '')}{f': {_fault_lines(faults)}' if faults else ''}"
        raise RefusedError(str(content.get("code", "")), message)
    return content


def _fault_lines(faults: object) -> str:
    """Return the faults that pydantic names, each with its place."""
    if not isinstance(faults, list):
        return f"{faults!r:.300}"
    lines = []
    for fault in faults:
        location = ".".join(map(str, fault.get("loc", ()))) if isinstance(fault, dict) else ""
        lines.append(f"{location}: {fault.get('msg', '')}" if isinstance(fault, dict) else f"{fault!r:.100}")
    return "; ".join(lines)


def read_reply(content: Json) -> StepReply:
    """Return what a server reports about a step.

    Raises:
        LostSessionError: it is not what a step returns.
    """
    observation, reward, done = content.get("observation"), content.get("reward"), content.get("done", False)
    if not isinstance(observation, dict) or not isinstance(reward, int | float | None) or not isinstance(done, bool):
        raise LostSessionError(f"a reply that is no observation with reward and done: {content!r:.200}")
    metadata = content.get("metadata") or observation.get("metadata")
    fields = {name: value for name, value in observation.items() if name not in ("metadata", "reward", "done")}
    return StepReply(fields, float(reward or 0.0), done, metadata if isinstance(metadata, dict) else {})


class HttpSession:
    """Resets and steps over HTTP; the server gets the id and the seed of the episode with each.

    Args:
        client: of the server.
    """

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._parameters: Json = {}

    async def reset(self, parameters: Json) -> StepReply:
        """See `Session.reset`."""
        self._parameters = parameters
        return await self._post("/reset", parameters)

    async def step(self, action: Json) -> StepReply:
        """See `Session.step`."""
        return await self._post("/step", {**self._parameters, "action": action})

    async def close(self) -> None:
        """See `Session.close`."""

    async def _post(self, path: str, body: Json) -> StepReply:
        try:
            return await self._client.post(path, body, _read_http_reply)
        except ServiceRefusedError as error:
            if error.status == 422:
                raise RefusedError(VALIDATION, str(error)) from None
            raise LostSessionError(str(error)) from None
        except ServiceError as error:
            raise LostSessionError(str(error)) from None


def _read_http_reply(reply: object) -> StepReply:
    try:
        return read_reply(cast("Json", reply) if isinstance(reply, dict) else {})
    except LostSessionError as error:
        raise UnusableReplyError(str(error)) from None
