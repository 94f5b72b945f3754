"""Draws the worked example of docs/loss_masks.md: runs it and writes its rows into the page.

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
from agentrl.config.render import RenderConfig  # noqa: E402
from agentrl.config.rollout import FailureConfig  # noqa: E402
from agentrl.core.types import MaskReason, Provenance, Row, SamplingParams  # noqa: E402
from agentrl.episode.failure_policy import FailurePolicy  # noqa: E402
from agentrl.episode.limits import Limits  # noqa: E402
from agentrl.episode.runner import EpisodeRunner  # noqa: E402
from agentrl.render.registry import make_renderer  # noqa: E402
from agentrl.testing import ScriptedSampler  # noqa: E402
from tests.unit.render.tokenizers import qwen_tokenizer  # noqa: E402

PAGE = Path(__file__).parent / "loss_masks.md"
SAYS = (
    '<think>\nMultiply.\n</think>\n\n<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 23}}\n</tool_call>',
    "It is 391.",
    "408.",
)
"""What the policy says; the second turn is cut off by the length, before its end token."""


@tool(timeout_s=1)
async def multiply(a: int, b: int) -> str:
    """Multiply."""
    return str(a * b)


class Sums(Env):
    """Asks once more after the first answer."""

    tools = (multiply,)

    def step(self, action):
        """Ask the second question, or end."""
        if "408" in action.content:
            return (), 1.0, True, False, {}
        return (Message("user", "And 17 × 24?"),), 0.0, False, False, {}


def play() -> list[Row]:
    """Return the rows of the episode, with the renderer of Qwen3 and its real tokenizer."""
    renderer = make_renderer(qwen_tokenizer(), RenderConfig(format="qwen3"))
    end = (renderer.end_token_id,)
    answers = [(*renderer.encode(text), *(() if text == SAYS[1] else end)) for text in SAYS]
    runner = EpisodeRunner(
        env_factory=Sums,
        renderer=renderer,
        sampler=ScriptedSampler(answers, version=7),
        tool_clients={},
        limits=Limits(8, 4096, 30.0, 128),
        sampling=SamplingParams(max_new_tokens=128),
        failure=FailurePolicy(FailureConfig()),
        max_concurrency=1,
    )
    (rollout,) = asyncio.run(runner.run(Task("sums", (Message("user", "What is 17 × 23?"),)), 1, "sums-0"))
    return rollout.rows


def draw(row: Row, decode: object, start: int) -> str:
    """Return a row token by token, from ``start`` on."""
    lines = [
        f"{'':>4}  {'token':<18}{'who made it':<13}{'mask':<6}{'why not':<10}{'log-prob':<10}{'version':<9}request"
    ]
    if start:
        lines.append(f"   …  the first {start} tokens: observed, mask 0")
    for index in range(start, len(row.token_ids)):
        made, why = Provenance(row.provenance[index]), MaskReason(row.mask_reason[index])
        sampled = made is Provenance.SAMPLED
        lines.append(
            f"{index:>4}  {_shown(decode, int(row.token_ids[index])):<18}{made.name.lower():<13}{row.mask[index]:<6}"
            f"{'' if why is MaskReason.NONE else why.name.lower():<10}"
            + (
                f"{row.logprobs[index]:<10.3f}{row.versions[index]:<9}{row.request_ids[row.requests[index]]}"
                if sampled
                else ""
            )
        )
    return "\n".join(line.rstrip() for line in lines)


def _shown(decode: object, token: int) -> str:
    return decode((token,)).replace("\n", "⏎").replace(" ", "␣")


def drawings() -> list[str]:
    """Return the drawing of each row; the second begins a little before it leaves the first."""
    renderer = make_renderer(qwen_tokenizer(), RenderConfig(format="qwen3"))
    first, second = play()
    common = next(i for i, (a, b) in enumerate(zip(first.token_ids, second.token_ids, strict=False)) if a != b)
    prompt = int((first.provenance == Provenance.SAMPLED).argmax())
    assert second.fork is not None
    return [draw(first, renderer.decode, prompt - 5), draw(second, renderer.decode, common - 3)]


def page() -> str:
    """Return the page with the drawings as they are now."""
    text = PAGE.read_text(encoding="utf-8")
    for number, drawing in enumerate(drawings()):
        pattern = rf"(<!-- row {number} -->\n```text\n).*?(\n```)"
        text, count = re.subn(
            pattern, lambda match, drawing=drawing: match[1] + drawing + match[2], text, flags=re.DOTALL
        )
        assert count == 1, f"the page has no place for row {number}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
