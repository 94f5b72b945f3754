"""Images of MCP: from a server's results to those of a tool, and from a tool's results to MCP clients."""

import asyncio
import base64

import mcp.types as types
import pytest
from PIL import Image as pil

from agentrl.core.images import IMAGE_MARK, load_image
from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession
from agentrl.toolserver.mcp.client import from_mcp
from tests.unit.toolserver.test_mcp import served
from tests.unit.toolserver.test_mcp_client import hosted, say

CALL = ToolCall("c", "look")
RED, BLUE = (load_image(pil.new("RGB", (2, 3), colour)) for colour in ("red", "blue"))
RED_DATA, BLUE_DATA = (base64.b64encode(image.data).decode() for image in (RED, BLUE))


class Look(HostedTool):
    """Answers with two pictures."""

    def __init__(self) -> None:
        super().__init__(Tool("look", "Look.", {"type": "object", "properties": {}}))

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        return ToolResult(call.id, ToolStatus.OK, f"{IMAGE_MARK}\nand{IMAGE_MARK}", None, (RED, BLUE))


def read(*content: types.ContentBlock, max_chars: int = 1000) -> ToolResult:
    return from_mcp(CALL, types.CallToolResult(content=list(content)), max_chars, reads_images=True)


def test_images_stand_where_the_server_has_put_them() -> None:
    blob = types.BlobResourceContents(uri="file:///b.png", mime_type="image/png", blob=BLUE_DATA)
    result = read(
        types.TextContent(text=f"a {IMAGE_MARK}"),
        types.ImageContent(data=RED_DATA, mime_type="image/png"),
        types.TextContent(text=""),
        types.EmbeddedResource(resource=blob),
    )
    assert result.content == f"a \N{REPLACEMENT CHARACTER}\n{IMAGE_MARK}\n{IMAGE_MARK}", "a server's mark is no image"
    assert result.images == (RED, BLUE)
    assert read(types.ImageContent(data=RED_DATA, mime_type="")).content == IMAGE_MARK


def test_images_follow_a_text_that_is_cut() -> None:
    texts = [types.TextContent(text="x" * 80) for _ in range(2)]
    result = read(texts[0], types.ImageContent(data=RED_DATA, mime_type="image/png"), texts[1], max_chars=100)
    assert result.content.startswith("x" * 50 + "\n[… 61 characters left out …]")
    assert result.content.endswith("x" * 50 + "\n" + IMAGE_MARK)
    assert result.images == (RED,)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (types.ImageContent(data="?", mime_type="image/png"), "[image of type image/png left out: "),
        (
            types.ImageContent(data="aGk=", mime_type="image/svg+xml"),
            "[image of type image/svg+xml left out: an image must",
        ),
        (types.ImageContent(data=RED_DATA[:40], mime_type="image/png"), "[image of type image/png left out: the image"),
        (
            types.AudioContent(data="aGk=", mime_type="audio/wav"),
            "[audio of type audio/wav left out: only text and images",
        ),
        (
            types.EmbeddedResource(
                resource=types.BlobResourceContents(uri="file:///a", mime_type="application/pdf", blob="aGk=")
            ),
            "[application/pdf at file:///a left out: only text and images can be read]",
        ),
    ],
)
def test_what_cannot_be_carried_is_named(block: types.ContentBlock, text: str) -> None:
    result = read(block)
    assert result.content.startswith(text)
    assert result.images == ()


def test_images_of_a_tool_cross_mcp_both_ways() -> None:
    async def main() -> None:
        async with served([Look()], sandboxed=False, token="secret") as server:
            options = {"url": server.url, "headers": {"Authorization": "Bearer secret"}}
            async with hosted(command=(), **options, images=True) as sessions:
                result = await say(await sessions.open("one"), "look")
                assert (result.content, result.images) == (f"{IMAGE_MARK}\n\nand\n{IMAGE_MARK}", (RED, BLUE))
            async with hosted(command=(), **options) as sessions:
                text = await say(await sessions.open("two"), "look")
                assert text.images == ()
                assert "[image of type image/png left out: only text can be read]" in text.content

    asyncio.run(asyncio.wait_for(main(), 60))
