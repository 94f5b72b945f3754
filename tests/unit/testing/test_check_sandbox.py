"""The contract check of sandbox backends: shipped ones pass, and each broken rule is named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import MissingError, SandboxFailure
from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import Job, Outcome, Sandbox
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend
from agentrl.sandbox.unsafe_subprocess import UnsafeBackend, UnsafeSandbox
from agentrl.testing import ContractError, check_sandbox

CONFIG = SandboxConfig(backend="unsafe_subprocess", limits=SandboxLimits(wall_s=20))


def test_a_backend_without_isolation_passes() -> None:
    check_sandbox(UnsafeBackend(CONFIG))


def test_bubblewrap_passes() -> None:
    try:
        check_sandbox(BubblewrapBackend(SandboxConfig()))
    except MissingError as error:
        pytest.skip(f"bubblewrap: {error}")


async def run_as_ok(sandbox: UnsafeSandbox, job: Job, run: Callable[..., Any]) -> Outcome:
    return replace(await run(sandbox, job), status=ToolStatus.OK)


async def run_without_stdin(sandbox: UnsafeSandbox, job: Job, run: Callable[..., Any]) -> Outcome:
    outcome: Outcome = await run(sandbox, replace(job, stdin=b""))
    return outcome


async def run_stateless(sandbox: UnsafeSandbox, job: Job, run: Callable[..., Any]) -> Outcome:
    outcome: Outcome = await run(sandbox, replace(job, stateful=False))
    return outcome


async def run_after_close(sandbox: UnsafeSandbox, job: Job, run: Callable[..., Any]) -> Outcome:
    try:
        outcome: Outcome = await run(sandbox, job)
    except SandboxFailure:
        return Outcome(ToolStatus.KILLED, "", "", None, 0.0)
    return outcome


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (run_as_ok, "code that raises must have status error"),
        (run_without_stdin, "code must see its standard input"),
        (run_stateless, "stateful jobs must keep variables"),
        (run_after_close, "a call in a closed sandbox must raise SandboxFailure"),
    ],
)
def test_a_broken_run_is_named(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any], message: str) -> None:
    run = UnsafeSandbox.run
    monkeypatch.setattr(UnsafeSandbox, "run", lambda sandbox, job: broken(sandbox, job, run))
    with pytest.raises(ContractError, match=message):
        check_sandbox(UnsafeBackend(CONFIG))


def test_files_that_are_cut_in_place_of_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = UnsafeSandbox.read_file

    async def cut(sandbox: Sandbox, path: str, max_bytes: int = 2**20) -> bytes:
        assert isinstance(sandbox, UnsafeSandbox)
        return (await read(sandbox, path))[:max_bytes]

    monkeypatch.setattr(UnsafeSandbox, "read_file", cut)
    with pytest.raises(
        ContractError, match="a file above max_bytes must not be read: OSError must be raised; 100 bytes"
    ):
        check_sandbox(UnsafeBackend(CONFIG))


def test_a_backend_without_a_name() -> None:
    class Nameless(UnsafeBackend):
        name = ""

    with pytest.raises(ContractError, match="Nameless must have a name"):
        check_sandbox(Nameless(CONFIG))
