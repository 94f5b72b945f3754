"""Control requests to one engine, with typed errors, and the load that it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt

from agentrl.core.errors import EngineError
from agentrl.inference.client.http import CONNECTION_ERRORS, EngineHttp, ErrorReply, read_json
from agentrl.obs.waiting import waiting


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests and KV cache of an engine."""

    running: int
    """Requests that it computes."""
    waiting: int
    """Requests that it has queued."""
    used_share: float
    """Tokens of the running requests, as a share of the KV cache."""
    retracted: int = 0
    """Requests whose cache it has taken back, to be computed again."""


class _Queues(BaseModel):
    retracted: NonNegativeInt = 0


class _Load(BaseModel):
    """A data-parallel rank of SGLang."""

    num_running_reqs: NonNegativeInt
    num_waiting_reqs: NonNegativeInt
    token_usage: NonNegativeFloat
    queues: _Queues | None = None


class _Loads(BaseModel):
    loads: list[_Load]


def read_load(reply: Any) -> EngineLoad:
    """Return the load in a reply of ``/v1/loads``: requests of all ranks, and the cache of the fullest.

    Raises:
        ValueError: it is not such a reply.
    """
    loads = _Loads.model_validate(reply).loads
    return EngineLoad(
        running=sum(load.num_running_reqs for load in loads),
        waiting=sum(load.num_waiting_reqs for load in loads),
        used_share=max((load.token_usage for load in loads), default=0.0),
        retracted=sum(load.queues.retracted for load in loads if load.queues is not None),
    )


class ControlRefused(EngineError):
    """The engine replied to a control request with an error."""

    def __init__(self, url: str, path: str, message: object, status: int) -> None:
        """Name the engine, the request and the engine's message."""
        super().__init__(f"the engine at {url} refuses {path}: {message}")
        self.status = status


class ControlEndpoint:
    """Control requests to one engine."""

    def __init__(self, http: EngineHttp) -> None:
        """Send requests through ``http``."""
        self._http = http
        self.url = http.url

    async def call(self, path: str, body: dict[str, Any] | None, *, once: bool = False) -> Any:
        """Send a control request and return its reply.

        Args:
            path: endpoint.
            body: JSON-able; None sends a GET request.
            once: never send it a second time, even if the connection fails.

        Raises:
            ControlRefused: with the engine's message.
            EngineError: no reply.
        """
        try:
            with waiting("engine", self.url, path):
                method = "GET" if body is None else "POST"
                async with self._http.request(method, path, body, once=once) as response:
                    reply = await read_json(response)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"the engine at {self.url} answers {path} with what is not JSON: {error}") from error
        except ErrorReply as error:
            raise ControlRefused(self.url, path, error.message, error.status) from error
        except CONNECTION_ERRORS as error:
            raise EngineError(
                f"the engine at {self.url} does not answer {path}: {type(error).__name__} {error}"
            ) from error
        if isinstance(reply, dict) and reply.get("success") is False:
            raise ControlRefused(self.url, path, reply.get("message"), 200)
        return reply

    async def load(self) -> EngineLoad | None:
        """Return the load that the engine reports at ``/v1/loads``, or None if it does not answer.

        Raises:
            EngineError: it reports none.
        """
        try:
            # Without `waiting`: a wait that ends is progress, which would hide a stall from the watchdog.
            async with self._http.request("GET", "/v1/loads", once=True) as reply:
                return read_load(await read_json(reply))
        except (ErrorReply, orjson.JSONDecodeError, ValueError) as error:
            raise EngineError(f"the engine at {self.url} reports no load at /v1/loads: {error}") from error
        except CONNECTION_ERRORS:
            return None
