"""The contract of sandbox backends, for their authors' tests, and a fake sandbox for tests of tools."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

from typing_extensions import override

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import SandboxFailure
from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import WORK, Job, Outcome, Sandbox, SandboxBackend
from agentrl.testing.contract import require


def echo_code(job: Job) -> Outcome:
    """Return an outcome that prints the job's code."""
    return Outcome(ToolStatus.OK, job.code or "", "", 0, 0.0)


class FakeSandbox(Sandbox):
    """Answers jobs with a function, and keeps files in memory."""

    def __init__(self, name: str = "fake", answer: Callable[[Job], Outcome] = echo_code) -> None:
        """Create an open sandbox that answers each job with ``answer``."""
        self.id = name
        self.gate = asyncio.Event()
        """Jobs wait for it; it is set at the start."""
        self.gate.set()
        self.jobs: list[Job] = []
        self.files: dict[str, bytes] = {}
        self.closed = False
        self.broken = False
        """Set it to end the sandbox as a failure would."""
        self._answer = answer
        self.running = False
        """Whether a job waits for the gate."""

    @property
    @override
    def alive(self) -> bool:
        return not self.broken and not self.closed

    @override
    async def run(self, job: Job) -> Outcome:
        if not self.alive:
            raise SandboxFailure(f"sandbox {self.id} is gone")
        assert not self.running, "two calls at once in one sandbox"
        self.jobs.append(job)
        self.running = True
        try:
            await self.gate.wait()
        finally:
            self.running = False
        return self._answer(job)

    @override
    async def write_file(self, path: str, content: bytes) -> None:
        self.files[path] = content

    @override
    async def read_file(self, path: str, max_bytes: int = 2**20) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file", path)
        return self.files[path]

    @override
    async def close(self) -> None:
        self.closed = True


class FakeSandboxBackend(SandboxBackend):
    """Opens `FakeSandbox`es, or fails with ``fault``."""

    name = "fake"

    def __init__(self, config: SandboxConfig | None = None) -> None:
        """Create a backend that has opened nothing."""
        super().__init__(config or SandboxConfig())
        self.opened: list[FakeSandbox] = []
        self.fault: Exception | None = None

    @override
    async def start(self) -> None: ...

    @override
    async def open(self, session_id: str) -> FakeSandbox:
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        self.opened.append(FakeSandbox(session_id))
        return self.opened[-1]

    @override
    async def close(self) -> None: ...

    @property
    def alive(self) -> list[FakeSandbox]:
        """Sandboxes that can take another call."""
        return [sandbox for sandbox in self.opened if sandbox.alive]


_CONTENT = bytes(range(256)) * 16
_ORPHAN = """
import os, time
if os.fork() == 0:
    time.sleep(0.5)
    open("orphan", "w").close()
    os._exit(0)
"""


def check_sandbox(backend: SandboxBackend) -> None:
    """Check that a backend and its sandboxes keep the contract of `agentrl.sandbox.base`. Not for use in an event loop.

    It opens sandboxes and runs jobs in them: results and their status, limits of time and output, files, stateful jobs,
    processes that are left behind, concurrent calls, and closing. Isolation is not checked: for that there is
    ``agentrl tools sandbox --backend NAME``.

    Example::

        check_sandbox(FirecrackerBackend(SandboxConfig(backend="firecracker")))

    Args:
        backend: not started; it is closed at the end.

    Raises:
        ContractError: what the backend does, and what it should do.
        MissingError, SandboxFailure: it cannot be used on this machine.
    """
    name = getattr(backend, "name", "")
    require(isinstance(name, str) and bool(name), f"{type(backend).__name__} must have a name")
    backend.check(backend.config)
    asyncio.run(_check(backend))


async def _check(backend: SandboxBackend) -> None:
    async with backend:
        first, second = await asyncio.gather(backend.open("check-1"), backend.open("check-2"))
        require(first.id != second.id, f"sandboxes must have different ids, both have {first.id!r}")
        for check in (_check_outcomes, _check_limits, _check_files, _check_state, _check_processes):
            require(first.alive, "a sandbox must be alive until it fails or is closed")
            await check(first)
        await first.write_file("first", b"")
        await _require_os_error(second.read_file("first"), errno.ENOENT, "a file of another sandbox must not exist")
        await _check_closing(first)
        outcome = await second.run(Job("after", code="print(1)"))
        require(outcome.stdout == "1\n", f"a sandbox must work after another was closed; it returned {outcome!r}")
    require(not second.alive, "closing a backend must close its sandboxes")


def _expect(outcome: Outcome, status: ToolStatus, description: str) -> None:
    require(outcome.status is status, f"{description} must have status {status.value}; the outcome is {outcome!r}")


