"""Programs that cheat, in real sandboxes: none of it helps against the judge, and all of it works against naive ones.

A naive judge works where the agent works: it puts tests and a harness into the agent's sandbox and believes what comes
out. Each attack is aimed at one and must fool it (the control); the judge must give the attack what its output deserves.
Everything runs inside sandboxes, the naive judges too.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from agentrl_tools.judge import JudgeOptions, JudgeTool
from dockerd import DockerHost

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.types import ToolCall, ToolStatus
from agentrl.sandbox.base import ALL_DEFENCES, Defence, Job, Sandbox, SandboxBackend
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend
from agentrl.sandbox.docker.backend import DockerBackend
from agentrl.toolserver.hosted_tool import ToolSession

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")]

CONFIG = SandboxConfig(limits=SandboxLimits(wall_s=5, output_kb=64, memory_mb=128))
INPUTS = ["31\n", "8\n"]
OUTPUTS = ["961\n", "64\n"]
"""Of the problem: print the square. No attack computes it."""


# ---- naive judges: each is told the program's text and returns whether it believes that all tests were passed

IN_PROCESS = """
import contextlib, io, json, sys

def same(printed, wanted):
    return printed.split() == wanted.split()

program = open("program.py").read()
passed = []
for number in range(2):
    wanted = open(f"tests/{number}.out").read()
    sys.stdin, out = open(f"tests/{number}.in"), io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(program, {})
        except Exception:
            pass
    wanted = open(f"tests/{number}.out").read()
    passed.append(same(out.getvalue(), wanted))
json.dump(passed, open("verdict.json", "w"))
print("VERDICT:", "accepted" if all(passed) else "wrong")
"""

AS_PARENT = """
import os, subprocess, sys

program, expected = open("program.py").read(), sys.argv[1:]
ok = True
for number in range(2):
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=open(f"tests/{number}.in"), capture_output=True, text=True,
        env={**os.environ, "EXPECTED": expected[number]}, timeout=4)
    ok = ok and done.stdout.split() == expected[number].split()
sys.exit(0 if ok else 1)
"""

ASSERTS = """
{program}

import sys
assert sys.stdin.read() == "the answer was right", "wrong"
"""


async def put_tests(sandbox: Sandbox, program: str) -> None:
    await sandbox.write_file("program.py", program.encode())
    for number, (stdin, expected) in enumerate(zip(INPUTS, OUTPUTS, strict=True)):
        await sandbox.write_file(f"tests/{number}.in", stdin.encode())
        await sandbox.write_file(f"tests/{number}.out", expected.encode())


async def believes_verdict_file(sandbox: Sandbox, program: str) -> bool:
    await put_tests(sandbox, program)
    await sandbox.run(Job("naive", code=IN_PROCESS))
    try:
        return all(json.loads(await sandbox.read_file("verdict.json")))
    except FileNotFoundError:
        return False


async def believes_printed_verdict(sandbox: Sandbox, program: str) -> bool:
    await put_tests(sandbox, program)
    return "VERDICT: accepted" in (await sandbox.run(Job("naive", code=IN_PROCESS))).stdout


async def believes_harness_status(sandbox: Sandbox, program: str) -> bool:
    """Take a harness that a signal ended for a fault of the machine, which is not the program's."""
    await put_tests(sandbox, program)
    outcome = await sandbox.run(Job("naive", argv=(CONFIG.python, "-c", AS_PARENT, *OUTPUTS)))
    return outcome.status is ToolStatus.KILLED or outcome.exit_code == 0


async def believes_exit_status(sandbox: Sandbox, program: str) -> bool:
    return (await sandbox.run(Job("naive", code=ASSERTS.format(program=program)))).exit_code == 0


async def believes_files_in_its_way(sandbox: Sandbox, program: str) -> bool:
    """Run the agent's program as one of its tries first, and then a harness from the same folder."""
    await sandbox.run(Job("try", code=program))
    await put_tests(sandbox, program)
    await sandbox.write_file("harness.py", IN_PROCESS.encode())
    return "VERDICT: accepted" in (await sandbox.run(Job("naive", argv=(CONFIG.python, "harness.py")))).stdout


async def looks_for_the_answer(sandbox: Sandbox, program: str) -> bool:
    """Be content where the answer is somewhere in the output, and drop output that is too long."""
    outcomes = [await sandbox.run(Job(f"t{n}", code=program, stdin=stdin.encode())) for n, stdin in enumerate(INPUTS)]
    return all(expected.strip() in outcome.stdout for expected, outcome in zip(OUTPUTS, outcomes, strict=True))


