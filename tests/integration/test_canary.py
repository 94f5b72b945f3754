"""The canary in real sandboxes: it passes with all defences, and finds each one that is missing."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest
from dockerd import DockerHost

from agentrl.cli.main import main
from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import ConfigError, MissingError
from agentrl.sandbox.base import ALL_DEFENCES, Defence, SandboxBackend
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend, BubblewrapSandbox
from agentrl.sandbox.canary.check import check_backend, survey, try_backend
from agentrl.sandbox.docker.backend import DockerBackend
from agentrl.sandbox.registry import make_backend

pytestmark = pytest.mark.slow

LIMITS = SandboxLimits(memory_mb=64, processes=24, disk_mb=8, file_mb=4, inodes=256, output_kb=64)
HARMLESS = (Defence.SECCOMP, Defence.INODES, Defence.RUNNER, Defence.ENVIRONMENT, Defence.FILE_SIZE)
"""Defences that the canary may find missing without doing harm to the machine."""


def usable(backend: SandboxBackend) -> SandboxBackend:
    async def start() -> None:
        async with backend:
            pass

    try:
        asyncio.run(start())
    except MissingError as error:
        pytest.skip(f"{backend.name} is not usable here: {error}")
    return backend


@pytest.fixture(scope="module")
def config() -> SandboxConfig:
    config = SandboxConfig(limits=LIMITS)
    usable(BubblewrapBackend(config))
    return config


async def check(backend: SandboxBackend) -> None:
    async with backend:
        await check_backend(backend)


def test_with_all_defences_it_passes_and_logs_a_table(config: SandboxConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        asyncio.run(check(BubblewrapBackend(config)))
    assert "a vsock socket" in caplog.text
    assert " NO " not in caplog.text


def test_docker_passes_too(dockerd: DockerHost) -> None:
    config = SandboxConfig(backend="docker", limits=LIMITS, docker_url=dockerd.url, image=dockerd.image)
    asyncio.run(check(DockerBackend(config)))


@pytest.mark.parametrize("missing_defence", HARMLESS)
def test_a_missing_defence_is_a_refusal_that_names_it(config: SandboxConfig, missing_defence: Defence) -> None:
    with pytest.raises(MissingError, match=rf"does not isolate here\. Possible in it: .*\({missing_defence.value}\)"):
        asyncio.run(check(BubblewrapBackend(config, ALL_DEFENCES - {missing_defence})))


def test_only_what_is_missing_is_named(config: SandboxConfig) -> None:
    async def found() -> set[Defence]:
        async with BubblewrapBackend(config, ALL_DEFENCES - {Defence.INODES}) as backend:
            return {finding.defence for finding in await try_backend(backend) if not finding.was_stopped}

    assert asyncio.run(found()) == {Defence.INODES}


class KilledInTheCheck(BubblewrapBackend):
    """Its first sandboxes of the check are killed from outside."""

    kills = 1

    async def open(self, session_id: str) -> BubblewrapSandbox:
        sandbox = await super().open(session_id)
        if session_id == "canary" and self.kills:
            self.kills -= 1
            os.kill(sandbox.process.pid, signal.SIGKILL)
            sandbox.process.wait(10)  # its runner may answer until then
        return sandbox


def test_a_kill_from_outside_is_no_refusal_and_a_second_one_is(config: SandboxConfig, caplog) -> None:
    asyncio.run(check(KilledInTheCheck(config)))
    assert "all attempts are made again" in caplog.text
    twice = KilledInTheCheck(config)
    twice.kills = 2
    with pytest.raises(MissingError, match="does not work here"):
        asyncio.run(check(twice))


def test_with_a_second_kernel_calls_of_the_filter_are_that_kernels_own(config: SandboxConfig) -> None:
    """The machine's kernel has another name here, as if code ran on a second one, and there is no filter: as with gVisor."""

    class Second(BubblewrapBackend):
        machine_kernel = "another-1.0"

    async def run() -> None:
        async with Second(config, ALL_DEFENCES - {Defence.SECCOMP}) as backend:
            with pytest.raises(MissingError, match="a vsock socket"):
                await check_backend(backend)
            backend.config = config.model_copy(update={"runtime": "runsc"})
            await check_backend(backend)

    asyncio.run(run())


def test_survey_says_why_a_backend_does_not_start(config: SandboxConfig) -> None:
    from rich.console import Console

    nowhere = SandboxConfig(backend="docker", docker_url="unix:///nonexistent/docker.sock")
    result = asyncio.run(survey([BubblewrapBackend(config), DockerBackend(nowhere)]))
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(result)
    assert "POSSIBLE" not in capture.get()
    assert "docker is not usable here: no Docker daemon answers at unix:///nonexistent/docker.sock" in capture.get()


def test_no_sandbox_is_not_tried(config: SandboxConfig) -> None:
    """Its attempts would be made on this machine."""
    from agentrl.sandbox.unsafe_subprocess import UnsafeBackend

    asyncio.run(check(UnsafeBackend(SandboxConfig(backend="unsafe_subprocess"))))


def test_attempts_are_never_made_on_the_machine_itself() -> None:
    from agentrl.sandbox.unsafe_subprocess import UnsafeBackend

    with pytest.raises(ConfigError, match="would harm this machine"):
        asyncio.run(try_backend(UnsafeBackend(SandboxConfig(backend="unsafe_subprocess"))))


def test_files_may_be_bounded_by_memory_alone(config: SandboxConfig) -> None:
    """A disk that is larger than the memory is filled until memory runs out, and the canary goes on."""
    limits = LIMITS.model_copy(update={"disk_mb": 128})
    asyncio.run(check(BubblewrapBackend(config.model_copy(update={"limits": limits}))))


LEAKY = """
from agentrl.sandbox.base import ALL_DEFENCES, Defence
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend


class Leaky(BubblewrapBackend):
    name = "leaky"

    def __init__(self, config):
        super().__init__(config, ALL_DEFENCES - {Defence.INODES})
"""


def test_an_authors_backend_is_tried_as_ours_are(
    config: SandboxConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leaky.py").write_text(LEAKY)
    limits = [f"sandbox.limits.{name}={value}" for name, value in LIMITS.model_dump(exclude_unset=True).items()]
    assert main(("tools", "sandbox", "--backend", f"{tmp_path / 'leaky.py'}:Leaky", *limits)) == 0
    (possible,) = [line for line in capsys.readouterr().out.splitlines() if "POSSIBLE" in line]
    assert "make files without end" in possible
    leaky = make_backend(config.model_copy(update={"backend": f"{tmp_path / 'leaky.py'}:Leaky"}))
    with pytest.raises(MissingError, match=r"sandbox\.backend=leaky does not isolate here"):
        asyncio.run(check(leaky))
