"""Recipes of known agent programs: what they start, and the check of what is installed. tests/with_agents runs the programs."""

import asyncio
import json
import logging
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from gateway_episodes import TASK

from agentrl.config.agent import AgentConfig, HarnessName
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import MissingError
from agentrl.gateway.harnesses.recipes import HARNESSES
from agentrl.gateway.program import check_agent
from agentrl.gateway.program_process import ProgramProcess


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


@pytest.mark.parametrize("harness", ["codex", "opencode", "claude_code", "mini_swe_agent", "smolagents"])
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
        process = await ProgramProcess.start(config, TASK, "http://127.0.0.1:9", "sk-1")
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
    if harness in ("mini_swe_agent", "smolagents"):
        assert prompt in [said["words"][0].removeprefix("--task="), said["words"][-1]]
    unknown = given.replace(prompt, "")
    for name in ("$OPENAI", "$ANTHROPIC", "$HOME", "$AGENTRL"):
        assert name not in unknown
    assert len(said["files"]) == len(HARNESSES[harness].home_files)