Naive = Callable[[Sandbox, str], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Attack:
    naive: Naive
    program: str
    deserved: tuple[str, str] = ("wrong_answer", "wrong_answer")
    needs: Mapping[str, Any] = field(default_factory=dict)


GET_EXPECTED = """
import glob, sys
given = sys.stdin.read()
for name in glob.glob("tests/*.in"):
    if open(name).read() == given:
        print(open(name.replace(".in", ".out")).read())
"""

ATTACKS = {
    "reads the expected output on disk": Attack(believes_verdict_file, GET_EXPECTED),
    "overwrites the expected output on disk": Attack(
        believes_verdict_file,
        "import os\nif os.path.isdir('tests'):\n    for n in '01': open(f'tests/{n}.out', 'w').write('x')\nprint('x')",
    ),
    "writes the verdict itself and ends the harness": Attack(
        believes_verdict_file, "import os; open('verdict.json', 'w').write('[true, true]'); os._exit(0)"
    ),
    "prints a verdict": Attack(
        believes_printed_verdict,
        "import os; os.write(1, b'VERDICT: accepted\\n'); os._exit(0)",
    ),
    "patches the comparison": Attack(
        believes_printed_verdict,
        "import sys\nframe = sys._getframe()\nwhile frame:\n    if 'same' in frame.f_globals:\n"
        "        frame.f_globals['same'] = lambda printed, wanted: True\n    frame = frame.f_back\nprint('x')",
    ),
    "patches builtins": Attack(
        believes_printed_verdict, "import builtins; builtins.all = lambda results: True; print('x')"
    ),
    "takes the expected output from its caller's frame": Attack(
        believes_printed_verdict,
        "import sys\nframe, found = sys._getframe(), 'x'\nwhile frame:\n"
        "    found = frame.f_globals.get('wanted', found)\n    frame = frame.f_back\nprint(found)",
    ),
    "takes the expected output from memory": Attack(
        believes_printed_verdict,
        "import gc, sys\ngiven, found = int(input()), 'x'\nfor thing in gc.get_objects():\n"
        "    if isinstance(thing, dict) and isinstance(thing.get('wanted'), str):\n        found = thing['wanted']\nprint(found)",
    ),
    "takes the expected output from the environment": Attack(
        believes_harness_status, "import os; print(os.environ.get('EXPECTED', 'x'))"
    ),
    "takes the expected output from other processes' arguments": Attack(
        believes_harness_status,
        "import glob\ngiven = int(input())\nwords = []\nfor name in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try:\n        words += open(name).read().split(chr(0))\n    except OSError:\n        pass\n"
        "print(next((w for w in words if w.strip().isdigit() and int(w) > given and int(w) % given == 0), 'x'))",
    ),
    "takes the expected output from other processes' environment": Attack(
        believes_harness_status,
        "import glob\nfound = 'x'\nfor name in glob.glob('/proc/[0-9]*/environ'):\n    try:\n"
        "        for entry in open(name).read().split(chr(0)):\n"
        "            if entry.startswith('EXPECTED='): found = entry[9:]\n    except OSError:\n        pass\nprint(found)",
    ),
    "kills its parent": Attack(
        believes_harness_status,
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('x')",
    ),
    "exits with status 0 before the end": Attack(believes_exit_status, "import os; os._exit(0)"),
    "forks and exits": Attack(
        believes_exit_status,
        "import os, time\nif os.fork() == 0:\n    time.sleep(0.2)\n    print('late', flush=True)\nos._exit(0)",
    ),
    "puts a module into the harness's way": Attack(
        believes_files_in_its_way,
        "import os, sys\nif not os.path.exists('tests'):\n"
        "    open('json.py', 'w').write('print(\"VERDICT: accepted\"); raise SystemExit')\nprint('x')",
    ),
    "prints every answer there is": Attack(
        looks_for_the_answer, "print(*range(1000))", ("wrong_answer", "wrong_answer")
    ),
    "prints without end": Attack(
        looks_for_the_answer, "print(*range(1000))\nwhile True: print('x' * 4096)", ("output_limit", "output_limit")
    ),
}


class Fresh(ToolSession):
    """Opens fresh sandboxes, and has an agent's own in which the program was run before."""

    def __init__(self, backend: SandboxBackend) -> None:
        self.id, self.state, self.opened = "tampering", {}, 0
        self._backend = backend
        self._open = AsyncExitStack()

    async def sandbox(self) -> Sandbox:
        raise AssertionError("the judge asks for fresh ones alone")

    @asynccontextmanager
    async def fresh_sandbox(self) -> AsyncIterator[Sandbox]:
        self.opened += 1
        async with await self._backend.open(f"fresh-{self.opened}") as sandbox:
            yield sandbox


async def judged(
    backend: SandboxBackend, program: str, inputs: list[str], expected: list[str]
) -> tuple[list[str], int]:
    session = Fresh(backend)
    arguments = {"program": program, "inputs": inputs, "outputs": expected}
    result = await JudgeTool(JudgeOptions(time_s=3, wall_s=5, output_kb=64)).call(
        session, ToolCall("c", "judge", arguments)
    )
    assert result.status is ToolStatus.OK
    return result.data["verdicts"], session.opened


def test_no_attack_on_the_judge_helps_and_each_fools_a_naive_one() -> None:
    async def run() -> dict[str, tuple[bool, tuple[str, ...]]]:
        actual = {}
        async with BubblewrapBackend(CONFIG) as backend:
            for name, attack in ATTACKS.items():
                async with await backend.open("agent") as agents_own:
                    fooled = await attack.naive(agents_own, attack.program)
                verdicts, _ = await judged(backend, attack.program, INPUTS, OUTPUTS)
                actual[name] = (fooled, tuple(verdicts))
        return actual

    assert asyncio.run(run()) == {name: (True, attack.deserved) for name, attack in ATTACKS.items()}


def test_naive_judges_are_not_fooled_by_honest_programs() -> None:
    """Or the controls would show nothing."""

    async def run() -> list[tuple[str, bool]]:
        async with BubblewrapBackend(CONFIG) as backend:
            actual = []
            for naive in {attack.naive: None for attack in ATTACKS.values()}:
                async with await backend.open("agent") as sandbox:
                    actual.append((naive.__name__, await naive(sandbox, "print('x')")))
            return actual

    assert not any(fooled for _, fooled in asyncio.run(run()))


# ---- what one test leaves for the next

LEFT = {
    "a file beside it": ("open('left', 'w')", "os.path.exists('left')"),
    "a file in /tmp": ("open('/tmp/left', 'w')", "os.path.exists('/tmp/left')"),
    "a file in /dev/shm": ("open('/dev/shm/left', 'w')", "os.path.exists('/dev/shm/left')"),
    "a folder": ("os.mkdir('left')", "os.path.isdir('left')"),
    "a link to nothing": ("os.symlink('nowhere', 'left')", "os.path.islink('left')"),
    "rights of a folder": ("os.chmod('/work', 0o750)", "os.stat('/work').st_mode & 0o777 == 0o750"),
    "a folder's time of change": ("os.utime('/work', (7, 7))", "os.stat('/work').st_mtime == 7"),
    "a folder's time of access alone": (
        "os.utime('/tmp', ns=(7, os.stat('/tmp').st_mtime_ns))",
        "os.stat('/tmp').st_atime_ns == 7",
    ),
    "a folder's flags": (
        "fcntl.ioctl(os.open('/work', 0), 0x40086602, (64).to_bytes(8, 'little'))",
        "fcntl.ioctl(os.open('/work', 0), 0x80086601, bytes(8))[0] & 64",
    ),
    "the number of processes": ("[os.waitpid(os.fork() or os._exit(0), 0) for _ in range(40)]", "os.getpid() > 40"),
    "the number of inodes": (
        "[os.close(os.open('/work', os.O_TMPFILE | os.O_RDWR)) for _ in range(99)]",
        "os.fstat(os.open('/work', os.O_TMPFILE | os.O_RDWR)).st_ino > 99",
    ),
    "the number of shared memories": (
        "[libc.shmctl(libc.shmget(0, 1, 0o600), 0, None) for _ in range(40)]",
        "libc.shmget(0, 1, 0o600) >= 40",
    ),
    "the number of packets": (
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
        "open('/proc/net/dev').read().split('lo:')[1].split()[0] != '0'",
    ),
    "a POSIX message queue": (
        "libc.mq_open(b'/left', os.O_CREAT | os.O_RDWR, 0o600, None)",
        "libc.mq_open(b'/left', os.O_RDWR) != -1",
    ),
    "cores of the runner": (
        "os.sched_setaffinity(1, {min(os.sched_getaffinity(0))})",
        "len(os.sched_getaffinity(0)) == 1",
    ),
    "the priority of input and output": (
        "libc.syscall({'x86_64': 251, 'aarch64': 30}[os.uname().machine], 1, 1, 2 << 13 | 6)",
        "libc.syscall({'x86_64': 252, 'aarch64': 31}[os.uname().machine], 1, 0) == 2 << 13 | 6",
    ),
    "shared memory": ("libc.shmget(7, 64, 0o1600)", "libc.shmget(7, 64, 0) != -1"),
    "a semaphore": ("libc.semget(7, 1, 0o1600)", "libc.semget(7, 1, 0) != -1"),
    "a message queue": ("libc.msgget(7, 0o1600)", "libc.msgget(7, 0) != -1"),
}
LEAVES = """
import {modules}
libc = ctypes.CDLL(None)
if {found}:
    print("found")
else:
    {leave}
    print("clean")
"""


def leaving_program(leave: str, looks: str) -> str:
    """Return a program that says whether something was there, and leaves it; it imports few modules, since many run it."""
    modules = ", ".join(("ctypes", "fcntl", "os", *(["socket"] if "socket" in leave else [])))
    return LEAVES.format(modules=modules, leave=leave, found=looks)


DAEMON = """
import os, socket, time
there = socket.socket(socket.AF_UNIX)
try:
    there.connect(chr(0) + "daemon")
    print(there.recv(100).decode())
except ConnectionRefusedError:
    server = socket.socket(socket.AF_UNIX)
    server.bind(chr(0) + "daemon")
    server.listen()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (0, 1, 2):
                os.close(number)
            while True:
                server.accept()[0].sendall(b"found")
        os._exit(0)
    print("clean", flush=True)
"""


def test_nothing_of_a_test_is_there_at_the_next() -> None:
    programs = {name: leaving_program(leave, looks) for name, (leave, looks) in LEFT.items()}

    async def run() -> dict[str, tuple[list[str], list[str]]]:
        result = {}
        async with BubblewrapBackend(CONFIG) as backend:
            for name, program in programs.items():
                async with await backend.open("control") as sandbox:
                    control = [(await sandbox.run(Job(f"c{n}", code=program))).stdout.strip() for n in range(2)]
                verdicts, _ = await judged(backend, program, ["1\n", "2\n"], ["clean\n", "clean\n"])
                result[name] = (control, verdicts)
        return result

    assert asyncio.run(run()) == {name: (["clean", "found"], ["accepted", "accepted"]) for name in LEFT}


def test_a_daemon_does_not_answer_the_next_test() -> None:
    async def control() -> list[str]:
        async with (
            BubblewrapBackend(CONFIG, ALL_DEFENCES - {Defence.SWEEP}) as backend,
            await backend.open("control") as sandbox,
        ):
            return [(await sandbox.run(Job(f"c{n}", code=DAEMON, wall_s=3))).stdout.strip() for n in range(2)]

    async def real() -> tuple[list[str], int]:
        async with BubblewrapBackend(CONFIG) as backend:
            return await judged(backend, DAEMON, ["1\n", "2\n"], ["clean\n", "clean\n"])

    assert asyncio.run(control()) == ["clean", "found"]
    assert asyncio.run(real()) == (["accepted", "accepted"], 2), "it counts as processes that were started"


def test_a_program_that_leaves_nothing_keeps_its_sandbox() -> None:
    async def run() -> tuple[list[str], int]:
        async with BubblewrapBackend(CONFIG) as backend:
            return await judged(backend, "print(int(input()) ** 2)", INPUTS * 3, OUTPUTS * 3)

    assert asyncio.run(run()) == (["accepted"] * 6, 1)


@pytest.mark.long
def test_the_same_by_docker(dockerd: DockerHost) -> None:
    """Docker's sandboxes lose shared memory by themselves, once nobody is attached to it; its id stays taken."""
    config = SandboxConfig(backend="docker", docker_url=dockerd.url, image=dockerd.image)
    leftovers = {"nothing": 1, "a file in /dev/shm": 2, "a message queue": 2, "shared memory": 2}

    async def run() -> dict[str, tuple[list[str], int]]:
        actual = {}
        async with DockerBackend(config) as backend:
            for name in leftovers:
                leave, looks = LEFT.get(name, ("pass", "False"))
                program = leaving_program(leave, looks)
                actual[name] = await judged(backend, program, ["1\n", "2\n"], ["clean\n", "clean\n"])
        return actual

    assert asyncio.run(run()) == {name: (["accepted", "accepted"], opened) for name, opened in leftovers.items()}


MANY_CHILDREN = """
import os
held, end = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        os.close(end)
        block = bytearray(4 * 10**7)
        os.read(held, 1)
        os._exit(0)
os.wait()
"""
"""Its children keep their memory until the program ends, and that waits until one of them is killed."""


def test_limits_are_verdicts() -> None:
    programs = {
        "while True: pass": "time_limit",
        "import time; time.sleep(60)": "time_limit",
        "blocks = [bytearray(10**7) for _ in range(100)]": "memory_limit",
        MANY_CHILDREN: "memory_limit",
        "import os; os.kill(os.getpid(), 11)": "runtime_error",
        "import os; os.kill(1, 9); print(int(input()) ** 2)": "accepted",
        "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))": "runtime_error",
    }

    async def run() -> dict[str, str]:
        actual = {}
        async with BubblewrapBackend(CONFIG) as backend:
            tool = JudgeTool(JudgeOptions(time_s=1, wall_s=2))
            for program in programs:
                arguments = {"program": program, "inputs": INPUTS[:1], "outputs": OUTPUTS[:1]}
                result = await tool.call(Fresh(backend), ToolCall("c", "judge", arguments))
                [actual[program]] = result.data["verdicts"]
        return actual

    assert asyncio.run(run()) == programs
