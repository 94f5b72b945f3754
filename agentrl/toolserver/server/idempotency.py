"""Idempotency: the calls of a session by id, so that each runs once and a retry gets the first result."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass

import orjson

from agentrl.core.images import Image
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.toolserver import request_limits
from agentrl.toolserver.server.errors import Conflict


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call as its HTTP reply. Nothing else of it is kept: objects take a multiple of the memory."""

    status: ToolStatus
    body: bytes
    """The result as JSON: ``{"call_id", "status", "content", "data"}``, and ``images`` as ``data:`` URLs if it has some."""

    @classmethod
    def from_result(cls, result: ToolResult) -> Answer:
        """Return the answer of a result.

        Raises:
            TypeError: its data, or its content, cannot be written as JSON.
        """
        fields = {
            "call_id": result.call_id,
            "status": result.status.value,
            "content": result.content,
            "data": result.data,
        }
        if result.images:
            fields["images"] = [image.data_url for image in result.images]
        # A copy: orjson leaves the room in its bytes that it reserved while it wrote, often several times their length.
        return cls(result.status, bytes(memoryview(orjson.dumps(fields))))

    @property
    def result(self) -> ToolResult:
        """The result as the client of an HTTP server gets it."""
        fields = orjson.loads(self.body)
        images = tuple(map(Image.from_data_url, fields.get("images", ())))
        return ToolResult(fields["call_id"], self.status, fields["content"], fields["data"], images)


@dataclass(slots=True)
class _Entry:
    digest: bytes
    """Digest of tool and arguments."""
    answer: asyncio.Future[Answer] | None
    """None if the result is no longer kept."""
    size: int = 0
    """Bytes of the result; 0 while the call runs."""


class CallMemory:
    """The calls of a session and their answers, within `request_limits.KEPT_BYTES` and `request_limits.KEPT_IDS`."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """By the digest of the call id, which may be long."""
        self._bytes = 0

    def __contains__(self, call_id: str) -> bool:
        """Return whether a call with this id was started."""
        return _key(call_id) in self._entries

    def recall(self, call: ToolCall) -> tuple[asyncio.Future[Answer], bool]:
        """Return the future of a call's answer, and whether the call is new: then the caller runs it and sets the answer.

        Raises:
            Conflict: the id belongs to another call, or to one whose answer is no longer kept.
            ValueError, RecursionError: the arguments cannot be encoded: half a character, a number such as NaN, or too deep.
        """
        text = json.dumps([call.name, call.arguments], sort_keys=True, ensure_ascii=False, allow_nan=False)
        key, digest = _key(call.id), _digest(text.encode())
        entry = self._entries.get(key)
        if entry is None:
            return self._begin(key, digest), True
        if entry.digest != digest:
            raise Conflict(f"call_id {call.id!r} was another call of this session; every call needs a unique id")
        if entry.answer is None:
            raise Conflict(f"call_id {call.id!r} was answered long ago, and its result is no longer kept")
        return entry.answer, False

    def _begin(self, key: bytes, digest: bytes) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._entries[key] = _Entry(digest, answer)
        answer.add_done_callback(lambda done: self._keep(key, len(done.result().body)))
        return answer

    def _keep(self, key: bytes, size: int) -> None:
        """Count a result's bytes, and drop the oldest results beyond the bounds."""
        newest = self._entries[key]
        newest.size = size
        self._bytes += size
        for entry in self._entries.values():
            if self._bytes <= request_limits.KEPT_BYTES:
                break
            if entry.size and entry is not newest:
                self._bytes -= entry.size
                entry.size, entry.answer = 0, None
        while len(self._entries) > request_limits.KEPT_IDS:
            oldest = next(iter(self._entries.values()))
            if oldest is newest or (oldest.answer is not None and not oldest.size):
                break  # the oldest call still runs
            self._bytes -= oldest.size
            self._entries.popitem(last=False)


def _key(call_id: str) -> bytes:
    return _digest(call_id.encode(errors="surrogatepass"))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
