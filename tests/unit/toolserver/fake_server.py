"""A tool server by hand over raw sockets, which loses replies, restarts and refuses as a test says."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

Answer = tuple[int, object] | tuple[int, object, str]
"""Status, content, and lines to add to the head."""


class FakeServer:
    """Speaks the contract of tool servers. ``work`` answers a call's body; its result is kept by call id."""

    def __init__(self, work: Callable[[dict], Awaitable[dict]] | None = None) -> None:
        self.work = work or self.echo
        self.instance = "first"
        self.sessions: dict[str, str] = {}
        """Episode by session."""
        self.processes: dict[str, str] = {}
        """What stood before it: the process that asked."""
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.asked_on: list[int] = []
        """The number of its connection."""
        self.closes_after_errors = False
        """A connection with a reply of status 500 breaks at the next request."""
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict] = []
        self.runs: Counter[str] = Counter()
        """How often each call ran, by ``episode/call_id``."""
        self.results: dict[tuple[str, str], asyncio.Future] = {}
        self.lose: list[str] = []
        """Ends of paths whose next reply is lost: the request is carried out, then the connection breaks."""
        self.answers: dict[str, list[Answer]] = {}
        """What to answer next, by the end of the path, in place of what is right."""
        self.gate = asyncio.Event()
        """Requests to close a session wait for it."""
        self.gate.set()
        self.tools: list[dict] = []
        self.port = 0
        self._numbers = itertools.count()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, method: str, end: str = "") -> int:
        return sum(request_method == method and path.endswith(end) for request_method, path in self.asked)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: connections break, and nothing listens."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def restart(self) -> None:
        """Die and come back at the same address, knowing nothing."""
        await self.stop()
        self.instance, self.sessions, self.results = f"after {self.instance}", {}, {}
        await self.start()

    async def echo(self, body: dict) -> dict:
        await asyncio.sleep(0)
        return {"status": "ok", "content": f"{body['tool']} {json.dumps(body['arguments'])}"}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        connection, broken = next(self._numbers), False
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = lines[0].split()
                if broken:
                    writer.transport.abort()
                    return
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
                self.asked.append((method, path))
                self.asked_on.append(connection)
                self.headers.append(headers)
                self.bodies.append(body)
                status, content, *more = await self._answer(method, path, body)
                broken = self.closes_after_errors and status >= 500
                lost = next((end for end in self.lose if path.endswith(end)), None)
                if lost is not None:
                    self.lose.remove(lost)
                    writer.transport.abort()
                    return
                text = content if isinstance(content, bytes) else json.dumps(content).encode()
                head = f"HTTP/1.1 {status} X\r\n{''.join(more)}content-length: {len(text)}\r\n\r\n"
                writer.write(head.encode() + text)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, method: str, path: str, body: dict) -> Answer:
        for end, answers in self.answers.items():
            if path.endswith(end) and answers:
                return answers.pop(0)
        parts = path.strip("/").split("/")
        if path == "/health":
            return 200, {"status": "ok", "sessions": len(self.sessions), "server": self.instance}
        if path == "/tools":
            return 200, {"tools": self.tools}
        if parts == ["sessions"]:
            known_names = [
                name
                for name, episode in self.sessions.items()
                if f"{self.processes[name]}/{episode}" == body["episode_id"]
            ]
            name = known_names[0] if known_names else f"s{next(self._numbers)}"
            self.processes[name], _, self.sessions[name] = body["episode_id"].partition("/")
            return 200, {"session_id": name, "server": self.instance}
        if parts == ["calls"]:
            results = [{"call_id": call["call_id"], "data": None, **await self.work(call)} for call in body["calls"]]
            return 200, {"results": results, "server": self.instance}
        if parts[1] not in self.sessions:
            return 404, {"error": f"no session {parts[1]}"}
        if method == "DELETE":
            await self.gate.wait()
            self.sessions.pop(parts[1], None)
            return 204, b""
        return 200, await self._call(parts[1], body)

    async def _call(self, session: str, body: dict) -> dict:
        key = session, body["call_id"]
        if key not in self.results:
            self.results[key] = asyncio.ensure_future(self._run(session, body))
        return await asyncio.shield(self.results[key])

    async def _run(self, session: str, body: dict) -> dict:
        self.runs[f"{self.sessions[session]}/{body['call_id']}"] += 1
        return {"call_id": body["call_id"], "data": None, **await self.work(body)}


@asynccontextmanager
async def fake_servers(count: int = 1):
    """Run several, and stop those that a test has not stopped."""
    servers = [FakeServer() for _ in range(count)]
    for server in servers:
        await server.start()
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()
