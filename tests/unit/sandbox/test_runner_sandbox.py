"""Frames, and replies that come too late, for another request, or not at all."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.sandbox import SandboxLimits
from agentrl.core.errors import SandboxFailure
from agentrl.sandbox import runner_sandbox
from agentrl.sandbox.base import ALL_DEFENCES, Job
from agentrl.sandbox.runner_sandbox import LENGTH, MAX_FRAME, ByteReader, RunnerSandbox


class Writer:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class Streams(RunnerSandbox):
    """A sandbox of nothing but two streams."""

    def __init__(self, reader: ByteReader, writer: Writer) -> None:
        super().__init__("streams", reader, writer, SandboxLimits(), ALL_DEFENCES)

    def _oom_kills(self) -> int:
        return 0

    async def _destroy(self) -> None:
        pass

    async def _describe_end(self) -> str:
        return ""


def reply(number: int, text: str) -> bytes:
    """A reply to a call that has printed the text."""
    ended = {"exceeded": None, "exit_code": 0, "cpu_s": 0.0, "seconds": 0.0, "variables_lost": False}
    output = text.encode()
    return frame({"id": number, "sizes": [len(output), 0], **ended}) + output


def frame(message: object) -> bytes:
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def requests(data: bytes) -> list[tuple[object, object]]:
    """Return id and code of all requests sent."""
    requests = []
    while data:
        (length,) = LENGTH.unpack(data[: LENGTH.size])
        sent, data = json.loads(data[LENGTH.size : LENGTH.size + length]), data[LENGTH.size + length :]
        (size,) = sent["sizes"]
        requests.append((sent["id"], json.loads(data[:size])["code"]))
        data = data[size:]
    return requests


def converse(stream: bytes, texts: list[str], cuts: list[int]) -> list[str | None]:
    """Run the texts one after the other, while the stream comes in pieces; return each output, None for a failure."""

    async def main() -> list[str | None]:
        reader, writer = asyncio.StreamReader(), Writer()
        sandbox = Streams(reader, writer)

        async def feed() -> None:
            last = 0
            for cut in [*sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]:
                reader.feed_data(stream[last:cut])
                last = cut
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.create_task(feed())
        answers: list[str | None] = []
        gone: list[str] = []
        for text in texts:
            try:
                answers.append((await sandbox.run(Job("call", code=text))).stdout)
            except SandboxFailure as failure:
                answers.append(None)
                gone.append(str(failure))
        await feeding
        assert sandbox.alive == (gone == [])
        assert all("its runner is gone" in why for why in gone)
        assert requests(writer.data) == list(enumerate(texts, start=1))
        return answers

    return asyncio.run(main())


@given(
    texts=st.lists(st.text(), min_size=1, max_size=6),
    late=st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 6))),
    cuts=st.lists(st.integers(min_value=0), max_size=5),
)
def test_a_late_reply_is_never_taken_for_another_requests(
    texts: list[str], late: list[tuple[int, int]], cuts: list[int]
) -> None:
    """Replies to requests that were given up come before any reply, in any number."""
    stream = b""
    for number, text in enumerate(texts, start=1):
        for call_index, stale in late:
            if call_index == number - 1 and stale < number:
                stream += reply(stale, "stale")
        stream += reply(number, text)
    assert converse(stream, texts, cuts) == texts


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"\x05\0\0",
        frame({"id": 1, "sizes": []})[:-1],
        reply(1, "a")[:-1],
        frame({"id": 1}),
        frame({"id": 1, "sizes": 3}),
        frame({"id": 1, "sizes": [-1]}),
        frame({"id": 1, "sizes": [True, 0.5]}),
        frame({"id": 1, "sizes": [MAX_FRAME + 1]}),
        frame([1]),
        frame("text"),
        LENGTH.pack(3) + b"{,}",
        LENGTH.pack(MAX_FRAME + 1) + b"{}",
        reply(2, "of the next request"),
    ],
    ids=[
        *("nothing", "half a length", "half a frame", "half a body", "no sizes", "sizes no list", "a size below 0"),
        *("sizes no numbers", "a body too long", "a list", "a string", "no JSON", "too long", "another's"),
    ],
)
def test_what_is_no_reply_is_an_error(stream: bytes) -> None:
    assert converse(stream, ["a"], []) == [None]


def test_half_a_character_can_be_sent() -> None:
    assert converse(reply(1, "a"), ["\ud83d"], []) == ["a"]


def test_a_runner_that_does_not_answer_in_time_ends_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_sandbox, "REPLY_GRACE_S", 0.01)

    async def main() -> None:
        sandbox = Streams(asyncio.StreamReader(), Writer())
        with pytest.raises(SandboxFailure, match=r"streams: its runner did not answer in 0\.02 s"):
            await sandbox.run(Job("call", code="pass", wall_s=0.01))
        with pytest.raises(SandboxFailure, match=r"streams is gone: its runner did not answer"):
            await sandbox.run(Job("call", code="pass"))

    asyncio.run(main())


def test_a_stream_that_times_out_is_no_late_runner() -> None:
    """`TimeoutError` is also what a socket raises whose other end is gone."""

    class Reader:
        async def readexactly(self, n: int) -> bytes:
            raise TimeoutError("connection timed out")

    async def main() -> None:
        with pytest.raises(SandboxFailure, match=r"its runner is gone \(TimeoutError: connection timed out\)"):
            await Streams(Reader(), Writer()).run(Job("call", code="pass"))

    asyncio.run(main())


def test_a_sandbox_that_is_closed_during_a_call_says_so() -> None:
    """Why the runner ended is not asked then: what knows it is closed too."""

    class Closed(Streams):
        async def _describe_end(self) -> str:
            raise AssertionError("the sandbox is closed")

    async def main() -> None:
        reader = asyncio.StreamReader()
        sandbox = Closed(reader, Writer())
        call = asyncio.create_task(sandbox.run(Job("call", code="pass")))
        await asyncio.sleep(0)
        await sandbox.close()
        reader.feed_eof()
        with pytest.raises(SandboxFailure, match="streams: it was closed"):
            await call

    asyncio.run(main())
