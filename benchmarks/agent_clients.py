"""Clients of the gateway's dialects that play sessions: ``python -m benchmarks.agent_clients``, for `benchmarks.gateway`.

A line of the standard input is a session: ``{"key": …, "prompt": …, "observations": […]}``. When it is over, a line with its
key and the times at which the first byte of each reply was read goes to the standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

import aiohttp
import orjson
import uvloop
from typing_extensions import override

from agentrl.core.child_process import raise_file_limit

_LINE_BYTES = 2**24
_KEEP_ALIVE = b": "
"""Begins a comment of a stream, which is no part of the reply."""


class Client(Protocol):
    """How an agent program sends and reads turns in one dialect."""

    path: ClassVar[str]
    """Of the endpoint."""
    history: ClassVar[str]
    """Field of the body with the conversation."""
    fields: ClassVar[Mapping[str, Any]] = {}
    """Other fields of the body."""

    def read(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what a reply adds to the conversation."""
        ...

    def read_events(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what a stream adds to the conversation."""
        ...


class ChatClient(Client):
    """Chat completions."""

    path = "/v1/chat/completions"
    history = "messages"

    @override
    def read(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        return [reply["choices"][0]["message"]]

    @override
    def read_events(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        message = {"role": "assistant", "content": "", "reasoning_content": ""}
        for event in events:
            for choice in event["choices"]:
                for name in ("content", "reasoning_content"):
                    message[name] += choice["delta"].get(name) or ""
        return [message]


class ResponsesClient(Client):
    """Responses."""

    path = "/v1/responses"
    history = "input"
    fields: ClassVar[Mapping[str, Any]] = {"store": False}

    @override
    def read(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = reply["output"]
        return items

    @override
    def read_events(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event["item"] for event in events if event["type"] == "response.output_item.done"]


class MessagesClient(Client):
    """Messages."""

    path = "/v1/messages"
    history = "messages"
    fields: ClassVar[Mapping[str, Any]] = {"max_tokens": 100_000}

    @override
    def read(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": reply["content"]}]

    @override
    def read_events(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                kind = delta["type"].removesuffix("_delta")
                blocks[event["index"]][kind] += delta[kind]
        return [{"role": "assistant", "content": blocks}]


CLIENTS: dict[str, tuple[Client, bool]] = {
    "chat": (ChatClient(), False),
    "chat, streamed": (ChatClient(), True),
    "responses": (ResponsesClient(), False),
    "responses, streamed": (ResponsesClient(), True),
    "messages": (MessagesClient(), False),
    "messages, streamed": (MessagesClient(), True),
}
"""Clients by name, and whether they request streams."""


def _events(content: bytes) -> list[dict[str, Any]]:
    lines = (line.removeprefix(b"data: ") for line in content.splitlines() if line.startswith(b"data: "))
    return [orjson.loads(line) for line in lines if line != b"[DONE]"]


async def _play(http: aiohttp.ClientSession, name: str, turns: int, order: dict[str, Any]) -> None:
    """Play one session, and print that it is over."""
    client, stream = CLIENTS[name]
    headers = {"authorization": f"Bearer {order['key']}", "content-type": "application/json"}
    history = [{"role": "user", "content": order["prompt"]}]
    first_bytes_s: list[float] = []
    for turn in range(turns):
        body = orjson.dumps({"model": "policy", "stream": stream, client.history: history, **client.fields})
        async with http.post(client.path, data=body, headers=headers) as response:
            content, first_s = b"", 0.0
            async for chunk in response.content.iter_any():
                if not first_s and not chunk.startswith(_KEEP_ALIVE):
                    first_s = time.monotonic()
                content += chunk
        if response.status != 200:
            raise RuntimeError(f"{client.path} answers HTTP {response.status}: {content[:500]!r}")
        first_bytes_s.append(first_s)
        history += client.read_events(_events(content)) if stream else client.read(orjson.loads(content))
        history.append({"role": "user", "content": order["observations"][turn]})
    sys.stdout.buffer.write(orjson.dumps({"key": order["key"], "first_bytes_s": first_bytes_s}) + b"\n")
    sys.stdout.buffer.flush()


async def _main(arguments: argparse.Namespace) -> None:
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(arguments.url, connector=connector) as http, asyncio.TaskGroup() as sessions:
        while line := await reader.readline():
            sessions.create_task(_play(http, arguments.client, arguments.turns, orjson.loads(line)))


def main() -> None:
    """Play sessions until the end of the standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of the gateway")
    parser.add_argument("--client", required=True, choices=sorted(CLIENTS), help="dialect")
    parser.add_argument("--turns", type=int, required=True, help="of a session")
    raise_file_limit()
    uvloop.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
