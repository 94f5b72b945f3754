"""The retrieval server: ``POST /retrieve`` in the dialects that clients in the field speak, and ``GET /health``."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgpack
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.child_process import exit_with_parent
from agentrl.core.errors import ConfigError, PortInUseError, UnknownNameError

from .calls import MAX_TOPK
from .retriever import Corpora, Hit

REMEMBERED_CALLS = 20_000
"""Answered calls kept for retries; the oldest go first."""

MSGPACK = "application/msgpack"


@dataclass(frozen=True, slots=True)
class Retrieval:
    """One checked request."""

    queries: list[str]
    """What to search for."""
    topk: int
    """Documents a query."""
    corpus: str | None
    """Which corpus; None where there is one only."""
    return_scores: bool
    """Whether a hit comes as ``{"document", "score"}`` or as the bare document."""
    call_ids: list[str]
    """One id a query, or none: a retry with the same id gets the first answer."""


def parse_request(body: Any, topk: int) -> Retrieval:
    """Return what a request asks for; ``topk`` is used when it has none.

    Raises:
        ValueError: a field that is missing or does not fit.

    """
    if not isinstance(body, Mapping):
        raise ValueError(f"expected an object with 'queries' or 'query', found {type(body).__name__}")
    queries = body.get("queries", body.get("query"))
    if isinstance(queries, str):
        queries = [queries]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError("'queries' must be a list of strings ('query' a string)")
    wanted = body.get("topk")
    wanted = topk if wanted is None else wanted
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= MAX_TOPK:
        raise ValueError(f"'topk' must be a whole number from 1 to {MAX_TOPK}, it is {wanted!r}")
    corpus = body.get("corpus")
    if corpus is not None and not isinstance(corpus, str):
        raise ValueError(f"'corpus' must be a string, it is {corpus!r}")
    call_ids = body.get("call_ids") or []
    if not isinstance(call_ids, list) or len(call_ids) not in (0, len(queries)):
        raise ValueError(f"'call_ids' must hold one id for each of the {len(queries)} queries")
    return Retrieval(queries, wanted, corpus, bool(body.get("return_scores", False)), [str(item) for item in call_ids])


class SearchQueue:
    """Answers requests one after the other in a thread, so that the server stays responsive meanwhile."""

    def __init__(self, corpora: Corpora, remembered: int = REMEMBERED_CALLS) -> None:
        """Search ``corpora`` and keep the answers of ``remembered`` calls."""
        self.corpora = corpora
        self.searched = 0
        self._remembered = remembered
        self._answered: OrderedDict[tuple[object, ...], list[Hit]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")

    async def retrieve(self, asked: Retrieval) -> list[list[Hit]]:
        """Return the hits of each query.

        Raises:
            UnknownNameError: there is no such corpus.

        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._retrieve, asked)

    def _retrieve(self, asked: Retrieval) -> list[list[Hit]]:
        if not asked.call_ids:
            return self._search(asked.queries, asked)
        # The query is part of the key: an id that comes again with another query is another call.
        calls = zip(asked.call_ids, asked.queries, strict=True)
        keys = [(call_id, query, asked.topk, asked.corpus) for call_id, query in calls]
        new = list(dict.fromkeys(key for key in keys if key not in self._answered))
        for key, hits in zip(new, self._search([key[1] for key in new], asked), strict=True):
            self._answered[key] = hits
        answers = [self._answered[key] for key in keys]
        while len(self._answered) > self._remembered:
            self._answered.popitem(last=False)
        return answers

    def _search(self, queries: Sequence[str], asked: Retrieval) -> list[list[Hit]]:
        self.searched += len(queries)
        return self.corpora.search(queries, asked.topk, asked.corpus)


def _decode(request: Request, body: bytes) -> Any:
    if "msgpack" in request.headers.get("content-type", ""):
        return msgpack.unpackb(body)
    return orjson.loads(body)


def _reply(request: Request, content: Any, status: int = 200) -> Response:
    if "msgpack" in request.headers.get("accept", ""):
        return Response(msgpack.packb(content), status, media_type=MSGPACK)
    return Response(orjson.dumps(content), status, media_type="application/json")


def make_app(queue: SearchQueue, topk: int = 3) -> Starlette:
    """Return the server as an ASGI application."""

    async def retrieve(request: Request) -> Response:
        body = await request.body()
        try:
            asked = parse_request(_decode(request, body), topk)
            found = await queue.retrieve(asked)
        # All of these are the sender's mistakes: bytes that are no JSON or msgpack, bad fields, an unknown corpus.
        except (ValueError, msgpack.UnpackException, UnknownNameError) as error:
            return _reply(request, {"error": str(error)}, 400)
        result: Any = found if asked.return_scores else [[hit["document"] for hit in hits] for hits in found]
        return _reply(request, {"result": result})

    async def health(request: Request) -> Response:
        sizes = {name: len(one) for name, one in queue.corpora.retrievers.items()}
        return _reply(request, {"status": "ok", "corpora": sizes, "searched": queue.searched})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``port`` (0: a free one).

    Raises:
        PortInUseError: something else does.
        ConfigError: the address is not this machine's.

    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"port {port} on {host} is in use; choose another with --port (tools.search.port), 0 takes a free one"
            ) from None
        raise ConfigError(f"cannot listen on {host}:{port} (--host, --port): {error}") from None
    return listener


def serve(open_corpora: Callable[[], Corpora], *, host: str, port: int, topk: int) -> None:
    """Open the corpora and serve until told to stop.

    Raises:
        ConfigError: a corpus, model or index that cannot be used.
        PortInUseError: something else listens on ``port``.

    """
    exit_with_parent()
    if not 1 <= topk <= MAX_TOPK:
        raise ConfigError(f"--topk is {topk}; it must be from 1 to {MAX_TOPK}")
    # Before an index is built, which may take hours: a port that is taken is told at once.
    with listen(host, port) as listener:
        corpora = open_corpora()
        sizes = ", ".join(f"{name}: {len(one):,} documents" for name, one in corpora.retrievers.items())
        address = f"http://{host}:{listener.getsockname()[1]}"
        print(f"search serves {len(corpora.retrievers)} corpora ({sizes}) on {address}", flush=True)
        settings = uvicorn.Config(
            make_app(SearchQueue(corpora), topk), log_level="warning", timeout_graceful_shutdown=2
        )
        uvicorn.Server(settings).run(sockets=[listener])
