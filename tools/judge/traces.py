"""Whether a program left anything in its sandbox that its next run could find."""

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
"""Says how full every file system is that can be written to, how its top folder looks, and what shared memory, semaphores
and message queues there are. A program that writes and deletes files again leaves at most the folder's time of change."""


async def look(sandbox: Sandbox, number: int) -> str | None:
    """Return what a sandbox looks like, to be compared with an earlier look; None where even that cannot be said.

    Whatever programs left behind cannot change what is said: it is code of ours in a process forked from the runner.

    Raises:
        SandboxFailure: the sandbox failed for reasons of its own.

    """
    outcome = await sandbox.run(Job(f"look-{number}", code=LOOK))
    return outcome.stdout if outcome.status is ToolStatus.OK else None
