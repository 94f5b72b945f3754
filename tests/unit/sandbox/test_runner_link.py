"""Frames, and replies that come too late, for another request, or not at all."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox.runner_link import LENGTH, MAX_FRAME, LinkError, RunnerLink


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


def frame(message: object) -> bytes:
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def frames(data: bytes) -> list[dict[str, object]]:
    found = []
    while data:
        (length,) = LENGTH.unpack(data[: LENGTH.size])
        found.append(json.loads(data[LENGTH.size : LENGTH.size + length]))
        data = data[LENGTH.size + length :]
    return found


def converse(stream: bytes, texts: list[str], cuts: list[int]) -> list[object]:
    """Send the texts one after the other, while the stream comes in pieces; return what each was answered."""

    async def main() -> list[object]:
        reader, writer = asyncio.StreamReader(), Writer()
        link = RunnerLink(reader, writer)

        async def feed() -> None:
            last = 0
            for cut in [*sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]:
                reader.feed_data(stream[last:cut])
                last = cut
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.create_task(feed())
        answers: list[object] = []
        for text in texts:
            try:
                answers.append((await link.request({"text": text}))["text"])
            except LinkError:
                answers.append(None)
        await feeding
        assert [sent["text"] for sent in frames(writer.data)] == texts
        assert [sent["id"] for sent in frames(writer.data)] == list(range(1, len(texts) + 1))
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
        for place, stale in late:
            if place == number - 1 and stale < number:
                stream += frame({"id": stale, "text": "stale"})
        stream += frame({"id": number, "text": text})
    assert converse(stream, texts, cuts) == texts


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"\x05\0\0",
        frame({"id": 1, "text": "a"})[:-1],
        frame([1]),
        frame("text"),
        LENGTH.pack(3) + b"{,}",
        LENGTH.pack(MAX_FRAME + 1) + b"{}",
        frame({"id": 2, "text": "of the next request"}),
    ],
    ids=["nothing", "half a length", "half a frame", "a list", "a string", "no JSON", "too long", "another's"],
)
def test_what_is_no_reply_is_an_error(stream: bytes) -> None:
    assert converse(stream, ["a"], []) == [None]


def test_half_a_character_can_be_sent() -> None:
    assert converse(frame({"id": 1, "text": "a"}), ["\ud83d"], []) == ["a"]
