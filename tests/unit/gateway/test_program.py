"""Agent programs as processes: what they get, how they end, and that nothing of them is left."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from deadlines import wait_until
from gateway_episodes import TASK

from agentrl import Rollout
from agentrl.config.agent import AgentConfig
from agentrl.config.recorded import SAMPLED, changed_keys, recorded_keys
from agentrl.config.rollout import FailureConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.config.schema import Config
from agentrl.core.env import Env
from agentrl.core.errors import ConfigError, SamplerError
from agentrl.core.types import FailureKind, SamplingParams, StopReason
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.gateway.program import AgentProgram, check_agent
from agentrl.render.renderer import ChatRenderer
from agentrl.testing import ScriptedSampler

ASK = """
import json, os, sys, time, urllib.request

def ask(*messages, **fields):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **fields}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

prompt = {"role": "user", "content": os.environ["AGENTRL_PROMPT"]}
"""


def run_program(
    renderer: ChatRenderer,
    folder: Path,
    code: str,
    script: Any,
    *,
    action: str = "drop",
    episodes: int = 1,
    **limits: Any,
) -> list[Rollout]:
    """Play episodes with a program of Python."""
    path = folder / "agent.py"
    path.write_text(ASK + textwrap.dedent(code))
    agent = {"command": f"{sys.executable} {path}"} | limits.pop("agent", {})
    config = AgentConfig(prompt="{prompt} Think.", **agent)
    bounds = {"max_turns": 8, "max_tokens": 4096, "max_seconds": 20.0, "max_new_tokens": 64} | limits
    sampler = ScriptedSampler(script, encode=renderer.encode, end_token_id=renderer.end_token_id)
    context = EpisodeContext(Env, renderer, sampler, {}, Limits(**bounds), SamplingParams(seed=5))
    failure = FailureConfig(sampler="drop", agent=action, max_failed_share=1)
    settings = EpisodeSettings(context, generate=AgentProgram(config, SandboxConfig()), grader=FolderGrader())
    runner = EpisodeRunner({"": settings}, FailurePolicy(failure), EpisodeSlots(8))
    return asyncio.run(runner.run_many([Job(TASK, 1, f"e{number}") for number in range(episodes)]))


class FolderGrader:
    """Gives the length of what the program wrote as the reward."""

    group = False

    async def grade(self, rollouts, tools=None):
        for rollout in rollouts:
            folder = Path(rollout.metadata.get("agent_folder", "/nowhere"))
            rollout.reward = float(len((folder / "answer.txt").read_text())) if folder.is_dir() else -1.0


def test_a_program_plays_episodes_and_its_files_are_there_for_the_reward(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    code = """
        first = ask(prompt)
        task = json.load(open(os.environ["AGENTRL_TASK"]))
        assert "answer" not in task and task["id"] == "t", task
        second = ask(prompt, first, {"role": "user", "content": "more"})
        assert not os.listdir(".") and os.environ["HOME"] != os.environ["TMPDIR"]
        open("answer.txt", "w").write(second["content"])
    """
    rollouts = run_program(renderer, tmp_path, code, lambda request: "ab" * (1 + request.turn), episodes=4)
    for rollout in rollouts:
        assert rollout.failure is None, rollout.failure
        assert [turn.action for turn in rollout.turns] == ["ab", "abab"]
        assert rollout.reward == 4.0
        assert rollout.prompt.count("Where does it lie? Think.") == 1
        assert not Path(rollout.metadata["agent_folder"]).exists()
    assert len({rollout.metadata["agent_folder"] for rollout in rollouts}) == 4


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("print('I am lost'); sys.exit(3)", r"ended with exit status 3\..*I am lost"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("pass", "ended without a turn of the policy"),
        ("ask(prompt); time.sleep(60)", r"did not end within rollout.max_seconds=1"),
        ("ask(prompt, n=2)", "Its last refused request: n=2: a request is for one turn"),
    ],
)
def test_a_program_that_fails_is_a_named_failure(renderer: ChatRenderer, tmp_path: Path, code: str, fault: str) -> None:
    (rollout,) = run_program(renderer, tmp_path, code, ["a"], max_seconds=1.0 if "sleep" in code else 20.0)
    assert rollout.failure is not None
    assert rollout.failure.kind is FailureKind.AGENT
    assert rollout.failure.error == "AgentProgramError"
    assert re.search(fault, rollout.failure.message, re.DOTALL), rollout.failure.message
    assert rollout.dropped
    assert rollout.stop_reason is StopReason.FAILED


def test_a_program_that_is_to_post_its_reward_and_does_not(renderer: ChatRenderer, tmp_path: Path) -> None:
    session = {"agent": {"reward": "session"}}
    (rollout,) = run_program(renderer, tmp_path, "ask(prompt)", ["a"], **session)
    assert rollout.failure is not None
    assert "it ended without posting the reward to /v1/session/reward" in rollout.failure.message
    (rollout,) = run_program(
        renderer,
        tmp_path,
        "open('answer.txt', 'w').write('x'); ask(prompt), ask(prompt)",
        ["a"],
        max_turns=1,
        **session,
    )
    assert rollout.failure is None  # a limit ended it


def test_a_program_in_a_sandbox_leaves_its_files_for_the_reward(renderer: ChatRenderer, tmp_path: Path) -> None:
    """`unsafe_subprocess` has the sandbox's interface, and starts at once."""
    code = """
        import shutil
        reply = ask(prompt)
        assert json.load(open(os.environ["AGENTRL_TASK"]))["id"] == "t"
        assert os.access("tools/run", os.X_OK) and not os.access("agent.py", os.X_OK)
        os.mkdir("folder")
        os.symlink("/etc/passwd", "folder/link")
        open("answer.txt", "w").write(reply["content"])
        print("almost done")
        sys.exit(len(reply["content"]) - 2)
    """
    agent = {"command": "python3 agent.py", "files": tmp_path, "sandbox": "unsafe_subprocess"}
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "tools" / "run").chmod(0o755)
    rollouts = run_program(renderer, tmp_path, code, lambda request: "ab", agent=agent, episodes=2)
    assert [rollout.failure for rollout in rollouts] == [None, None]
    assert [rollout.reward for rollout in rollouts] == [2.0, 2.0]
    assert not any(Path(rollout.metadata["agent_folder"]).exists() for rollout in rollouts)
    agent = {"command": "python3 agent.py", "files": tmp_path, "sandbox": "unsafe_subprocess"}
    (rollout,) = run_program(renderer, tmp_path, code, ["abc"], agent=agent)
    assert rollout.failure is not None
    assert rollout.failure.kind is FailureKind.AGENT
    assert "ended with exit status 1. The end of its output:\nalmost done" in rollout.failure.message


