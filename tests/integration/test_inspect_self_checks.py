"""inspect-ai's own conformance checks of sandboxes, run against ours through an adapter.

The checks of a backend share a few sandboxes and run at the same time: several of them mostly wait.
"""

import asyncio
import errno
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Literal, overload

import pytest
from dockerd import DockerHost

pytest.importorskip("inspect_ai", reason="inspect-ai is not installed: its self-checks cannot run")

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
)
from inspect_ai.util._sandbox import self_check

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import MissingError
from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import WORK, Job, Sandbox, SandboxBackend
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend
from agentrl.sandbox.docker.backend import DockerBackend

pytestmark = pytest.mark.slow

LIMITS = SandboxLimits(wall_s=30, memory_mb=1024, disk_mb=256, file_mb=128, output_kb=10 * 1024)
"""Room for the checks' files and inputs of 50 MiB."""

EXCEPTIONS = {
    "test_exec_as_user": "a sandbox has one unprivileged user: there is no root in it who could add others, by design",
}
"""Checks that we do not satisfy, and why."""

SANDBOXES = 6

ALONE = {"test_read_file_limit"}
"""Checks that change a limit of the whole process while they run."""

CHECKS: dict[str, Callable[[SandboxEnvironment], Awaitable[None]]] = {
    name: check
    for name, check in inspect.getmembers(self_check, inspect.iscoroutinefunction)
    if name.startswith("test_")
}


class Adapter(SandboxEnvironment):
    """One of our sandboxes as inspect-ai wants it."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__()
        self._sandbox = sandbox
        self._calls = 0

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109  inspect-ai's signature
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        if user is not None:
            raise SandboxUserUnsupportedError(f"no user {user!r}: a sandbox has one user")
        self._calls += 1
        job = Job(
            f"call-{self._calls}",
            argv=tuple(cmd),
            stdin=input.encode() if isinstance(input, str) else input or b"",
            cwd=f"{WORK}/{cwd}" if cwd and not cwd.startswith("/") else cwd or WORK,
            env=env or {},
            wall_s=timeout,
        )
        outcome = await self._sandbox.run(job)
        if outcome.status is ToolStatus.TIMEOUT:
            raise TimeoutError(outcome.detail)
        if outcome.status is ToolStatus.OUTPUT_CUT:
            raise OutputLimitExceededError("10 MiB", outcome.stdout)
        if outcome.exit_code == 126:
            raise PermissionError(errno.EACCES, outcome.stderr.strip(), cmd[0])
        code = outcome.exit_code if outcome.exit_code is not None else 1
        code = 128 - code if code < 0 else code  # as shells report a signal
        return ExecResult(code == 0, code, outcome.stdout, outcome.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        await self._sandbox.write_file(file, contents.encode() if isinstance(contents, str) else contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        try:
            content = await self._sandbox.read_file(file, SandboxEnvironmentLimits.MAX_READ_FILE_SIZE)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
            raise
        return content.decode() if text else content

    @classmethod
    async def sample_cleanup(cls, *arguments: Any, **options: Any) -> None:
        """Nothing: the test closes its sandbox."""


async def run_all(backend: SandboxBackend) -> dict[str, BaseException | None]:
    """Return by check what it raised."""

    free: asyncio.Queue[Sandbox] = asyncio.Queue()

    async def run(name: str) -> BaseException | None:
        sandbox = await free.get()
        try:
            await CHECKS[name](Adapter(sandbox))
        except Exception as error:
            return error
        finally:
            free.put_nowait(sandbox)
        return None

    async with backend:
        for sandbox in await asyncio.gather(*(backend.open(f"check-{number}") for number in range(SANDBOXES))):
            free.put_nowait(sandbox)
        together = [name for name in CHECKS if name not in ALONE]
        results = dict(zip(together, await asyncio.gather(*map(run, together)), strict=True))
        return results | {name: await run(name) for name in ALONE}


Results = dict[str, BaseException | None]


@pytest.fixture(scope="module")
def bubblewrap_results() -> Results:
    try:
        return asyncio.run(run_all(BubblewrapBackend(SandboxConfig(limits=LIMITS))))
    except MissingError as error:
        pytest.skip(f"bubblewrap is not usable here: {error}")


@pytest.fixture(scope="module")
def docker_results(dockerd: DockerHost) -> Results:
    config = SandboxConfig(backend="docker", limits=LIMITS, docker_url=dockerd.url, image=dockerd.image)
    return asyncio.run(run_all(DockerBackend(config)))


def test_all_of_them_are_here() -> None:
    assert len(CHECKS) >= 44
    assert set(EXCEPTIONS) <= set(CHECKS)


@pytest.mark.parametrize("name", sorted(CHECKS))
@pytest.mark.parametrize("backend", ["bubblewrap", pytest.param("docker", marks=pytest.mark.long)])
def test_self_check(name: str, backend: str, request: pytest.FixtureRequest) -> None:
    results: Results = request.getfixturevalue(f"{backend}_results")
    error = results[name]
    if name in EXCEPTIONS:
        assert error is not None, f"{name} passes now: take it off the exceptions"
        pytest.xfail(EXCEPTIONS[name])
    if error is not None:
        raise error
