"""``POST /retrieve`` of the search server, in the dialects that other training frameworks speak."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.errors import UnknownNameError
from agentrl.toolserver import request_limits

from .options import MAX_TOPK, query_fault
from .retriever import Hit

MSGPACK = "application/msgpack"
Search = Callable[[Sequence[str], int, str | None], Awaitable[list[list[Hit]]]]
"""``search(queries, topk, corpus)``: the hits of each query; `SearchTool.search`."""


@dataclass(frozen=True, slots=True)
class Retrieval:
    """One checked request."""

    queries: list[str]
    """What to search for."""
    topk: int
    """Documents a query."""
    corpus: str | None
    """Which corpus; None if there is only one."""
    return_scores: bool
    """Whether a hit is ``{"document", "score"}`` or the bare document."""


def parse_request(body: Any, topk: int) -> Retrieval:
    """Return a checked request; ``topk`` is used if it has none.

    Raises:
        ValueError: a field is missing or invalid.
    """
    if not isinstance(body, Mapping):
        raise ValueError(f"expected an object with 'queries' or 'query', found {type(body).__name__}")
    queries = body.get("queries", body.get("query"))
    if isinstance(queries, str):
        queries = [queries]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError("'queries' must be a list of strings ('query' a string)")
    if len(queries) > request_limits.QUERIES:
        raise ValueError(f"a request may have {request_limits.QUERIES} queries, it has {len(queries)}")
    if fault := next(filter(None, map(query_fault, queries)), ""):
        raise ValueError(fault)
    requested_topk = body.get("topk")
    topk = topk if requested_topk is None else requested_topk
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"'topk' must be a whole number from 1 to {MAX_TOPK}, it is {topk!r}")
    corpus = body.get("corpus")
    if corpus is not None and not isinstance(corpus, str):
        raise ValueError(f"'corpus' must be a string, it is {corpus!r}")
    return Retrieval(queries, topk, corpus, bool(body.get("return_scores", False)))


def retrieve_route(search: Search, topk: int) -> Route:
    """Return the route of plain queries, with ``topk`` documents a query that does not say how many."""

    async def retrieve(request: Request) -> Response:
        body = await request.body()
        try:
            packed = "msgpack" in request.headers.get("content-type", "")
            retrieval = parse_request(msgpack.unpackb(body) if packed else orjson.loads(body), topk)
            hits_by_query = await search(retrieval.queries, retrieval.topk, retrieval.corpus)
        # All of these are the client's mistakes: bytes that are not JSON or msgpack, invalid fields, an unknown corpus.
        except (ValueError, msgpack.UnpackException, UnknownNameError) as error:
            return _reply(request, {"error": str(error)}, 400)
        if retrieval.return_scores:
            return _reply(request, {"result": hits_by_query})
        return _reply(request, {"result": [[hit["document"] for hit in hits] for hits in hits_by_query]})

    return Route("/retrieve", retrieve, methods=["POST"])


def _reply(request: Request, content: Any, status: int = 200) -> Response:
    if "msgpack" in request.headers.get("accept", ""):
        return Response(msgpack.packb(content), status, media_type=MSGPACK)
    return Response(orjson.dumps(content), status, media_type="application/json")
