"""The dashboard's routes: the page, its data as JSON, and events when a run has changed."""

from __future__ import annotations

import asyncio
import secrets
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import orjson
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.core.errors import AgentrlError, ConfigError, UserError
from agentrl.dashboard.group_data import group_index, read_calls, rollout_tokens
from agentrl.dashboard.login import LOGIN, Access
from agentrl.dashboard.metrics_file import metric_keys
from agentrl.dashboard.rollout_index import FileKey, Kind, Query
from agentrl.dashboard.run_status import advice, cluster, league, log_tail
from agentrl.dashboard.run_summary import comparison, curves, step_times, summary, trace_spans
from agentrl.dashboard.runs import DashboardRun, Runs
from agentrl.obs.viewer.page import MODULES, STYLES
from agentrl.obs.viewer.page_data import finite
from agentrl.toolserver.server.auth import BodyLimit, Guard

LOOK_S = 0.25
"""Seconds between two looks at the files of the runs that a page shows."""
ALIVE_S = 15.0
"""Seconds after which a page gets a line without an event: a connection that is gone is noticed."""
MOST_ROWS = 500
"""Most rows of a table in one reply."""

_STATIC = files("agentrl.dashboard") / "static"
_VIEWER = files("agentrl.obs.viewer") / "assets"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'nonce-{nonce}'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_NONCE = b"{{nonce}}"


class SecurityHeaders:
    """ASGI middleware that adds a content security policy, and forbids frames, guessed types and referrers.

    The nonce is for the style element in which the table keeps the widths of its columns.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with ``scope["state"]["nonce"]``, and add the headers to the response."""
        nonce = secrets.token_urlsafe(16)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY.format(nonce=nonce)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["X-Frame-Options"] = "DENY"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cache-Control"] = headers.get("Cache-Control", "no-cache")
            await send(message)

        if scope["type"] == "http":
            scope.setdefault("state", {})["nonce"] = nonce
        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def _reply(content: object, status: int = 200) -> Response:
    return Response(
        orjson.dumps(finite(content), option=orjson.OPT_NON_STR_KEYS), status, media_type="application/json"
    )


