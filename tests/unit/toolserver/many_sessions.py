"""Many sessions of a tool server at once, each over a connection of its own, and not one reply lost or swapped.

``python -m tests.unit.toolserver.many_sessions http://127.0.0.1:8300 1000 3`` plays against a running Python tool.
"""

import asyncio
import json
import resource
import sys
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit


class Wire:
    """One connection. By hand, for an HTTP library would take most of the time."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    async def ask(self, method: str, path: str, fields: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Return the status and the JSON of a reply."""
        body = json.dumps(fields or {}).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._url.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = headers.partition("content-length: ")[2].partition("\r\n")[0]
        content = await self._reader.readexactly(int(length or 0))
        return int(headers.split()[1]), json.loads(content) if content else None


async def play_at_once(url: str, sessions: int, turns: int, tool: str, code: str) -> None:
    """Open so many sessions, and have each make its calls while all others do.

    Args:
        url: the server's.
        sessions: how many.
        turns: calls of each, one after the other.
        tool: its name.
        code: its argument ``code``; ``@`` stands for a number that only this call has, and that the reply must hold.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    all_open = asyncio.Barrier(sessions)
    seen: set[str] = set()

    async def play(number: int) -> None:
        async with Wire(url) as wire:
            status, opened = await wire.ask("POST", "/sessions", {"episode_id": f"crowd-{number}"})
            assert status == 200, opened
            seen.add(opened["session_id"])
            await all_open.wait()
            path = f"/sessions/{opened['session_id']}"
            for turn in range(turns):
                mark = str(1_000_000 + number * turns + turn)
                call = {"call_id": str(turn), "tool": tool, "arguments": {"code": code.replace("@", mark)}}
                status, reply = await wire.ask("POST", f"{path}/call", call)
                assert (status, reply["call_id"], reply["status"]) == (200, str(turn), "ok"), reply
                assert reply["content"].split()[-1] == mark, f"{mark}: {reply}"
            status, reply = await wire.ask("DELETE", path)
            assert status == 204, reply

    await asyncio.gather(*(play(number) for number in range(sessions)))
    assert len(seen) == sessions


def main(url: str, sessions: int, turns: int) -> None:
    began = time.perf_counter()
    asyncio.run(play_at_once(url, sessions, turns, "python", "print(@)"))
    print(f"{sessions} sessions, {sessions * turns} calls, none lost or swapped, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
