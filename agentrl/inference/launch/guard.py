"""A script that runs another program and kills its whole process group when the parent process ends.

``python guard.py COMMAND…`` forks a watcher into its process group and executes COMMAND under its own process id. The
watcher reads the pipe of `agentrl.core.child_process.ChildProcess`; the kernel closes it when the parent dies, even
by SIGKILL. So a program never outlives its parent, even in an interpreter without agentrl. (The kernel's signal for this,
PR_SET_PDEATHSIG, is sent when the starting *thread* ends, and does not reach grandchildren.)
"""

import os
import signal
import sys


def main() -> None:
    """Start the watcher and execute the command in this process."""
    descriptor = int(os.environ.pop("AGENTRL_PARENT_FD"))
    # Two forks: the watcher must not be a child of the program, which may wait for its children or kill them all.
    first = os.fork()
    if first == 0:
        if os.fork() == 0:
            _watch(descriptor)
        os._exit(0)
    os.waitpid(first, 0)
    os.close(descriptor)
    os.execvp(sys.argv[1], sys.argv[1:])


def _watch(descriptor: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for the program; the SIGKILL after it ends the group
    while os.read(descriptor, 1):
        pass
    os.write(2, b"the process that started this one has ended: ending\n")
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