async def _check_outcomes(sandbox: Sandbox) -> None:
    code = "import os, sys; print(sys.stdin.read(), os.environ['NAME'], os.getcwd())"
    success = await sandbox.run(Job("ok", code=code, stdin=b"in", env={"NAME": "value"}))
    _expect(success, ToolStatus.OK, "code that ends normally")
    require(success.exit_code == 0, f"its exit code must be 0, not {success.exit_code}")
    words = success.stdout.split()
    require(
        words[:2] == ["in", "value"], f"code must see its standard input and environment; it printed {success.stdout!r}"
    )
    failed = await sandbox.run(Job("error", code="print('begun')\n1 / 0"))
    _expect(failed, ToolStatus.ERROR, "code that raises")
    require(failed.exit_code == 1, f"the exit code of code that raises must be 1, not {failed.exit_code}")
    require(failed.stdout == "begun\n", f"output before an error must be kept; it is {failed.stdout!r}")
    require("ZeroDivisionError" in failed.stderr, f"standard error must have the traceback; it is {failed.stderr!r}")
    program = await sandbox.run(Job("program", argv=("/bin/sh", "-c", "echo out; echo err >&2; exit 3")))
    _expect(program, ToolStatus.ERROR, "a program with exit status 3")
    returned = (program.exit_code, program.stdout, program.stderr)
    require(
        returned == (3, "out\n", "err\n"), f"a program's exit status and output must be returned; they are {returned!r}"
    )


async def _check_limits(sandbox: Sandbox) -> None:
    slow = await sandbox.run(Job("slow", code="print('begun', flush=True)\nimport time; time.sleep(60)", wall_s=0.5))
    _expect(slow, ToolStatus.TIMEOUT, "code that exceeds wall_s")
    require(bool(slow.detail), "the outcome of a limit must have a detail")
    long = await sandbox.run(Job("long", code="while True: print('x' * 100)", output_bytes=1000))
    _expect(long, ToolStatus.OUTPUT_CUT, "code that prints more than output_bytes")
    output_length = len(long.stdout) + len(long.stderr)
    require(output_length <= 1000, f"of output_bytes=1000, {output_length} characters were kept")


async def _check_files(sandbox: Sandbox) -> None:
    await sandbox.write_file("folder/file", _CONTENT)
    require(await sandbox.read_file("folder/file") == _CONTENT, "a file must have the content that was written")
    if (await sandbox.run(Job("where", code="import os; print(os.getcwd())"))).stdout.strip() == WORK:
        require(await sandbox.read_file(f"{WORK}/folder/file") == _CONTENT, f"relative paths must start at {WORK}")
    seen = await sandbox.run(Job("seen", code="print(len(open('folder/file', 'rb').read()))"))
    require(seen.stdout == f"{len(_CONTENT)}\n", f"code must see written files in its working directory; {seen!r}")
    await sandbox.write_file("folder/file", b"")
    require(await sandbox.read_file("folder/file") == b"", "writing must replace a file")
    await sandbox.write_file("large", _CONTENT)
    await _require_os_error(sandbox.read_file("large", 100), errno.EFBIG, "a file above max_bytes must not be read")
    await _require_os_error(sandbox.read_file("missing"), errno.ENOENT, "a missing file must not be read")


async def _require_os_error(reading: Awaitable[bytes], number: int, rule: str) -> None:
    try:
        content = await reading
    except OSError as error:
        require(
            error.errno == number, f"{rule}: OSError must have errno {errno.errorcode[number]}, it is {error!r}", error
        )
        return
    require(False, f"{rule}: OSError must be raised; {len(content)} bytes were returned")


async def _check_state(sandbox: Sandbox) -> None:
    await sandbox.run(Job("set", code="value = 41", stateful=True))
    outcome = await sandbox.run(Job("get", code="print(value + 1)", stateful=True))
    require(outcome.stdout == "42\n", f"stateful jobs must keep variables; the second one returned {outcome!r}")
    fresh = await sandbox.run(Job("fresh", code="print('value' in globals())"))
    require(fresh.stdout == "False\n", f"other jobs must not see variables of stateful ones; one returned {fresh!r}")


async def _check_processes(sandbox: Sandbox) -> None:
    _expect(await sandbox.run(Job("orphan", code=_ORPHAN)), ToolStatus.OK, "code that leaves a process behind")
    await asyncio.sleep(1.0)
    await _require_os_error(
        sandbox.read_file("orphan"), errno.ENOENT, "processes that a job leaves behind must be killed"
    )
    outcomes = await asyncio.gather(*(sandbox.run(Job(f"{i}", code=f"print({i})")) for i in range(4)))
    outputs = [outcome.stdout for outcome in outcomes]
    require(
        outputs == [f"{i}\n" for i in range(4)], f"concurrent calls must get their own outcomes; they got {outputs}"
    )


async def _check_closing(sandbox: Sandbox) -> None:
    await sandbox.close()
    await sandbox.close()
    require(not sandbox.alive, "a closed sandbox must not be alive")
    try:
        outcome = await sandbox.run(Job("late", code="print(1)"))
    except SandboxFailure:
        return
    require(False, f"a call in a closed sandbox must raise SandboxFailure; it returned {outcome!r}")
