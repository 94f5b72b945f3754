"""A script that runs an agent program, and leaves nothing of it: no process, and not its folder.

``python supervisor.py FOLDER STATUS_FD`` starts the program that ``FOLDER/start.json`` names, in its own session, with
``FOLDER/prompt.txt`` as its standard input and ``FOLDER/output.txt`` as its standard output. It is the parent of all
processes that the program leaves behind, however they were detached (PR_SET_CHILD_SUBREAPER), and kills them when the program
ends, when it gets SIGUSR1, or when the process that started it ends, even by SIGKILL, which closes the pipe of
`agentrl.core.child_process.ChildProcess`. It writes the program's exit status to ``STATUS_FD``. The folder stays until that
pipe is closed or SIGTERM comes, for the reward. It imports nothing of agentrl, so that it starts at once.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import sys
from contextlib import suppress

_DEATH_SIGNAL = 1
_SUBREAPER = 36
_NOT_STARTED = 127


def main() -> None:
    """Run the program and wait for the end."""
    folder, status = sys.argv[1], int(sys.argv[2])
    parent = int(os.environ.pop("AGENTRL_PARENT_FD"))
    for descriptor in (parent, status):
        os.set_inheritable(descriptor, False)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    wakeup, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):  # for the run, which decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    program = _start(folder)
    ends = False
    while not ends:
        readable, _, _ = select.select([parent, wakeup], [], [])
        signals = os.read(wakeup, 4096) if wakeup in readable else b""
        ends = signal.SIGTERM in signals or (parent in readable and not os.read(parent, 1))
        code = _reap(program)
        if code is not None or signal.SIGUSR1 in signals or ends:
            code = _kill_all(program) if code is None else code
            _kill_all(program)
            if code is not None:
                with suppress(OSError):
                    os.write(status, b"%d\n" % code)
                os.close(status)
                status = os.open(os.devnull, os.O_WRONLY)
    shutil.rmtree(folder, ignore_errors=True)


def _start(folder: str) -> int:
    """Start the program and return its process id."""
    with open(os.path.join(folder, "start.json"), encoding="utf-8") as file:
        start = json.load(file)
    supervisor = os.getpid()
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        # The program itself does not outlive a supervisor that is killed.
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(_NOT_STARTED)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.path.join(folder, "prompt.txt"), os.O_RDONLY), 0)
        os.dup2(os.open(os.path.join(folder, "output.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
        os.chdir(start["cwd"])
        os.execvpe(start["command"][0], start["command"], start["env"])
    except OSError as error:
        os.write(2, f"{start['command'][0]} does not start: {error}\n".encode())
    finally:
        os._exit(_NOT_STARTED)


def _reap(program: int) -> int | None:
    """Reap children that have ended; return the program's exit status if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while True:
            process, state = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            if process == program:
                code = os.waitstatus_to_exitcode(state)
    return code


def _kill_all(program: int) -> int | None:
    """Kill all descendants; return the program's exit status if it is among them."""
    code = None
    while True:
        # Those of a killed child become children of this process, for the next round.
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            process, state = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        if process == program:
            code = os.waitstatus_to_exitcode(state)


def _children() -> list[int]:
    children = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    children.append(int(name))
    return children


if __name__ == "__main__":
    main()
