"""A script that becomes another program, whose whole process group ends when whoever started it is gone.

``python guard.py COMMAND…`` leaves a watcher in its process group and turns into COMMAND, which keeps the process id. The
watcher reads the pipe of `agentrl.core.child_process.ChildProcess`; the kernel closes it when the parent dies, even
by SIGKILL. So a program that knows nothing of agentrl, run by an interpreter that has no agentrl, never outlives its
parent. (The kernel's own signal for that, PR_SET_PDEATHSIG, is sent when the starting *thread* ends, and reaches no grandchild.)
"""

import os
import signal
import sys


def main() -> None:
    """Start the watcher and become the command."""
    descriptor = int(os.environ.pop("AGENTRL_PARENT_FD"))
    # Two forks: the watcher must be no child of the program, which may wait for its children or kill them all.
    first = os.fork()
    if first == 0:
        if os.fork() == 0:
            _watch(descriptor)
        os._exit(0)
    os.waitpid(first, 0)
    os.close(descriptor)
    os.execvp(sys.argv[1], sys.argv[1:])


def _watch(descriptor: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the program; the SIGKILL that follows is for all
    while os.read(descriptor, 1):
        pass
    os.write(2, b"the process that started this one is gone: ending\n")
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
