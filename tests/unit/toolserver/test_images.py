"""Images of tool results between a tool server and its client."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image as pil

from agentrl.core.errors import ToolFailure
from agentrl.core.images import IMAGE_MARK, load_image
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.toolserver.client.client import _as_result
from agentrl.toolserver.server.idempotency import Answer

CALL = ToolCall("c1", "zoom")
SERVER = cast(Any, SimpleNamespace(name="tool server zoom"))
RESULT = ToolResult(
    "c1", ToolStatus.OK, f"part: {IMAGE_MARK}", {"box": [0, 1]}, (load_image(pil.new("RGB", (2, 3), "red")),)
)


def test_images_of_results_cross_http() -> None:
    answer = Answer.from_result(RESULT)
    assert answer.result == RESULT, "a repeated call has the first result"
    assert _as_result(json.loads(answer.body), CALL, "c1", SERVER) == RESULT


@pytest.mark.parametrize("images", [["/etc/hostname"], [7], ["data:image/png;base64,AAAA"], []])
def test_images_that_cannot_be_used_are_failures_of_the_server(images: list[object]) -> None:
    """No file is read, and each mark has its image where there are some."""
    fields = json.loads(Answer.from_result(RESULT).body) | {"images": images}
    if not images:
        assert _as_result(fields, CALL, "c1", SERVER).images == ()
        return
    with pytest.raises(ToolFailure, match="images that cannot be used"):
        _as_result(fields, CALL, "c1", SERVER)
