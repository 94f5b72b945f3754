"""What a script says to each of the known agent programs, and the check of the rollout that comes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from agentrl import Rollout
from agentrl.audit.run import rollout_faults
from agentrl.batch.provenance import check_rows
from agentrl.config.agent import HarnessName
from agentrl.core.types import ForkReason, Generation, MaskReason
from agentrl.render.renderer import ChatRenderer


def call(name: str, **arguments: object) -> str:
    """Return a call as the test renderer's policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass
class Case:
    """A program, and what the policy says to it in a conversation without forks."""

    harness: HarnessName
    environment: str
    """The folder with the program's packages in ``.venv-agents``."""
    script: tuple[str, ...]
    """The turns of the conversation."""
    end: str = "<|im_end|>"
    """The token after each turn; empty if a stop string ends it."""

    @property
    def rows(self) -> list[tuple[ForkReason | None, str]]:
        """The expected rows: only one."""
        return [(None, "".join(turn + self.end for turn in self.script))]


SHELL = ("echo Remu > answer.txt", "cat answer.txt")
CASES = (
    Case(
        "claude_code",
        "node",
        (call("Bash", command=SHELL[0], description="Write"), call("Read", file_path="answer.txt"), "Remu"),
    ),
    Case("codex", "node", (*(call("exec_command", cmd=command) for command in SHELL), "Remu")),
    Case("opencode", "node", (*(call("bash", command=command, description="Do") for command in SHELL), "Remu")),
    Case("openai_agents", "openai_agents", (*(call("shell", command=command) for command in SHELL), "Remu")),
    Case(
        "mini_swe_agent",
        "mini_swe_agent",
        tuple(call("bash", command=command) for command in (*SHELL, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
    ),
    Case(
        "smolagents",
        "smolagents",
        (
            'Thought: write.\n<code>\nfrom pathlib import Path\nPath("answer.txt").write_text("Remu")\n</code>',
            'Thought: read.\n<code>\nprint(Path("answer.txt").read_text())\n</code>',
            '<code>\nfinal_answer("Remu")\n</code>',
        ),
        end="",
    ),
)


def check_rollout(
    rollout: Rollout,
    generations: Sequence[Generation],
    rows: Sequence[tuple[ForkReason | None, str]],
    renderer: ChatRenderer,
) -> None:
    """Check a solved task: its rows, and that each token that the engine sampled is trained once, with its log-probability.

    Args:
        rollout: of the program.
        generations: of the engine, in any order.
        rows: the fork and the trained text of each row.
        renderer: of the policy's chat format.
    """
    assert rollout.failure is None, rollout.failure
    assert rollout.reward == 1.0
    check_rows(rollout.rows)
    assert rollout_faults(rollout) == []
    trained = [renderer.decode(row.token_ids[row.mask == 1].tolist()) for row in rollout.rows]
    assert list(zip((row.fork for row in rollout.rows), trained, strict=True)) == list(rows)
    for row in rollout.rows:
        assert set(row.mask_reason) == {MaskReason.NONE, MaskReason.OBSERVED}
    by_id = {generation.request_id: generation for generation in generations}
    ids = [id for row in rollout.rows for id in row.request_ids]
    assert sorted(ids) == sorted(by_id)
    for row in rollout.rows:
        sampled = [by_id[id] for id in row.request_ids]
        assert row.token_ids[row.mask == 1].tolist() == list(chain(*(generation.token_ids for generation in sampled)))
        logprobs = np.array(list(chain(*(generation.logprobs for generation in sampled))), np.float32)
        assert row.logprobs[row.mask == 1].tolist() == logprobs.tolist()