class _RolloutApi:
    """The routes of tables of rollouts, and of the open one. They read files, and run in threads."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def rollouts(self, request: Request) -> Response:
        return _reply(self._run(request).rollouts.rows(_query(request.query_params), *_page(request)))

    def groups(self, request: Request) -> Response:
        return _reply(self._run(request).rollouts.groups(_query(request.query_params), *_page(request)))

    def group(self, request: Request) -> Response:
        return _reply(group_index(self._run(request), _file_key(request), request.query_params.get("prompt", "")))

    def tokens(self, request: Request) -> Response:
        """Return the length of the vocabulary, uint32; the vocabulary, JSON; and the packed tokens."""
        start, end = _whole(request, "start", 0), _whole(request, "end", 0)
        packed, vocabulary = rollout_tokens(self._run(request), _file_key(request), start, end)
        head = orjson.dumps(finite(vocabulary))
        return Response(struct.pack("<I", len(head)) + head + packed, media_type="application/octet-stream")

    def calls(self, request: Request) -> Response:
        start, end = _whole(request, "start", 0), _whole(request, "end", 0)
        return _reply(read_calls(self._run(request), _file_key(request), start, end))

    def _run(self, request: Request) -> DashboardRun:
        return self._runs.run(request.query_params.get("run", ""))


class _Api:
    """The other routes under ``/api``. They read files, and run in threads, except the events."""

    def __init__(self, runs: Runs, stopping: threading.Event) -> None:
        self._runs = runs
        self._stopping = stopping

    def list_runs(self, request: Request) -> Response:
        return _reply(
            {"root": self._runs.root.name, "runs": [summary(run, self._runs.root) for run in self._runs.all()]}
        )

    def metrics(self, request: Request) -> Response:
        return _reply(metric_keys(self._run(request).metrics.rows()))

    def curves(self, request: Request) -> Response:
        names, keys = request.query_params.getlist("run"), request.query_params.getlist("key")
        return _reply(curves(self._runs, names, keys))

    def steps(self, request: Request) -> Response:
        return _reply(
            step_times(self._run(request), _whole(request, "last", 0), min(_whole(request, "limit", 40), MOST_ROWS))
        )

    def trace(self, request: Request) -> Response:
        return _reply(trace_spans(self._run(request), _whole(request, "step", 0)))

    def comparison(self, request: Request) -> Response:
        names = [request.query_params.get(name, "") for name in ("run", "other")]
        return _reply(comparison(*(self._runs.run(name) for name in names)))

    def league(self, request: Request) -> Response:
        return _reply(league(self._run(request)))

    def cluster(self, request: Request) -> Response:
        return _reply(cluster(self._run(request)))

    def log(self, request: Request) -> Response:
        return Response(log_tail(self._run(request), request.query_params.get("name", "")), media_type="text/plain")

    def advice(self, request: Request) -> Response:
        return _reply(advice(self._run(request)))

    async def events(self, request: Request) -> Response:
        """Send the names of runs that have changed, of those that a page shows, as server-sent events."""
        names = request.query_params.getlist("run")
        runs = await asyncio.to_thread(self._existing_runs, names)
        return StreamingResponse(_changes(request, runs, self._stopping), media_type="text/event-stream")

    def _existing_runs(self, names: list[str]) -> list[DashboardRun]:
        return [run for run in self._runs.all() if run.name in names]

    def _run(self, request: Request) -> DashboardRun:
        return self._runs.run(request.query_params.get("run", ""))


async def _changes(request: Request, runs: list[DashboardRun], stopping: threading.Event) -> AsyncIterator[bytes]:
    signatures: dict[str, tuple[object, ...]] = {}
    silent_s = 0.0
    yield b": connected\n\n"
    while not stopping.is_set() and not await request.is_disconnected():
        changed = await asyncio.to_thread(changed_runs, runs, signatures)
        if changed:
            yield b"event: change\ndata: " + orjson.dumps(changed) + b"\n\n"
            silent_s = 0.0
        elif (silent_s := silent_s + LOOK_S) >= ALIVE_S:
            yield b": alive\n\n"
            silent_s = 0.0
        await asyncio.sleep(LOOK_S)


def changed_runs(runs: list[DashboardRun], signatures: dict[str, tuple[object, ...]]) -> list[str]:
    """Return the runs that have changed since the call before; the first call returns none."""
    names = []
    for run in runs:
        signature = (*run.signature(), run.state())
        if signatures.get(run.name, signature) != signature:
            names.append(run.name)
        signatures[run.name] = signature
    return names


def _whole(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise HTTPException(400, f"{name}={text:.50} is no whole number") from None


def _page(request: Request) -> tuple[int, int]:
    return max(0, _whole(request, "offset", 0)), max(0, min(_whole(request, "limit", 100), MOST_ROWS))


def _kind(parameters: QueryParams) -> Kind:
    return "eval" if parameters.get("kind") == "eval" else "train"


def _file_key(request: Request) -> FileKey:
    return FileKey(_kind(request.query_params), _whole(request, "step", 0))


def _query(parameters: QueryParams) -> Query:
    return Query(
        kind=_kind(parameters),
        steps=_range(parameters, "steps"),
        rewards=_range(parameters, "rewards"),
        stop=parameters.get("stop", ""),
        status=parameters.get("status", ""),
        group=parameters.get("prompt", ""),
        words=parameters.get("words", "").lower(),
        sort=parameters.get("sort", "step"),
        descending=parameters.get("order", "descending") == "descending",
    )


def _range(parameters: QueryParams, name: str) -> tuple[float, float] | None:
    low, _, high = parameters.get(name, "").partition(":")
    try:
        bounds = (float(low or "-inf"), float(high or "inf"))
    except ValueError:
        raise HTTPException(400, f"{name}={low:.50}:{high:.50} is no range such as 0:1") from None
    return bounds if low or high else None


def _page_response(request: Request) -> Response:
    page = (_STATIC / "index.html").read_bytes().replace(_NONCE, request.state.nonce.encode())
    return Response(page, media_type="text/html", headers={"Cache-Control": "no-store"})


def _viewer_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in (*MODULES, STYLES[0]):
        raise HTTPException(404, f"there is no file {name}")
    kind = "text/css" if name.endswith(".css") else "text/javascript"
    return Response((_VIEWER / name).read_bytes(), media_type=kind)


async def _error_reply(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _reply({"error": error.detail}, error.status_code)
    if isinstance(error, AgentrlError):
        return _reply({"error": str(error)}, 404 if isinstance(error, UserError) else 500)
    return _reply(
        {"error": f"the dashboard failed: {type(error).__name__}: {error}"}, 500
    )  # Starlette logs the traceback


def make_app(runs: Runs, token: str | None = None, stopping: threading.Event | None = None) -> Starlette:
    """Return the dashboard as an ASGI application.

    Args:
        runs: that it shows.
        token: that requests need; None if they need none, and come from pages of this machine.
        stopping: ends the streams of events when it is set: a server that stops waits for its responses.
    """
    api, rollouts, access = _Api(runs, stopping or threading.Event()), _RolloutApi(runs), Access(token)
    routes = [
        api.list_runs, api.metrics, api.curves, api.steps, api.trace, api.comparison, api.league, api.cluster, api.log,
        api.advice, api.events, rollouts.rollouts, rollouts.groups, rollouts.group, rollouts.tokens, rollouts.calls,
    ]  # fmt: skip
    handler = cast("Callable[[Request, Exception], Awaitable[Response]]", _error_reply)
    exceptions: dict[Any, Any] = {
        HTTPException: handler,
        AgentrlError: handler,
        ConfigError: handler,
        Exception: handler,
    }
    return Starlette(
        routes=[
            Route("/", _page_response),
            Route(LOGIN, access.login, methods=["GET", "POST"]),
            *(Route(f"/api/{route.__name__}", route) for route in routes),
            Route("/viewer/{name}", _viewer_file),
            Mount("/static", StaticFiles(directory=Path(str(_STATIC)))),
        ],
        middleware=[
            Middleware(SecurityHeaders),
            Middleware(BodyLimit),
            Middleware(Guard, fault=access.refusal),
        ],
        exception_handlers=exceptions,
    )
