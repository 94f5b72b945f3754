"""Attacks on other processes, on the runner first of all, and on what stays from call to call."""

from __future__ import annotations

from dataclasses import replace

from attacks.attack import ROOMY, Attack, Bare, NoControl, Otherwise, Without, ends

from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import Defence

OK = ends(ToolStatus.OK)
NOBODY = 65534
SECCOMP, RUNNER, SWEEP, ENVIRONMENT = Defence.SECCOMP, Defence.RUNNER, Defence.SWEEP, Defence.ENVIRONMENT
NAMESPACE = Defence.PROCESS_NAMESPACE
OTHER_USERS = Bare("the user namespace stands before the machine's processes whichever defence is away", user=NOBODY)

# Frames as the runner writes them, for every request it may be about to answer.
FORGE = """
def forged(said):
    for number in range(1, 200):
        fields = {"id": number, "why": None, "exit_code": 0, "stdout": said, "stderr": "", "seconds": 0, "cpu_s": 0}
        reply = json.dumps(fields).encode()
        yield struct.pack("<I", len(reply)) + reply
"""


def _forged() -> bytes:
    """Return what a policy could have a server save for it: replies to all requests that may come."""
    frames = b""
    for number in range(1, 200):
        reply = b'{"id":%d,"why":null,"exit_code":0,"stdout":"43\\n","stderr":"","seconds":0,"cpu_s":0}' % number
        frames += len(reply).to_bytes(4, "little") + reply
    return frames


FORGED = _forged()

MACHINE = (
    Attack(
        "kill a process of the machine",
        "PID namespace",
        """
for pid in T["victims"]:
    try: os.kill(pid, 9)
    except PermissionError: pass
""",
        {
            "bubblewrap": Without(
                NAMESPACE, Defence.PRIVILEGES, why="every sandbox is a user of its own on the machine"
            ),
            "docker": Without(NAMESPACE),
        },
    ),
    Attack(
        "kill everything",
        "PID namespace: all there is are its own processes",
        "os.kill(-1, 9)",
        Without(NAMESPACE),
        ends(ToolStatus.OK, ToolStatus.ERROR),
    ),
    Attack(
        "trace a process of the machine",
        "PID namespace, seccomp",
        "call('ptrace', 0x4206, T['victims'][0], 0, 0)\npwned('seized')",
        {
            "bubblewrap": OTHER_USERS,
            "docker": Without(NAMESPACE, SECCOMP, why="the call is refused as well"),
        },
    ),
    Attack(
        "read a process's environment",
        "PID namespace",
        "pwned([v for v in open('/proc/%d/environ' % T['victims'][0]).read().split('\\0') if T['token'] in v][0])",
        {"bubblewrap": OTHER_USERS, "docker": Without(NAMESPACE)},
    ),
    Attack(
        "the server's environment",
        "environment cleared",
        """
seen = [json.dumps(dict(os.environ))]
for pid in (1, os.getppid()):
    try: seen.append(open("/proc/%d/environ" % pid).read())
    except OSError: pass
if any(T["token"] in one for one in seen): pwned("a secret")
""",
        Without(ENVIRONMENT),
        OK,
    ),
    Attack(
        "read another sandbox's files",
        "mount and PID namespace, the runner is not dumpable",
        """
for name in os.listdir("/proc"):
    try:
        if T["token"] in open("/proc/%s/root/work/mine" % name).read(): pwned("pid " + name)
    except OSError: pass
""",
        {
            "bubblewrap": Bare("every sandbox has a user namespace of its own whichever defence is away"),
            "docker": Without(NAMESPACE, RUNNER, why="each of them hides the other sandbox's processes"),
        },
        OK,
        neighbour="open('/work/mine', 'w').write(T['token'])",
    ),
    Attack(
        "System V shared memory of another sandbox",
        "IPC namespace",
        """
libc.shmat.restype = ctypes.c_void_p
pwned(ctypes.string_at(libc.shmat(call("shmget", T["key"], ctypes.c_size_t(4096), 0), None, 0)))
""",
        Without(NAMESPACE),
        neighbour="""
libc.shmat.restype = ctypes.c_void_p
where = libc.shmat(call("shmget", T["key"], ctypes.c_size_t(4096), 0o1666), None, 0)
ctypes.memmove(where, T["token"].encode(), len(T["token"]))
""",
    ),
    Attack(
        "System V message of another sandbox",
        "IPC namespace",
        """
buffer = ctypes.create_string_buffer(128)
call("msgrcv", call("msgget", T["key"], 0), buffer, ctypes.c_size_t(64), ctypes.c_long(0), 0o4000)
pwned(buffer.raw[8:40])
""",
        Without(NAMESPACE),
        neighbour="call('msgsnd', call('msgget', T['key'], 0o1666), struct.pack('l', 1) + T['token'].encode(), "
        "ctypes.c_size_t(len(T['token'])), 0)",
    ),
    Attack(
        "POSIX message queue of another sandbox",
        "IPC namespace",
        """
buffer = ctypes.create_string_buffer(8192)
call("mq_receive", call("mq_open", b"/agentrl-attack", os.O_RDONLY | os.O_NONBLOCK), buffer, ctypes.c_size_t(8192), None)
pwned(buffer.value)
""",
        Without(NAMESPACE),
        neighbour="""
os.umask(0)
queue = call("mq_open", b"/agentrl-attack", os.O_CREAT | os.O_RDWR, 0o666, None)
call("mq_send", queue, T["token"].encode(), ctypes.c_size_t(len(T["token"])), 0)
""",
    ),
)

