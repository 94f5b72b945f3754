"""Detects whether a program left anything in its sandbox that its next run could find."""

from __future__ import annotations

from agentrl import ToolStatus
from agentrl.sandbox.base import Job, Sandbox

LOOK = r"""
import os
seen = []
with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
    for line in mounts:
        before, _, after = line.partition(" - ")
        where, options = before.split()[4:6]
        if "rw" not in options.split(",") or after.split()[0] in ("proc", "sysfs", "devpts") or not os.path.isdir(where):
            continue
        space, folder = os.statvfs(where), os.stat(where)
        seen.append((where, space.f_blocks - space.f_bfree, space.f_files - space.f_ffree, folder.st_mode,
                     folder.st_mtime_ns, [(name, os.getxattr(where, name)) for name in os.listxattr(where)]))
for name in ("shm", "sem", "msg"):
    try:
        with open("/proc/sysvipc/" + name, encoding="utf-8") as table:
            seen.append(table.read())
    except FileNotFoundError:
        pass
print(seen)
"""
"""Prints the used space of every writable file system, the state of its top folder, and all shared memory, semaphores and
message queues. A program that writes files and deletes them again changes at most the folder's modification time."""


async def look(sandbox: Sandbox, number: int) -> str | None:
    """Return the state of a sandbox, to be compared with an earlier one; None if it cannot be read.

    What programs left behind cannot change the answer: it comes from our code in a process forked from the runner.

    Raises:
        SandboxFailure: the sandbox failed, not the program.
    """
    outcome = await sandbox.run(Job(f"look-{number}", code=LOOK))
    return outcome.stdout if outcome.status is ToolStatus.OK else None
