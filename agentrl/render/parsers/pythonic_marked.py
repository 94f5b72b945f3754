"""LFM2 and Gemma 3: Python calls between two markers, parsed and never run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import CallParser, Piece, closed_calls
from agentrl.render.parsers.pythonic import python_calls


class _PythonicBetweenMarkers(CallParser):
    markers: tuple[str, str]
    unopened = re.compile(r"\w\s*\(")
    """What a call without its opening has before its closing."""

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        return closed_calls(pieces, *self.markers, python_calls, self.unopened)


class Lfm2Parser(_PythonicBetweenMarkers):
    """Parser of the calls of LFM2: ``<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>``."""

    markers = ("<|tool_call_start|>", "<|tool_call_end|>")


class ToolCodeParser(_PythonicBetweenMarkers):
    """Parser of calls in a code block ``tool_code``, as Gemma 3 is prompted to write them::

    ```tool_code
    f(a=1)
    ```
    """

    markers = ("```tool_code", "```")
    unopened = re.compile(r"^tool_code\b[^(]*\(", re.MULTILINE)
