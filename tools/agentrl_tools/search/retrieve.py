"""``POST /retrieve`` of the search server, in the dialects that other training frameworks speak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.errors import UnknownNameError
from agentrl.toolserver import limits

from .options import MAX_TOPK, query_fault

if TYPE_CHECKING:
    from .tool import SearchTool

MSGPACK = "application/msgpack"


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
    if len(queries) > limits.QUERIES:
        raise ValueError(f"a request may have {limits.QUERIES} queries, it has {len(queries)}")
    if fault := next(filter(None, map(query_fault, queries)), ""):
        raise ValueError(fault)
    wanted = body.get("topk")
    wanted = topk if wanted is None else wanted
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= MAX_TOPK:
        raise ValueError(f"'topk' must be a whole number from 1 to {MAX_TOPK}, it is {wanted!r}")
    corpus = body.get("corpus")
    if corpus is not None and not isinstance(corpus, str):
        raise ValueError(f"'corpus' must be a string, it is {corpus!r}")
    return Retrieval(queries, wanted, corpus, bool(body.get("return_scores", False)))


def retrieve_route(tool: SearchTool) -> Route:
    """Return the route, which searches the corpora of ``tool``."""

    async def retrieve(request: Request) -> Response:
        body = await request.body()
        try:
            packed = "msgpack" in request.headers.get("content-type", "")
            wanted = parse_request(msgpack.unpackb(body) if packed else orjson.loads(body), tool.topk)
            found = await tool.search(wanted.queries, wanted.topk, wanted.corpus)
        # All of these are the client's mistakes: bytes that are not JSON or msgpack, invalid fields, an unknown corpus.
        except (ValueError, msgpack.UnpackException, UnknownNameError) as error:
            return _reply(request, {"error": str(error)}, 400)
        result: Any = found if wanted.return_scores else [[hit["document"] for hit in hits] for hits in found]
        return _reply(request, {"result": result})

    return Route("/retrieve", retrieve, methods=["POST"])


def _reply(request: Request, content: Any, status: int = 200) -> Response:
    if "msgpack" in request.headers.get("accept", ""):
        return Response(msgpack.packb(content), status, media_type=MSGPACK)
    return Response(orjson.dumps(content), status, media_type="application/json")
