"""Unmodified agent programs with two subagents at once, and with a conversation that they compact in the middle of a task."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from harness_cases import call, check_rollout
from program_episodes import ASSISTANT, TASK, play_program

from agentrl.config.agent import AgentConfig
from agentrl.core.types import ForkReason
from agentrl.gateway.harnesses.recipes import HARNESSES
from agentrl.render.renderer import ChatRenderer

pytestmark = pytest.mark.agents

END = "<|im_end|>"
SUMMARY = "The name is in answer.txt; it is to be read."


@pytest.mark.parametrize("bin_folder", ["node"], indirect=True)
def test_two_subagents_of_claude_code_are_rows_beside_that_of_the_main_agent(
    bin_folder: Path, renderer: ChatRenderer
) -> None:
    """Both have the same system prompt and tools: the second one's fork cannot be told from a compaction of the first."""

    def delegate(part: str) -> str:
        prompt = f"Subtask {part}: write your part into {part}.txt."
        options = {"subagent_type": "general-purpose", "run_in_background": False}
        return call("Agent", description=f"Part {part}", prompt=prompt, **options)

    def bash(command: str) -> str:
        return call("Bash", command=command, description="Do")

    join = bash("cat one.txt two.txt | tr -d '\\n' > answer.txt")
    scripts = {
        TASK.question: (delegate("one") + delegate("two"), join, "Remu"),
        "Subtask one": (bash("echo Re > one.txt"), "one.txt is there"),
        "Subtask two": (bash("echo mu > two.txt"), "two.txt is there"),
    }

    def speak(prompt: str) -> str:
        """Return the next turn of the agent whose task is in the prompt; that of the main agent names the subtasks, too."""
        script = next(turns for task, turns in scripts.items() if task in prompt)
        return script[prompt.count(ASSISTANT) - 1]

    config = AgentConfig(harness="claude_code", env={"PATH": f"{bin_folder}:{os.environ['PATH']}"})
    rollout, generations = play_program(config, speak, renderer)
    main, one, two = ("".join(turn + END for turn in turns) for turns in scripts.values())
    subagents = [(ForkReason.BRANCH, one), (ForkReason.CONTEXT, two)]
    if rollout.rows[1:] and "two.txt" in renderer.decode(rollout.rows[1].token_ids[rollout.rows[1].mask == 1].tolist()):
        subagents = [(ForkReason.BRANCH, two), (ForkReason.CONTEXT, one)]  # the second one was faster
    check_rollout(rollout, generations, [(None, main), *subagents], renderer)


@pytest.mark.parametrize("bin_folder", ["node"], indirect=True)
def test_codex_compacts_its_conversation(
    bin_folder: Path, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shortens results for the request of the summary, which is a fork, and goes on behind the summary, which is another."""
    recipe = HARNESSES["codex"]
    ((name, text),) = recipe.home_files.items()
    compacting = replace(recipe, home_files={name: f"model_auto_compact_token_limit = 36000\n{text}"})
    monkeypatch.setitem(HARNESSES, "codex", compacting)
    before = tuple(call("exec_command", cmd=command) for command in ("seq 3000; echo Remu > answer.txt", "pwd"))
    after = (call("exec_command", cmd="cat answer.txt"), "Remu")

    def speak(prompt: str) -> str:
        turns = prompt.count(ASSISTANT)
        if SUMMARY in prompt:
            return after[turns - 1]
        return SUMMARY if "CONTEXT CHECKPOINT COMPACTION" in prompt else before[turns - 1]

    config = AgentConfig(harness="codex", env={"PATH": f"{bin_folder}:{os.environ['PATH']}"})
    rollout, generations = play_program(config, speak, renderer)
    rows = [(None, "".join(turn + END for turn in before))]
    rows += [(ForkReason.CONTEXT, SUMMARY + END), (ForkReason.CONTEXT, "".join(turn + END for turn in after))]
    check_rollout(rollout, generations, rows, renderer)


@pytest.mark.parametrize("bin_folder", ["node"], indirect=True)
def test_opencode_compacts_its_conversation(
    bin_folder: Path, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary is requested in another conversation; that of the task begins again behind it."""
    recipe = HARNESSES["opencode"]
    ((name, text),) = recipe.home_files.items()
    limits = '"tool_call": true, "limit": {"context": 44000, "output": 4000}'
    assert '"tool_call": true' in text
    compacting = replace(recipe, home_files={name: text.replace('"tool_call": true', limits)})
    monkeypatch.setitem(HARNESSES, "opencode", compacting)
    before = (call("bash", command="seq 3000; echo Remu > answer.txt", description="Write"), "It is written.")
    after = (call("bash", command="cat answer.txt", description="Read"), "Remu")

    def speak(prompt: str) -> str:
        turns = prompt.count(ASSISTANT)
        if SUMMARY in prompt:  # it is the assistant's turn in front of the next one
            return after[turns - 2]
        return SUMMARY if "<conversation>" in prompt else before[turns - 1]

    config = AgentConfig(harness="opencode", env={"PATH": f"{bin_folder}:{os.environ['PATH']}"})
    rollout, generations = play_program(config, speak, renderer)
    rows = [(None, "".join(turn + END for turn in before)), (ForkReason.BRANCH, SUMMARY + END)]
    check_rollout(rollout, generations, [*rows, (ForkReason.CONTEXT, "".join(turn + END for turn in after))], renderer)
