"""Runs the example episode of docs/explanation/loss_masks.md and writes its rows into the page.

``python docs/make_loss_masks.py``, from the repository's root, with the test dependencies installed.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from agentrl import Env, Message, Task, tool  # noqa: E402
from agentrl.config.model import RenderConfig  # noqa: E402
from agentrl.config.rollout import FailureConfig  # noqa: E402
from agentrl.core.types import MaskReason, Provenance, Row, SamplingParams  # noqa: E402
from agentrl.episode.context import EpisodeContext  # noqa: E402
from agentrl.episode.failure_policy import FailurePolicy  # noqa: E402
from agentrl.episode.limits import Limits  # noqa: E402
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots  # noqa: E402
from agentrl.render.registry import make_renderer  # noqa: E402
from agentrl.testing import ScriptedSampler  # noqa: E402
from tests.unit.render.tokenizers import qwen_tokenizer  # noqa: E402

PAGE = Path(__file__).parent / "explanation" / "loss_masks.md"
RESPONSES = (
    '<think>\nMultiply.\n</think>\n\n<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 23}}\n</tool_call>',
    "It is 391.",
    "408.",
)
"""The policy's turns; the length limit cuts the second before its end token."""


@tool(timeout_s=1)
async def multiply(a: int, b: int) -> str:
    """Multiply."""
    return str(a * b)


class Sums(Env):
    """Asks a second question after the first answer."""

    tools = (multiply,)

    def step(self, action):
        """Ask the second question, or end the episode."""
        if "408" in action.content:
            return (), 1.0, True, False, {}
        return (Message("user", "And 17 × 24?"),), 0.0, False, False, {}


def run_episode() -> list[Row]:
    """Return the rows of the episode, rendered with Qwen3's chat format and tokenizer."""
    renderer = make_renderer(qwen_tokenizer(), RenderConfig(format="qwen3"))
    end = (renderer.end_token_id,)
    answers = [(*renderer.encode(text), *(() if text == RESPONSES[1] else end)) for text in RESPONSES]
    runner = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=Sums,
                    renderer=renderer,
                    sampler=ScriptedSampler(answers, version=7),
                    tool_clients={},
                    limits=Limits(8, 4096, 30.0, 128),
                    sampling=SamplingParams(max_new_tokens=128),
                )
            )
        },
        FailurePolicy(FailureConfig()),
        EpisodeSlots(1),
    )
    (rollout,) = asyncio.run(runner.run(Task("sums", (Message("user", "What is 17 × 23?"),)), 1, "sums-0"))
    return rollout.rows


def row_as_text(row: Row, decode: object, start: int) -> str:
    """Return a row token by token as text, from token ``start``."""
    lines = [f"{'':>4}  {'token':<18}{'provenance':<13}{'mask':<6}{'reason':<10}{'log-prob':<10}{'version':<9}request"]
    if start:
        lines.append(f"   …  the first {start} tokens: observed, mask 0")
    for index in range(start, len(row.token_ids)):
        provenance, reason = Provenance(row.provenance[index]), MaskReason(row.mask_reason[index])
        sampled = provenance is Provenance.SAMPLED
        lines.append(
            f"{index:>4}  {_shown(decode, int(row.token_ids[index])):<18}{provenance.name.lower():<13}{row.mask[index]:<6}"
            f"{'' if reason is MaskReason.NONE else reason.name.lower():<10}"
            + (
                f"{row.logprobs[index]:<10.3f}{row.versions[index]:<9}{row.request_ids[row.requests[index]]}"
                if sampled
                else ""
            )
        )
    return "\n".join(line.rstrip() for line in lines)


def _shown(decode: object, token: int) -> str:
    return decode((token,)).replace("\n", "⏎").replace(" ", "␣")


def rows_as_text() -> list[str]:
    """Return both rows as text; the second starts shortly before the fork."""
    renderer = make_renderer(qwen_tokenizer(), RenderConfig(format="qwen3"))
    first, second = run_episode()
    common = next(i for i, (a, b) in enumerate(zip(first.token_ids, second.token_ids, strict=False)) if a != b)
    prompt = int((first.provenance == Provenance.SAMPLED).argmax())
    assert second.fork is not None
    return [row_as_text(first, renderer.decode, prompt - 5), row_as_text(second, renderer.decode, common - 3)]


def page() -> str:
    """Return the page with both rows replaced."""
    text = PAGE.read_text(encoding="utf-8")
    for number, text_of_row in enumerate(rows_as_text()):
        pattern = rf"(<!-- row {number} -->\n```text\n).*?(\n```)"
        text, count = re.subn(
            pattern, lambda match, text_of_row=text_of_row: match[1] + text_of_row + match[2], text, flags=re.DOTALL
        )
        assert count == 1, f"the page has no marker for row {number}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
