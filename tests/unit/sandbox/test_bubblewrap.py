"""Real bubblewrap: what a sandbox is made of, how it ends, and what stays behind, which is nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import until, wait_until

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import ConfigError, MissingError, SandboxFailure
from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import ALL_DEFENCES, Defence, Job, Sandbox
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend, BubblewrapSandbox
from agentrl.sandbox.bubblewrap.options import FIRST_HOST_USER, check_paths, tmpfs_options
from agentrl.sandbox.cgroup import CGROUP_VARIABLE
from tests.unit.sandbox.bubblewraps import LIMITS, Bubblewrap, other_backend


def own_groups(pid: int) -> list[Path]:
    """Return the groups of a server's sandboxes that there are."""
    return [path for path in Path("/sys/fs/cgroup").glob(f"*/agentrl/{pid}-*/*") if path.is_dir()]


def descendants(pid: int) -> set[int]:
    pids: set[int] = set()
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for number in child.read_text().split():
            pids |= {int(number)} | descendants(int(number))
    return pids


def test_files_stay_from_call_to_call_and_no_longer(bubblewrap: Bubblewrap) -> None:
    async def use(sandbox: Sandbox) -> str:
        await sandbox.run(
            Job("1", code="open('a.txt', 'w').write('kept'); open('/tmp/b', 'w'); open('/dev/shm/c', 'w')")
        )
        return (await sandbox.run(Job("2", argv=("sh", "-c", "cat a.txt; ls /work /tmp /dev/shm")))).stdout

    assert bubblewrap(use) == "kept/dev/shm:\nc\n\n/tmp:\nb\n\n/work:\na.txt\n"
    assert bubblewrap.code("import os; print(os.listdir('/work'), os.listdir('/tmp'))").stdout == "[] []\n"


def test_what_it_looks_like_inside(bubblewrap: Bubblewrap) -> None:
    outcome = bubblewrap.code(
        "import getpass, os, socket, sys\n"
        "print(os.getuid(), getpass.getuser(), os.getcwd(), socket.gethostname(), sorted(os.listdir('/etc')))\n"
        "print(sorted(os.environ.items()))\n"
        "print(sorted(os.listdir('/')), [name for name in os.listdir('/proc') if name.isdigit()], os.listdir('/proc/self/fd'))\n"
        "print(socket.gethostbyname('localhost'), sys.path[0] == '', sys.flags.isolated)\n"
    )
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("1000 user /work sandbox ")
    assert set(eval(lines[0].split(maxsplit=4)[4])) <= {"alternatives", "group", "hosts", "ld.so.cache", "passwd"}
    assert [name for name, _ in eval(lines[1])] == ["HOME", "LANG", "PATH", "PWD", "TMPDIR"]
    root, processes, files = eval(f"[{lines[2].replace('] [', '], [')}]")
    assert set(root) <= {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "tmp", "usr", "work"}
    assert len(processes) == 2
    assert processes[0] == "1"
    assert len(files) == 4, "the three streams, and the folder that is listed"
    assert lines[3] == "127.0.0.1 True 1"


def test_many_children_together_run_out_of_memory(bubblewrap: Bubblewrap) -> None:
    """Each has 20 MB, the sandbox 96: only a limit of all together can tell."""
    outcome = bubblewrap.code(
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n"
        "    x = b'x' * (20 << 20)\n    time.sleep(9)\n    os._exit(0)\n"
        "try:\n  while True: os.wait()\nexcept ChildProcessError: pass",
        wall_s=1.5,
    )
    assert outcome.status is ToolStatus.OUT_OF_MEMORY


def test_files_count_together(bubblewrap: Bubblewrap) -> None:
    """16 MB and 512 files, whether in /work, /tmp or /dev/shm."""
    outcome = bubblewrap.code(
        "import errno\nfor n in range(99):\n"
        "  try: open(('/work', '/tmp', '/dev/shm')[n % 3] + f'/{n}', 'wb').write(bytes(1 << 20))\n"
        "  except OSError as error: print(n, errno.errorcode[error.errno]); break"
    )
    assert outcome.stdout in ("15 ENOSPC\n", "16 ENOSPC\n")
    outcome = bubblewrap.code(
        "import errno\nfor n in range(999):\n"
        "  try: open(('/work', '/tmp', '/dev/shm')[n % 3] + f'/{n}', 'wb')\n"
        "  except OSError as error: print(n > 400, errno.errorcode[error.errno]); break"
    )
    assert outcome.stdout == "True ENOSPC\n"


def test_a_full_sandbox_still_answers(bubblewrap: Bubblewrap) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.run(Job("1", argv=("sh", "-c", "cat /dev/zero > a; cat /dev/zero > b; cat /dev/zero > c")))
        assert (await sandbox.run(Job("2", code="print(1)"))).stdout == "1\n"
        with pytest.raises(OSError):
            await sandbox.write_file("d", bytes(2**20))

    bubblewrap(use)