ON_THE_RUNNER = (
    Attack(
        "kill or stop the runner",
        "PID namespace: process 1 takes no signal from inside",
        "for number in (19, 20, 15, 11, 6, 31, 9):\n    os.kill(os.getppid(), number)\ntime.sleep(0.05)",
        Without(NAMESPACE),
        OK,
    ),
    Attack(
        "kill the runner by a descriptor of it",
        "PID namespace: process 1 takes no signal from inside",
        "import signal\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)\ntime.sleep(0.05)",
        Without(NAMESPACE),
        OK,
    ),
    Attack(
        "a limit of CPU time for the runner, so that the kernel kills it",
        "seccomp: limits of the calling process alone",
        "import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))\npwned('limited')",
        Without(SECCOMP),
    ),
    Attack(
        "no more open files for the runner",
        "seccomp: limits of the calling process alone",
        "import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))\npwned('limited')",
        Without(SECCOMP),
    ),
    Attack(
        "starve the runner by scheduling",
        "seccomp: priority of the calling process alone",
        "os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))\npwned('idle')",
        Without(SECCOMP),
    ),
    Attack(
        "starve the runner by niceness of all of the user's processes",
        "seccomp: no priorities",
        "os.setpriority(os.PRIO_USER, 0, 19)\nif os.getpriority(os.PRIO_PROCESS, os.getppid()) == 19: pwned('nice')",
        Without(SECCOMP),
    ),
    Attack(
        "make the runner the first to go when memory ends",
        "the runner is not dumpable",
        "open('/proc/%d/oom_score_adj' % os.getppid(), 'w').write('1000')\npwned('first')",
        Without(RUNNER),
    ),
    Attack(
        "trace the runner",
        "seccomp, and the runner is not dumpable",
        "call('ptrace', 0x4206, os.getppid(), 0, 0)\npwned('seized')",
        Without(SECCOMP, RUNNER, why="either of them refuses it"),
    ),
    Attack(
        "write the runner's memory",
        "the runner is not dumpable",
        "os.open('/proc/%d/mem' % os.getppid(), os.O_RDWR)\npwned('opened')",
        Without(RUNNER),
    ),
    Attack(
        "write the runner's memory by process_vm_writev",
        "seccomp, and the runner is not dumpable",
        """
where = int(open("/proc/self/maps").readline().split("-")[0], 16)
mine = ctypes.create_string_buffer(8)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(mine), 8)
theirs = (ctypes.c_size_t * 2)(where, 8)
call("process_vm_readv", os.getppid(), vector, ctypes.c_ulong(1), theirs, ctypes.c_ulong(1), ctypes.c_ulong(0))
pwned(mine.raw)
""",
        Without(SECCOMP, RUNNER, why="either of them refuses it"),
    ),
    Attack(
        "take the runner's descriptors",
        "seccomp, and the runner is not dumpable",
        "fd = syscall('pidfd_getfd', os.pidfd_open(os.getppid()), 3, 0)\npwned(os.readlink('/proc/self/fd/%d' % fd))",
        Without(SECCOMP, RUNNER, why="either of them refuses it"),
    ),
    Attack(
        "forge the reply through the runner's descriptors",
        "the runner is not dumpable",
        FORGE
        + """
for fd in os.listdir("/proc/%d/fd" % os.getppid()):
    path = "/proc/%d/fd/%s" % (os.getppid(), fd)
    if not os.readlink(path).startswith("pipe:"): continue
    try: out = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError: continue
    for frame in forged("PWNED a reply"): os.write(out, frame)
time.sleep(0.2)
""",
        Without(RUNNER),
        fresh=True,
    ),
    Attack(
        "forge the reply through descriptors by number",
        "a call has none of the runner's descriptors",
        FORGE
        + """
for fd in range(3, 64):
    for frame in forged("43\\n"):
        try: os.write(fd, frame)
        except OSError: break
""",
        NoControl("a call's other descriptors are closed whichever defence is away"),
        OK,
        fresh=True,
    ),
    Attack(
        "forge the reply by printing it",
        "output is no part of the stream of replies",
        FORGE + "for frame in forged('43\\n'): os.write(1, frame)",
        NoControl("output goes through a pipe of the call's own whichever defence is away"),
        OK,
        fresh=True,
    ),
    Attack(
        "forge the reply through a file that the server writes",
        "files are written by a process that has none of the runner's descriptors",
        "for n in range(3, 12): os.symlink('/proc/self/fd/%d' % n, '/work/answer%d' % n)",
        NoControl("the process that writes has no descriptors of the runner whichever defence is away"),
        OK,
        writes={f"answer{number}": FORGED for number in range(3, 12)},
        fresh=True,
    ),
    Attack(
        "a file that never ends, read by the server",
        "files are read by a process with a time limit",
        """
os.mkfifo("/work/fifo")
os.symlink("/proc/self/fd/3", "/work/three")
os.symlink("/proc/self/fd/4", "/work/four")
os.symlink("/dev/zero", "/work/zero")
os.symlink("loop", "/work/loop")
keep = os.open("/work/fifo", os.O_RDWR)
""",
        NoControl("the file is read in the same way whichever defence is away"),
        OK,
        stateful=True,
        reads=("fifo", "three", "four", "zero", "loop"),
    ),
    Attack(
        "a file that takes nothing, written by the server",
        "files are written by a process with a time limit",
        "os.mkfifo('/work/fifo')\nos.symlink('/dev/full', '/work/full')",
        NoControl("the file is written in the same way whichever defence is away"),
        OK,
        writes={"fifo": b"x", "full": b"x"},
    ),
)

