"""Unmodified agent programs, started by their recipes, finish a task of several calls; a script plays the policy.

Nothing but the loopback device can be reached. The expected graph of each is in docs/how_to/agent_harnesses.md.
"""

import logging
import os
from pathlib import Path

import pytest
from harness_cases import CASES, Case, check_rollout
from program_episodes import play_program
from requires import require_bubblewrap

from agentrl.config.agent import AgentConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.gateway.harnesses.recipes import installed_harness
from agentrl.gateway.program import check_agent
from agentrl.render.renderer import ChatRenderer

pytestmark = pytest.mark.agents


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
    check_rollout(rollout, generations, case.rows, renderer)