def test_nothing_is_left_when_it_is_closed(bubblewrap: Bubblewrap) -> None:
    processes_before = own_groups(os.getpid()), descendants(os.getpid()), bubblewrap.descriptors()

    async def use(sandbox: Sandbox) -> None:
        assert own_groups(os.getpid())
        await sandbox.run(Job("1", code="a = 1", stateful=True))
        idle = len(descendants(os.getpid()))
        call = asyncio.create_task(sandbox.run(Job("2", code="import time; time.sleep(99)")))
        await until(lambda: len(descendants(os.getpid())) > idle)
        await asyncio.gather(sandbox.close(), sandbox.close())
        with pytest.raises(SandboxFailure):
            await call
        assert not sandbox.alive

    for _ in range(3):
        bubblewrap(use)
    assert (own_groups(os.getpid()), descendants(os.getpid()), bubblewrap.descriptors()) == processes_before


def test_a_runner_killed_from_outside_is_a_failure(bubblewrap: Bubblewrap) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, BubblewrapSandbox)
        call = asyncio.create_task(sandbox.run(Job("1", code="import time; time.sleep(99)")))
        await until(lambda: len(descendants(sandbox.process.pid)) == 2)  # the runner and the snippet
        (runner,) = Path(f"/proc/{sandbox.process.pid}/task/{sandbox.process.pid}/children").read_text().split()
        os.kill(int(runner), signal.SIGKILL)
        with pytest.raises(SandboxFailure, match="exit status"):
            await call
        with pytest.raises(SandboxFailure, match="is gone"):
            await sandbox.run(Job("2", code="1"))
        assert not sandbox.alive

    bubblewrap(use)


def test_a_cancelled_call_ends_the_sandbox(bubblewrap: Bubblewrap) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, BubblewrapSandbox)
        call = asyncio.create_task(sandbox.run(Job("1", code="import time; time.sleep(99)")))
        await until(lambda: len(descendants(sandbox.process.pid)) == 2)  # the runner and the snippet
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not sandbox.alive

    bubblewrap(use)


def test_opening_given_up_leaves_nothing(bubblewrap: Bubblewrap) -> None:
    async def main() -> None:
        for delay in (0, 0.002, 0.005, 0.01, 0.02, 0.04):
            opening = asyncio.create_task(bubblewrap.backend.open("x"))
            await asyncio.sleep(delay)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await opening).close()

    processes_before = descendants(os.getpid()), bubblewrap.descriptors()
    bubblewrap.loop.run(main())
    assert (descendants(os.getpid()), bubblewrap.descriptors()) == processes_before
    assert own_groups(os.getpid()) == []


def test_sixteen_at_once_and_no_reply_goes_astray(bubblewrap: Bubblewrap) -> None:
    async def one(number: int) -> None:
        async with await bubblewrap.backend.open(str(number)) as sandbox:
            for call in range(2):
                words = f"{number} {call}"
                outcomes = await asyncio.gather(
                    sandbox.run(Job("a", code=f"print('{words} a')")),
                    sandbox.run(Job("b", code=f"print('{words} b')", stateful=call % 2 == 1)),
                )
                assert [outcome.stdout for outcome in outcomes] == [f"{words} a\n", f"{words} b\n"]

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in range(16)))

    bubblewrap.loop.run(main())


SERVER = """
import asyncio
from agentrl.config.sandbox import SandboxConfig
from agentrl.sandbox.base import Job
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend
async def main():
    async with BubblewrapBackend(SandboxConfig()) as backend:
        boxes = [await backend.open(str(n)) for n in range(2)]
        calls = [asyncio.create_task(box.run(Job("1", code="while True: pass"))) for box in boxes]
        print("ready", flush=True)
        await asyncio.sleep(99)
asyncio.run(main())
"""


def test_a_killed_server_leaves_no_process_and_the_next_start_removes_the_rest(bubblewrap: Bubblewrap) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        wait_until(lambda: len(descendants(server.pid)) >= 6)  # of each sandbox bubblewrap, the runner and a snippet
        processes = descendants(server.pid)
        assert own_groups(server.pid)
        server.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 10)

    async def main() -> None:
        async with other_backend() as backend:
            assert own_groups(server.pid) == []
            assert own_groups(os.getpid()) == []
            async with await backend.open("a") as sandbox:
                assert sandbox.alive

    asyncio.run(main())


def test_sandboxes_are_other_users_to_the_machine(bubblewrap: Bubblewrap) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make a process another user's")

    async def use(sandbox: Sandbox) -> int:
        assert isinstance(sandbox, BubblewrapSandbox)
        return Path(f"/proc/{sandbox.process.pid}").stat().st_uid

    first, second = bubblewrap(use), bubblewrap(use)
    assert min(first, second) >= FIRST_HOST_USER
    assert first != second