FROM_CALL_TO_CALL = (
    Attack(
        "a daemon that outlives its call",
        "the sweep",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.2)
        pwned_file("alive")
    os._exit(0)
""",
        Without(SWEEP),
        OK,
        pause_s=0.5,
    ),
    Attack(
        "a daemon of the process that keeps variables",
        "the sweep",
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(0.2)\n    pwned_file('alive')\n    os._exit(0)",
        Without(SWEEP),
        OK,
        stateful=True,
        pause_s=0.5,
    ),
    Attack(
        "a process whose first thread has ended",
        "the sweep",
        """
import threading
def go_on():
    time.sleep(0.3)
    pwned_file("alive")
if os.fork() == 0:
    os.setsid()
    threading.Thread(target=go_on).start()
    libc.pthread_exit(None)
time.sleep(0.1)
""",
        Without(SWEEP),
        OK,
        stateful=True,
        pause_s=0.4,
    ),
    Attack(
        "processes that are gone before they are found",
        "the sweep",
        """
made = os.open("made", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
for _ in range(6):
    if os.fork() == 0:
        os.setsid()
        while os.fstat(made).st_size < 300:
            os.write(made, b"x")
            if os.fork(): os._exit(0)
        time.sleep(0.2)
        pwned_file("alive")
        os._exit(0)
""",
        Without(SWEEP),
        OK,
        stateful=True,
        pause_s=0.8,
        limits=ROOMY,
    ),
    Attack(
        "write into the next call's output",
        "the sweep",
        """
if os.fork() == 0:
    os.setsid()
    time.sleep(0.1)
    for _ in range(30):
        os.write(1, b"PWNED output\\n")
        time.sleep(0.02)
    os._exit(0)
""",
        Without(SWEEP),
        OK,
        stateful=True,
        then="import time; time.sleep(0.4); print('fine')",
        then_stateful=True,
    ),
    Attack(
        "change what the next call's functions do",
        "a process of its own for every call",
        "import builtins\nsaid = print\nbuiltins.print = lambda *words: said('PWNED', *words)",
        Otherwise(
            "the next call keeps variables too: the policy's own process, which nothing is graded in",
            then_stateful=True,
        ),
        OK,
        stateful=True,
        then="print('fine')",
    ),
    Attack(
        "end the call early by the control socket of the process that keeps variables",
        "a process of its own for every call",
        """
for fd in range(3, 64):
    try: os.write(fd, bytes([0]))
    except OSError: pass
time.sleep(0.2)
os.write(1, b"PWNED the next call's output")
time.sleep(0.2)
""",
        Otherwise(
            "the next call keeps variables too: the policy's own process, which nothing is graded in",
            then_stateful=True,
        ),
        OK,
        stateful=True,
        then="import time; time.sleep(0.3); print('fine')",
        pause_s=0.3,
    ),
    Attack(
        "find an earlier call's text in memory",
        "calls are forked from a process that holds nothing of them",
        "print('word-of-an-earlier-call')",
        Otherwise(
            "the next call keeps variables too: the policy's own process, which nothing is graded in",
            then_stateful=True,
        ),
        OK,
        stateful=True,
        then="""
import re
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if " r" not in line or "[v" in line: continue
        memory.seek(first)
        if re.search(b"wor[d]-of-an-earlier-call", memory.read(last - first)): print("PWNED", line)
""",
        fresh=True,
    ),
    Attack(
        "find out what earlier calls have read, by times of access",
        "noatime",
        """
for name in ("/work", "/tmp", "/dev", "/dev/shm", "/etc", "/usr", "/"):
    before = os.stat(name).st_atime_ns
    time.sleep(0.01)
    os.listdir(name)
    if os.stat(name).st_atime_ns != before: pwned(name)
""",
        Bare("no backend keeps times of access whichever defence is away"),
        OK,
    ),
    Attack(
        "tamper with the scorer",
        "programs are graded in a fresh sandbox",
        "open('/work/random.py', 'w').write(\"print('PWNED all tests passed')\\nraise SystemExit\")",
        Otherwise("the program is graded in the sandbox where the agent was", then_fresh=False),
        OK,
        then="""
import subprocess, sys
open("/work/grade.py", "w").write("import random; print('failed')")
print(subprocess.run([sys.executable, "/work/grade.py"], capture_output=True, text=True).stdout)
""",
        then_fresh=True,
    ),
)

ATTACKS = (*MACHINE, *(replace(attack, breaks_control=True) for attack in ON_THE_RUNNER), *FROM_CALL_TO_CALL)