def test_limits_are_plain_text_and_no_failure(renderer: ChatRenderer, tmp_path: Path) -> None:
    code = """
        messages = [prompt]
        for turn in range(4):
            reply = ask(*messages)
            messages += [reply, {"role": "user", "content": "more"}]
        assert "rollout.max_turns" in reply["content"], reply
        open("answer.txt", "w").write(reply["content"])
        sys.exit(1)
    """
    (rollout,) = run_program(renderer, tmp_path, code, lambda request: "a", max_turns=3)
    assert rollout.failure is None, rollout.failure
    assert rollout.stop_reason is StopReason.MAX_TURNS
    assert [turn.action for turn in rollout.turns] == ["a"] * 3


def test_a_failing_engine_is_never_the_programs_fault(renderer: ChatRenderer, tmp_path: Path) -> None:
    (rollout,) = run_program(renderer, tmp_path, "ask(prompt)", [SamplerError("gone")])
    assert rollout.failure is not None
    assert rollout.failure.kind is FailureKind.SAMPLER


def test_nothing_of_a_program_is_left_after_its_end(renderer: ChatRenderer, tmp_path: Path) -> None:
    code = """
        ask(prompt)
        open("answer.txt", "w").close()
        if not os.fork():
            os.setsid()
            if not os.fork():
                open("detached", "w").close()
                os.execvp("sleep", ["sleep", "1234.5"])
            os._exit(0)
        while not os.path.exists("detached"):
            pass
    """
    (rollout,) = run_program(renderer, tmp_path, code, ["a"])
    assert rollout.failure is None, rollout.failure
    assert not processes_with("1234.5")


def test_nothing_of_a_program_is_left_after_a_kill_of_its_supervisor(renderer: ChatRenderer, tmp_path: Path) -> None:
    code = """
        import signal
        ask(prompt)
        os.posix_spawn("/bin/sleep", ["sleep", "2345.6"], os.environ, setsid=True)
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    """
    (rollout,) = run_program(renderer, tmp_path, code, ["a"])
    assert rollout.failure is not None
    assert "was ended by SIGKILL" in rollout.failure.message
    assert not processes_with("2345.6")


def processes_with(text: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in command:
                found.append(int(name))
    return found


def test_nothing_of_a_program_is_left_after_a_kill_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "episode"
    folder.mkdir()
    ready = tmp_path / "ready"
    script = f"echo > {ready}; (setsid sleep 4321.5 &) ; sleep 4321.5"
    (folder / "prompt.txt").touch()
    (folder / "start.json").write_text(
        json.dumps({"command": ["sh", "-c", script], "cwd": str(tmp_path), "env": {"PATH": os.environ["PATH"]}})
    )
    code = f"""
        import os, sys
        from pathlib import Path
        from agentrl.core.child_process import ChildProcess
        from agentrl.gateway import supervisor
        reading, writing = os.pipe()
        child = ChildProcess.start(
            [sys.executable, "-I", "-S", supervisor.__file__, {str(folder)!r}, str(writing)],
            log=Path({str(tmp_path / "log")!r}), name="agent", pass_fds=(writing,),
        )
        print("started", flush=True)
        os.read(0, 1)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    wait_until(lambda: len(processes_with("4321.5")) >= 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not processes_with("4321.5") and not folder.exists())


def test_what_cannot_be_started_is_said_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no program nowhere-to-be-found"):
        check_agent(AgentConfig(command="nowhere-to-be-found agent.py"), SandboxConfig())
    with pytest.raises(ConfigError, match=r"rollout\.agent\.files=.*missing is no folder"):
        check_agent(AgentConfig(command="sh -c true", files=tmp_path / "missing"), SandboxConfig())
    with pytest.raises(ConfigError, match="No closing quotation"):
        check_agent(AgentConfig(command="sh 'a"), SandboxConfig())


def test_the_code_of_a_program_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("import helper\n")
    Path("helper.py").write_text("A = 1\n")
    config = Config.model_validate({"rollout": {"agent": {"command": "python agent.py --fast"}}})
    keys = recorded_keys(config)
    Path("helper.py").write_text("A = 2\n")
    assert [change.key for change in changed_keys(keys, recorded_keys(config), SAMPLED)] == ["code of helper.py"]
