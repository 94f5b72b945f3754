"""Recipes of known agent programs: what they start, and the check of what is installed. tests/with_agents runs the programs."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import yaml
from gateway_episodes import TASK, make_test_renderer
from program_episodes import fake_harness, play_program

from agentrl.config.agent import AgentConfig, HarnessName
from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import ConfigError, MissingError
from agentrl.gateway.harnesses.installed import find_program, inspect_program, start_words
from agentrl.gateway.harnesses.recipes import HARNESSES
from agentrl.gateway.program import check_agent
from agentrl.gateway.program_process import ProgramInput, ProgramProcess
from agentrl.gateway.sandboxed_program import check_files, shown_files


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str, str], AgentConfig]:
    """Install a program of Python under a name, and return the configuration whose PATH has it."""

    def install(harness: HarnessName, code: str) -> AgentConfig:
        program = tmp_path / "bin" / HARNESSES[harness].command[0]
        program.parent.mkdir()
        program.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
        program.chmod(0o755)
        return AgentConfig(harness=harness, env={"PATH": str(program.parent)}, model="small")

    return install  # type: ignore[return-value]


def test_every_harness_has_a_recipe() -> None:
    assert set(get_args(HarnessName)) == set(HARNESSES)


@pytest.mark.parametrize("harness", HARNESSES)
def test_a_missing_program_is_named_with_the_command_that_installs_it(harness: HarnessName, tmp_path: Path) -> None:
    with pytest.raises(MissingError) as error:
        check_agent(AgentConfig(harness=harness, env={"PATH": str(tmp_path)}), SandboxConfig())
    message = str(error.value)
    assert f"rollout.agent.harness={harness}: there is no program {HARNESSES[harness].command[0]}" in message
    assert HARNESSES[harness].install in message
    assert "rollout.agent.env.PATH" in message


def test_a_missing_package_is_named_with_the_command_that_installs_it(install) -> None:
    config = install("smolagents", "")
    with pytest.raises(MissingError, match=r"smolagent finds no package smolagents.*pip install 'smolagents\[openai\]"):
        check_agent(config, SandboxConfig())


@pytest.mark.parametrize(
    ("output", "warning"),
    [
        (HARNESSES["claude_code"].tried + " (Claude Code)", None),
        (HARNESSES["claude_code"].tried.rpartition(".")[0] + ".99999", None),
        ("1.0.3 (Claude Code)", "is of version 1.0.3; the recipe was tried with"),
        ("", "is of unknown version; the recipe was tried with"),
    ],
)
def test_another_version_is_a_warning(install, caplog, output: str, warning: str | None) -> None:
    config = install("claude_code", f"print({output!r})")
    with caplog.at_level(logging.WARNING):
        check_agent(config, SandboxConfig())
    assert [warning in record.getMessage() for record in caplog.records] == ([] if warning is None else [True])


@pytest.mark.parametrize("harness", ["codex", "opencode", "claude_code", "mini_swe_agent"])
def test_a_program_gets_words_variables_files_and_the_prompt(install, harness: HarnessName) -> None:
    code = """
        import json, os, sys
        from pathlib import Path
        home = Path(os.environ["HOME"])
        files = {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()}
        said = {"words": sys.argv[1:], "env": dict(os.environ), "files": files, "prompt": sys.stdin.read()}
        Path("said.json").write_text(json.dumps(said))
    """
    prompt = 'Say "$HOME"; é ' + "x" * 101_000
    config = install(harness, code).model_copy(update={"prompt": prompt})

    async def run() -> dict:
        process = await ProgramProcess.start(config, ProgramInput.from_task(config, TASK), "http://127.0.0.1:9", "sk-1")
        try:
            assert await process.ended == "", process.output_end()
            return json.loads((process.cwd / "said.json").read_text())
        finally:
            await process.close()

    said = asyncio.run(run())
    assert said["prompt"] == prompt
    assert "AGENTRL_PROMPT" not in said["env"]
    assert said["env"].items() >= HARNESSES[harness].env.items()
    given = "\n".join([*said["words"], *said["files"].values(), *said["env"].values()])
    assert "small" in given
    assert "http://127.0.0.1:9" in given
    if harness == "mini_swe_agent":
        assert yaml.safe_load(said["files"].pop("task.yaml")) == {"run": {"task": prompt}}
    for name in ("$OPENAI", "$ANTHROPIC", "$AGENTRL", "$PROMPT"):
        assert name not in "\n".join([*said["words"], *said["files"].values()])


def test_a_prompt_of_any_length_and_letter_reaches_programs_that_want_it_as_a_word(tmp_path: Path) -> None:
    prompt = "\U0001f642 \u2028\x7f\x01 : # 'a' \"b\"\n\t- c\\n $HOME" + " é" * 100_000
    files = HARNESSES["mini_swe_agent"].files({"AGENTRL_PROMPT": prompt})
    assert yaml.safe_load(files["task.yaml"]) == {"run": {"task": prompt}}
    (tmp_path / "smolagents").mkdir()
    (tmp_path / "smolagents" / "__init__.py").touch()
    (tmp_path / "smolagents" / "cli.py").write_text("import sys\nmain = lambda: print(ascii(sys.argv[1:]))")
    script = HARNESSES["smolagents"].script
    done = subprocess.run(
        [sys.executable, "-S", str(script), "--tools", "--"],
        input=prompt, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, encoding="utf-8",
    )  # fmt: skip
    assert done.stdout == f"{['--tools', '--', prompt]!a}\n", done.stderr


PYTHON = os.path.realpath(sys.executable)


@pytest.mark.parametrize("first", [f"#!/usr/bin/env -S {PYTHON} -E", f"#!/bin/sh\n'''exec' {PYTHON} \"$0\" \"$@\""])
def test_the_interpreter_of_a_script_is_read_however_it_is_written(tmp_path: Path, first: str) -> None:
    (tmp_path / "prog").write_text(first)
    (tmp_path / "prog").chmod(0o755)
    (tmp_path / "link").symlink_to("prog")
    program = find_program("link", None, str(tmp_path))
    assert program is not None
    assert program["path"] == str(tmp_path / "prog")
    assert start_words(program) == [PYTHON, program["path"]]
    assert PYTHON in inspect_program(program, None, str(tmp_path), {})["files"]


def test_a_program_in_a_sandbox_gets_words_variables_files_and_the_prompt(tmp_path: Path, caplog) -> None:
    """The sandbox is one without isolation, which starts at once; tests/integration has bubblewrap and Docker."""
    config = fake_harness(tmp_path, sandbox="unsafe_subprocess")
    with caplog.at_level(logging.INFO, "agentrl.gateway"):
        check_agent(config, SandboxConfig(limits=SandboxLimits(memory_mb=4096)))
    (text,) = [record.getMessage() for record in caplog.records if "raises" in record.getMessage()]
    assert text.startswith(
        "rollout.agent.harness=codex raises sandbox.limits of its sandboxes: cpu_s=600, processes=256"
    )
    assert "memory_mb" not in text
    rollout, _ = play_program(config, ["Remu"], make_test_renderer())
    assert rollout.failure is None, rollout.failure
    assert rollout.reward == 1.0


IMAGES = """
from agentrl.sandbox.unsafe_subprocess import UnsafeBackend

class Images(UnsafeBackend):
    has_images = True
"""


def test_a_program_of_an_image_is_looked_for_in_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "images.py").write_text(IMAGES)
    config = fake_harness(tmp_path, sandbox=f"{tmp_path}/images.py:Images")
    check_agent(config.model_copy(update={"env": {"PATH": "/nowhere"}}), SandboxConfig())
    rollout, _ = play_program(config, ["Remu"], make_test_renderer())
    assert rollout.reward == 1.0, rollout.failure
    with pytest.raises(
        MissingError, match=r"there is no program codex .* with sandbox.image=own:1\. Install it in the image"
    ):
        play_program(
            config.model_copy(update={"env": {}}), ["Remu"], make_test_renderer(), SandboxConfig(image="own:1")
        )


def test_a_program_of_the_runs_own_environment_is_not_shown_in_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    installation = {"version": "1", "has_distribution": True, "fault": "", "files": [sys.prefix, str(tmp_path)]}
    assert shown_files(installation)
    with pytest.raises(
        ConfigError, match=r"openai_agents is installed in this process's Python environment.*python3 -m venv"
    ):
        check_files(AgentConfig(harness="openai_agents"), shown_files(installation), "pip install openai-agents")
