"""Unmodified agent programs, started by their recipes, finish a task of several calls; a script plays the policy.

Nothing but the loopback device can be reached. The expected graph of each is in docs/agents.md.
"""

import json
import logging
import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from program_episodes import play_program
from requires import require_bubblewrap

from agentrl.audit.run import rollout_faults
from agentrl.batch.provenance import check_rows
from agentrl.config.agent import AgentConfig, HarnessName
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.types import MaskReason
from agentrl.gateway.harnesses.recipes import installed_harness
from agentrl.gateway.program import check_agent
from agentrl.render.renderer import ChatRenderer

pytestmark = pytest.mark.agents


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass
class Case:
    """A program, what the policy says to it, and the graph that comes of it."""

    harness: HarnessName
    environment: str
    script: tuple[str, ...]
    """The turns of the conversation."""
    end: str = "<|im_end|>"
    """The token after each turn; empty if a stop string ends it."""


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


@pytest.mark.parametrize("sandbox", [None, "bubblewrap"])
@pytest.mark.parametrize(
    ("case", "bin_folder"),
    [(case, case.environment) for case in CASES],
    ids=[case.harness for case in CASES],
    indirect=["bin_folder"],
)
def test_a_program_finishes_a_task_with_the_expected_graph(
    case: Case, bin_folder: Path, sandbox: str | None, renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    if sandbox is not None:
        require_bubblewrap()
    installed_harness.cache_clear()  # the check of the version is made once a process
    config = AgentConfig(harness=case.harness, sandbox=sandbox, env={"PATH": f"{bin_folder}:{os.environ['PATH']}"})
    with caplog.at_level(logging.WARNING, "agentrl.gateway.harnesses"):
        check_agent(config, SandboxConfig())
    assert not caplog.records
    rollout, generations = play_program(config, case.script, renderer)
    assert rollout.failure is None, rollout.failure
    assert rollout.reward == 1.0
    check_rows(rollout.rows)
    assert rollout_faults(rollout) == []
    (row,) = rollout.rows
    assert set(row.mask_reason) == {MaskReason.NONE, MaskReason.OBSERVED}
    assert renderer.decode(row.token_ids[row.mask == 1].tolist()) == "".join(turn + case.end for turn in case.script)
    sampled = [generation.token_ids for generation in generations]
    assert row.token_ids[row.mask == 1].tolist() == list(chain(*sampled))
    logprobs = [generation.logprobs for generation in generations]
    assert row.logprobs[row.mask == 1].tolist() == np.array(list(chain(*logprobs)), np.float32).tolist()
