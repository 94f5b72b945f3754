"""Detects whether a program left anything in its sandbox that its next run could find."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from agentrl import ToolStatus
from agentrl.sandbox.base import Job, Sandbox

LOOK = r"""
import ctypes, fcntl, os, platform, resource, struct
libc = ctypes.CDLL(None)

def read(path):
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return None

def inode(folder):
    "The next number of an inode: file systems count them up."
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR)
    except OSError:
        return 0
    number = os.fstat(descriptor).st_ino
    os.close(descriptor)
    return number

def flags(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return fcntl.ioctl(descriptor, 0x80086601, bytes(8))
    except OSError:
        return None
    finally:
        os.close(descriptor)

def times(path):
    status = os.stat(path)
    return tuple(status), status.st_mtime_ns, status.st_ctime_ns, status.st_atime_ns

def queues():
    "How many more POSIX message queues there can be."
    if not hasattr(libc, "mq_open"):
        return None
    made = []
    smallest = struct.pack("8l", 0, 1, 1, 0, 0, 0, 0, 0)
    while True:
        descriptor = libc.mq_open(b"/look-%d" % len(made), os.O_CREAT | os.O_EXCL, 0o600, smallest)
        if descriptor < 0:
            break
        os.close(descriptor)
        made.append(b"/look-%d" % len(made))
    for name in made:
        libc.mq_unlink(name)
    return len(made)

state, counters = [], [os.getpid()]
for line in read("/proc/self/mountinfo").splitlines():
    before, _, after = line.partition(" - ")
    where, options = before.split()[4:6]
    if "rw" not in options.split(",") or after.split()[0] in ("proc", "sysfs", "devpts") or not os.path.isdir(where):
        continue
    counters.append(inode(where))
    space = os.statvfs(where)
    state.append((where, space.f_blocks - space.f_bfree, space.f_files - space.f_ffree, times(where), flags(where),
                  [(name, os.getxattr(where, name)) for name in os.listxattr(where)]))
    if where == "/dev":
        state += [times("/dev/" + name) for name in ("null", "zero", "full", "random", "urandom", "tty")]
state += [read("/proc/sysvipc/" + name) for name in ("shm", "sem", "msg")]
memory, semaphore, queue = libc.shmget(0, 1, 0o600), libc.semget(0, 1, 0o600), libc.msgget(0, 0o600)
libc.shmctl(memory, 0, None), libc.semctl(semaphore, 0, 0), libc.msgctl(queue, 0, None)
counters += [memory, semaphore, queue]
state += [queues(), *(read("/proc/net/" + name) for name in ("dev", "snmp", "snmp6"))]
# Of the runner, which new processes inherit it from.
state += [sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)]
state += [libc.syscall({"x86_64": 252, "aarch64": 31}[platform.machine()], 1, 0)]  # ioprio_get
state += [resource.getrlimit(limit) for limit in range(16) if limit != resource.RLIMIT_CPU]
print((repr(state), counters))
"""
"""Prints what must stay as it is, and counters that only go up: process id, inodes, ids of shared memory."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a sandbox looks like."""

    state: str
    """All that a program may change: use of file systems, inodes of the top folders, shared memory, queues, network, limits."""
    counters: tuple[int, ...]
    """The process id first."""

    def steps(self, later: Look) -> tuple[int, ...] | None:
        """Return how far the counters went up until a later look; None if the state changed."""
        if later.state != self.state or len(later.counters) != len(self.counters):
            return None
        return tuple(end - start for start, end in zip(self.counters, later.counters, strict=True))


async def look(sandbox: Sandbox, number: int) -> Look | None:
    """Return the state of a sandbox, to be compared with a later one; None if it cannot be read.

    What programs left behind cannot change the answer: it comes from our code in a process forked from the runner.

    Raises:
        SandboxFailure: the sandbox failed, not the program.
    """
    outcome = await sandbox.run(Job(f"look-{number}", code=LOOK))
    if outcome.status is not ToolStatus.OK:
        return None
    state, counters = ast.literal_eval(outcome.stdout)
    return Look(state, tuple(counters))