def test_folders_can_be_shown(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("shown")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == tmp_path.owner() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)

    async def main() -> None:
        async with other_backend(readonly=(tmp_path,)) as backend, await backend.open("a") as sandbox:
            assert await sandbox.read_file(str(tmp_path / "data.txt")) == b"shown"
            with pytest.raises(OSError, match="Read-only"):
                await sandbox.write_file(str(tmp_path / "data.txt"), b"")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("section", "error", "words"),
    [
        ({"readonly": (Path("/dev/shm/x"),)}, ConfigError, "below /dev/shm"),
        ({"readonly": (Path("/no/such"),)}, MissingError, "does not exist"),
        ({"python": "/opt/own/python"}, ConfigError, "neither among the machine.s programs"),
        ({"runtime": "runsc"}, ConfigError, r"sandbox\.runtime=runsc .* sandbox\.backend=docker"),
    ],
)
def test_paths_that_no_sandbox_could_see(section: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_paths(SandboxConfig.model_validate(section))


def test_an_interpreter_that_is_not_there_is_said_at_the_start(bubblewrap: Bubblewrap) -> None:
    async def main() -> None:
        with pytest.raises(MissingError, match="python9"):
            await BubblewrapBackend(SandboxConfig(python="python9")).start()

    asyncio.run(main())
    assert own_groups(os.getpid()) == []


class KilledAtStart(BubblewrapBackend):
    """Its first sandboxes are killed as they start: bubblewrap, or the runner in it."""

    kills = 1
    opened = 0
    kills_runner = False

    async def _start_sandbox(self, session_id: str) -> BubblewrapSandbox:
        sandbox = await super()._start_sandbox(session_id)
        self.opened += 1
        if self.opened <= self.kills:
            victim = sandbox.process.pid
            if self.kills_runner:
                await sandbox.ready()
                [victim] = descendants(victim)
            os.kill(victim, signal.SIGKILL)
        return sandbox


@pytest.mark.parametrize("kills_runner", [False, True])
def test_a_kill_of_the_first_sandbox_is_no_refusal(bubblewrap: Bubblewrap, kills_runner: bool) -> None:
    async def main() -> None:
        backend = KilledAtStart(SandboxConfig(limits=LIMITS))
        backend.kills_runner = kills_runner
        async with backend, await backend.open("a") as sandbox:
            assert (await sandbox.run(Job("1", code="print(1)"))).stdout == "1\n"
        assert backend.opened == 3
        second = KilledAtStart(SandboxConfig(limits=LIMITS))
        second.kills = 2
        with pytest.raises(MissingError, match="does not work here"):
            await second.start()
        assert second.opened == 2

    asyncio.run(main())
    assert own_groups(os.getpid()) == []


def test_no_cgroup_is_a_refusal_unless_accepted(
    bubblewrap: Bubblewrap, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CGROUP_VARIABLE, f"agentrl-none-{os.getpid()}")

    async def main() -> None:
        with pytest.raises(MissingError, match="accept_no_memory_limit"):
            await BubblewrapBackend(SandboxConfig(limits=LIMITS)).start()
        accepted = SandboxConfig(limits=LIMITS, accept_no_memory_limit=True)
        async with BubblewrapBackend(accepted) as backend, await backend.open("a") as sandbox:
            outcome = await sandbox.run(Job("1", code="bytearray(10**9)"))
            assert outcome.status is ToolStatus.ERROR
            assert "MemoryError" in outcome.stderr
            fork = "import os, time\nfor _ in range(99):\n  if os.fork() == 0: time.sleep(9)"
            assert "BlockingIOError" in (await sandbox.run(Job("1", code=fork))).stderr

    asyncio.run(main())
    assert "has no limit" in caplog.text


@pytest.mark.parametrize("defence", Defence)
def test_it_opens_without_any_one_defence(defence: Defence) -> None:
    """Whether the defence holds is for the attacks to show."""

    async def main() -> None:
        async with other_backend(ALL_DEFENCES - {defence}) as backend, await backend.open("a") as sandbox:
            assert (await sandbox.run(Job("1", code="print(1)"))).stdout == "1\n"

    asyncio.run(main())


def test_options_of_the_files() -> None:
    assert tmpfs_options(LIMITS, ALL_DEFENCES) == "mode=0755,nosuid,nodev,noatime,size=16m,nr_inodes=512"
    assert tmpfs_options(LIMITS, ALL_DEFENCES - {Defence.DISK, Defence.INODES}) == "mode=0755,nosuid,nodev,noatime"


FEW_FILES = """
import asyncio, os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import SandboxFailure
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend
async def settled():
    # A sandbox that was closed closes its pipes in the loop's next rounds.
    counts = []
    while len(counts) < 30 or len(set(counts[-30:])) > 1:
        await asyncio.sleep(0.01)
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1]
async def main():
    async with BubblewrapBackend(SandboxConfig()) as backend:
        before = await settled()
        boxes = []
        try:
            while len(boxes) < 48:
                boxes.append(await backend.open("a"))
        except SandboxFailure as error:
            print(error)
        for box in boxes:
            await box.close()
        print(len(boxes), await settled() - before)
asyncio.run(main())
"""


def test_too_few_open_files_are_said_and_cost_nothing(bubblewrap: Bubblewrap) -> None:
    done = subprocess.run([sys.executable, "-c", FEW_FILES], capture_output=True, text=True, timeout=60, check=True)
    error, counts = done.stdout.splitlines()
    assert "may have 48 open files, see ulimit -n" in error
    opened, closed_count = map(int, counts.split())
    assert opened > 3
    assert closed_count == 0
