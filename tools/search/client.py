"""The client of a retrieval server: calls that episodes make at the same time travel as one request."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NamedTuple

import httpx
import orjson

from agentrl import ToolCall, ToolResult, ToolStatus
from agentrl.core.errors import ToolFailure

from .calls import Search, as_result, parse_call
from .options import SearchOptions
from .retriever import Hit

WINDOW_S = 0.002
"""How long the first call of a request waits for others: episodes of one batch search within milliseconds."""
BATCH = 64
"""Calls in one request, so that a request to a slow index stays within its time."""
BACKOFF_S = 0.2
"""Wait before the first retry; it doubles with each."""


class _Waiting(NamedTuple):
    call_id: str
    query: str
    answer: asyncio.Future[list[Hit]]


class _Refused(Exception):
    """The server found fault with the request (a 4xx status): a retry would change nothing."""


class SearchClient:
    """Implements `agentrl.core.tool.ToolClient`; belongs to the event loop that first calls it."""

    def __init__(self, url: str, options: SearchOptions) -> None:
        """Call the server at ``url``, with or without ``/retrieve`` at its end."""
        self._address = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self._options = options
        # httpx looks through all its connections for each request, and a few carry any number of batches.
        self._http = httpx.AsyncClient(
            timeout=options.timeout_s, trust_env=False, limits=httpx.Limits(max_connections=8)
        )
        self._waiting: dict[tuple[int, str | None], list[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, call: ToolCall, *, episode_id: str) -> ToolResult:
        """Search. A call that does not fit the schema, or that the server refuses, is a result with a status.

        Raises:
            ToolFailure: the server failed or could not be reached, after all retries.

        """
        asked = parse_call(call, self._options.topk)
        if isinstance(asked, ToolResult):
            return asked
        try:
            return as_result(call.id, await self._enqueue(f"{episode_id}/{call.id}", asked))
        except _Refused as refusal:
            return ToolResult(call.id, ToolStatus.INVALID, f"search: {refusal}")

    def _enqueue(self, call_id: str, asked: Search) -> asyncio.Future[list[Hit]]:
        answer: asyncio.Future[list[Hit]] = asyncio.get_running_loop().create_future()
        key = (asked.topk, asked.corpus)
        batch = self._waiting.setdefault(key, [])
        batch.append(_Waiting(call_id, asked.query, answer))
        if len(batch) == 1:
            task = asyncio.create_task(self._flush(batch, key))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, batch))
        elif len(batch) == BATCH:
            del self._waiting[key]
        return answer

    async def _flush(self, batch: list[_Waiting], key: tuple[int, str | None]) -> None:
        await asyncio.sleep(WINDOW_S)
        if self._waiting.get(key) is batch:
            del self._waiting[key]
        found = await self._post(batch, *key)
        for waiting, hits in zip(batch, found, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(hits)

    def _ended(self, batch: list[_Waiting], task: asyncio.Task[None]) -> None:
        """Leave no caller waiting when the request failed, or the client was closed before it was even sent."""
        self._tasks.discard(task)
        closed = ToolFailure("the search client was closed during the call")
        fault = closed if task.cancelled() else task.exception()
        for waiting in batch:
            if fault is not None and not waiting.answer.done():
                # Each caller raises an error of its own: a shared one would gather everybody's traceback.
                waiting.answer.set_exception(type(fault)(*fault.args))

    async def _post(self, batch: list[_Waiting], topk: int, corpus: str | None) -> list[list[Hit]]:
        body: dict[str, Any] = {
            "queries": [waiting.query for waiting in batch],
            "call_ids": [waiting.call_id for waiting in batch],
            "topk": topk,
            "return_scores": True,
        }
        if corpus is not None:
            body["corpus"] = corpus
        content = orjson.dumps(body)
        for attempt in range(self._options.retries + 1):
            if attempt:
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
            try:
                reply = await self._http.post(
                    self._address, content=content, headers={"content-type": "application/json"}
                )
            except httpx.TransportError as error:
                fault = f"{type(error).__name__} {error}".rstrip()
                continue
            if reply.status_code < 400:
                return self._hits(reply, len(batch))
            fault = f"status {reply.status_code}: {reply.text[:500]}"
            if reply.status_code < 500 and reply.status_code != 429:
                raise _Refused(_words(reply))
        raise ToolFailure(
            f"the search server at {self._address} (tools.search.url) failed {self._options.retries + 1} times: {fault}"
        )

    def _hits(self, reply: httpx.Response, expected: int) -> list[list[Hit]]:
        try:
            result: list[list[Hit]] = orjson.loads(reply.content)["result"]
            if len(result) == expected and all("contents" in hit["document"] for hits in result for hit in hits):
                return result
        except (ValueError, KeyError, TypeError):
            pass  # told below, as everything else that is no answer to these queries
        raise ToolFailure(
            f"{self._address} (tools.search.url) is no retrieval server: to {expected} queries "
            f"it answered {reply.text[:200]!r}"
        )

    async def close_session(self, episode_id: str) -> None:
        """Do nothing: searches leave no state behind."""

    async def aclose(self) -> None:
        """Give up calls under way and close the connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()


def _words(reply: httpx.Response) -> str:
    """Return what an error reply says: our own servers' field ``error``, or the text."""
    try:
        return str(orjson.loads(reply.content)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {reply.status_code}: {reply.text[:500]}"
