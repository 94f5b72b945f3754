"""Runs one command in a container and records its result: a process that outlives its caller.

Started as ``python -I -S exec_process.py`` with a `Request` as JSON on its standard input. Imports a few modules of the standard
library alone, since one starts for every command. The folder of a call has, in this order:

- ``lock``, held as long as a process runs the command: a second one waits, and returns when the result is there;
- ``exec.json``, once the daemon knows the command: its id there and the time of its start;
- ``head``, the beginning of its output as it arrives;
- ``result.json``, written last, at once; or ``failure``, why there is none, if the daemon is lost: the next process tries again.

If this process is killed, the next one for the same call takes up the command that the daemon still runs, and does not start it
again; output that was not read yet is lost then, and the result says that it is cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # the import takes longer than all others together
    from collections.abc import Mapping
    from types import FrameType
    from typing import TypedDict

    class ExecOptions(TypedDict):
        """Body of the request that creates a command at the daemon."""

        Cmd: list[str]
        Env: list[str]
        User: str
        WorkingDir: str
        AttachStdout: bool
        AttachStderr: bool

    class ExecState(TypedDict):
        """What the daemon reports about a command."""

        Running: bool
        ExitCode: int | None
        Pid: int

    class Request(TypedDict):
        """What to run; see `agentrl.containers.machine.Command`."""

        daemon: str
        """Address of the daemon, ``unix://`` or ``tcp://``."""
        version: str
        """Version of its API, such as ``1.41``."""
        container: str
        """The container's id."""
        folder: str
        """Folder of the call."""
        marker: str
        """Value of `MARKER` in the command's environment, which identifies its processes."""
        exec: ExecOptions
        """The command."""
        wall_s: float
        """Wall time, seconds."""
        output_bytes: int
        """Bytes of output that are recorded."""
        caller: int
        """Process id of the caller with whose end the command ends; 0: it outlives the caller."""


MARKER = "AGENTRL_CALL"
"""Environment variable of every command."""
FLOOD_BYTES = 2**26
"""Output after which a command is ended: more is no output that anybody reads."""
FIRST_POLL_S, LAST_POLL_S = 0.02, 1.0
"""Time between two questions whether the command still runs: the first, and the longest."""
DRAIN_S = 0.2
"""Time for the rest of the output after the command's end. Processes that it left behind may hold the stream open."""
KILLED_S = 5.0
"""Time in which a killed command is gone; otherwise the container is started again."""
REQUEST_S = 60.0
_DEATH_SIGNAL = 1
CHUNK = 2**16

KILL_SCRIPT = r"""
pids= tree=' ' first=
for folder in /proc/[0-9]*; do
  pid=${folder#/proc/}
  { read -r line < $folder/stat; } 2>/dev/null || continue
  set -- ${line##*) }
  pids="$pids $pid:$2:$4:${20}"
  case $pid in $$) continue;; esac
  marked=
  { while IFS= read -r variable || [ -n "$variable" ]; do
      case $variable in *"$AGENTRL_KILL"*) marked=1; break;; esac
    done < $folder/environ; } 2>/dev/null
  if [ -n "$marked" ]; then
    tree="$tree$pid "
    if [ -z "$first" ] || [ "${20}" -lt "$first" ]; then first=${20}; fi
  fi
done
[ -n "$first" ] || exit 0
again=1
while [ -n "$again" ]; do
  again=
  for entry in $pids; do
    pid=${entry%%:*} entry=${entry#*:}; parent=${entry%%:*} entry=${entry#*:}; session=${entry%%:*} start=${entry#*:}
    case $pid in 1|$$) continue;; esac
    case $tree in *" $pid "*) continue;; esac
    member=
    case $tree in *" $parent "*|*" $session "*) member=1;; esac
    if [ "$parent" = 1 ] && [ "$start" -ge "$first" ]; then member=1; fi
    if [ -n "$member" ]; then tree="$tree$pid " again=1; fi
  done
done
kill -9 $tree 2>/dev/null
exit 0
"""
"""Kills a command's processes, in the container's own shell with its builtins alone: those with the marker in their environment,
their descendants, their sessions, and orphans that began after the command did."""


class DaemonError(Exception):
    """The daemon refused a request, or cannot be reached."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text


class Daemon:
    """The daemon's API, over one connection a request."""

    def __init__(self, address: str, version: str) -> None:
        self._address = address
        self._version = version

    def _connect(self) -> socket.socket:
        kind, _, location = self._address.partition("://")
        if kind == "unix":
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(REQUEST_S)
            connection.connect(location)
            return connection
        host, _, port = location.rstrip("/").rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), REQUEST_S)

    def _send(self, method: str, path: str, body: object, protocol: str, headers: str) -> tuple[socket.socket, bytes]:
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} /v{self._version}{path} HTTP/{protocol}\r\nHost: docker\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n{headers}\r\n"
        )
        try:
            connection = self._connect()
            connection.sendall(head.encode() + content)
            answer = b""
            while b"\r\n\r\n" not in answer:
                data = connection.recv(CHUNK)
                if not data:
                    raise OSError("the daemon closed the connection")
                answer += data
        except OSError as error:
            raise DaemonError(0, f"no Docker daemon answers at {self._address}: {error}") from error
        return connection, answer

    def request(self, method: str, path: str, body: object = None) -> bytes:
        """Return the daemon's answer.

        Raises:
            DaemonError: it is an error.
        """
        connection, answer = self._send(method, path, body, "1.0", "")
        with connection:
            try:
                while data := connection.recv(CHUNK):
                    answer += data
            except OSError as error:
                raise DaemonError(0, f"no Docker daemon answers at {self._address}: {error}") from error
        head, _, content = answer.partition(b"\r\n\r\n")
        _raise_for_status(head, content)
        return content

    def create_exec(self, container: str, options: Mapping[str, object]) -> str:
        """Create a command, and return its id.

        Raises:
            DaemonError: there is no such container, or it does not run.
        """
        return str(json.loads(self.request("POST", f"/containers/{container}/exec", options))["Id"])

    def stream(self, path: str, body: object) -> tuple[socket.socket, bytes]:
        """Return a connection that the daemon has turned into a stream, and the stream's first bytes.

        Raises:
            DaemonError: it is an error.
        """
        headers = "Connection: Upgrade\r\nUpgrade: tcp\r\n"
        connection, answer = self._send("POST", path, body, "1.1", headers)
        head, _, content = answer.partition(b"\r\n\r\n")
        try:
            if b" 101 " not in head.split(b"\r\n")[0]:
                connection.settimeout(1.0)
                with contextlib.suppress(OSError):
                    while b"}" not in content and (data := connection.recv(CHUNK)):
                        content += data
                _raise_for_status(head, content)
        except DaemonError:
            connection.close()
            raise
        return connection, content


def _raise_for_status(head: bytes, content: bytes) -> None:
    status = int(head.split(b" ", 2)[1])
    if status < 400:
        return
    text = content.decode("utf-8", "replace")
    start, end = text.find("{"), text.rfind("}")
    with contextlib.suppress(ValueError, KeyError):
        text = str(json.loads(text[start : end + 1])["message"])
    raise DaemonError(status, text.strip())


class Output:
    """The first and the last half of a limit of bytes; the first is in a file as soon as it arrives."""

    def __init__(self, file: str, limit: int) -> None:
        self._file = open(file, "ab", buffering=0)  # noqa: SIM115 - open as long as the command runs
        with open(file, "rb") as earlier:
            self._head = earlier.read()
        self._limit = limit
        self._tail = bytearray()
        self._frames = bytearray()
        self.total = len(self._head)

    def feed(self, data: bytes) -> None:
        """Add bytes of the daemon's stream, which has a header of 8 bytes before every chunk."""
        self._frames += data
        frames, position = self._frames, 0
        while len(frames) - position >= 8:
            length = int.from_bytes(frames[position + 4 : position + 8], "big")
            if len(frames) - position - 8 < length:
                break
            self._add(bytes(frames[position + 8 : position + 8 + length]))
            position += 8 + length
        del frames[:position]

    def _add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = max(0, self._limit // 2 - len(self._head))
        if room:
            self._head += chunk[:room]
            self._file.write(chunk[:room])
        self._tail += chunk[room:]
        excess = len(self._tail) - (self._limit - self._limit // 2)
        if excess > 0:
            del self._tail[:excess]

    def left_out(self) -> int:
        """Return how many bytes are not recorded."""
        return self.total - len(self._head) - len(self._tail)

    def text(self) -> str:
        """Return what is recorded; a line in the middle says how much is not."""
        if not (left_out := self.left_out()):
            return (self._head + bytes(self._tail)).decode("utf-8", "replace")
        head, tail = self._head.decode("utf-8", "replace"), self._tail.decode("utf-8", "replace")
        return f"{head}\n[… {left_out} bytes of output left out …]\n{tail}"


class Execution:
    """One command of the daemon's."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._daemon = Daemon(request["daemon"], request["version"])
        self._container = request["container"]
        self._id = ""
        self._started = 0.0
        self._interrupted = False
        self.is_lost = False
        """Whether output was lost since an earlier process of this call was killed."""
        self.timed_out = self.flooded = self.restarted = False

    def interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        """End the command: the caller wants it no more."""
        self._interrupted = True

    def run(self, output: Output) -> int | None:
        """Run the command, or take it up; return its exit status, None if it was killed or its container ended.

        Raises:
            DaemonError: the daemon refused, or is lost.
        """
        file = os.path.join(self._request["folder"], "exec.json")
        try:
            with open(file) as record_file:
                record = json.load(record_file)
            self._id, self._started = record["id"], record["started"]
            state = self._state()
            if state is not None and state["Pid"] == 0 and state["ExitCode"] is None:
                state = None if self._stream(output) else state  # it was killed before the start
            else:
                self.is_lost = True
                self._wait(None, output)
        except FileNotFoundError:
            self._id = self._daemon.create_exec(self._container, self._request["exec"])
            self._started = time.time()
            write_json(file, {"id": self._id, "started": self._started})
            self._stream(output)
        if self.timed_out or self.flooded or self._interrupted:
            return None
        state = self._state()
        return None if state is None else state["ExitCode"]

    def _stream(self, output: Output) -> bool:
        connection, first = self._daemon.stream(f"/exec/{self._id}/start", {"Detach": False, "Tty": False})
        output.feed(first)
        with connection:
            connection.setblocking(False)
            self._wait(connection, output)
        return True

    def _state(self) -> ExecState | None:
        """Return what the daemon reports about the command; None once it has forgotten it, with its container."""
        try:
            state: ExecState = json.loads(self._daemon.request("GET", f"/exec/{self._id}/json"))
        except DaemonError as error:
            if error.status in (404, 409):
                return None
            raise
        return state

    def _is_running(self) -> bool:
        state = self._state()
        return state is not None and state["Running"]

    def _wait(self, connection: socket.socket | None, output: Output) -> None:
        """Read output until the command has ended, and end it at its limits."""
        poll_s, next_poll = FIRST_POLL_S, time.monotonic() + FIRST_POLL_S
        while True:
            if self._interrupted or time.time() > self._started + self._request["wall_s"] or output.total > FLOOD_BYTES:
                self.flooded = output.total > FLOOD_BYTES
                self.timed_out = not (self._interrupted or self.flooded)
                self._kill()
                break
            readable: list[socket.socket] = []
            if connection is not None:
                limit = self._started + self._request["wall_s"] - time.time()
                readable, _, _ = select.select([connection], [], [], max(0.0, min(poll_s, limit)))
            else:
                time.sleep(min(poll_s, 0.1))
            if readable and connection is not None and not self._read(connection, output):
                connection = None
                next_poll = 0.0
            if time.monotonic() >= next_poll:
                if not self._is_running():
                    break
                poll_s = min(LAST_POLL_S, poll_s * 1.5)
                next_poll = time.monotonic() + poll_s
        if connection is not None:
            self._drain(connection, output)

    def _read(self, connection: socket.socket, output: Output) -> bool:
        try:
            data = connection.recv(CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        output.feed(data)
        return bool(data)

    def _drain(self, connection: socket.socket, output: Output) -> None:
        deadline = time.monotonic() + DRAIN_S
        while (remaining_s := deadline - time.monotonic()) > 0 and output.total <= FLOOD_BYTES:
            readable, _, _ = select.select([connection], [], [], remaining_s)
            if not readable or not self._read(connection, output):
                return

    def _kill(self) -> None:
        """Kill the command's processes; if they stay, start the container again, which kills all of its processes."""
        kill_processes(self._daemon, self._container, self._request["marker"])
        deadline = time.monotonic() + KILLED_S
        while time.monotonic() < deadline:
            if not self._is_running():
                return
            time.sleep(FIRST_POLL_S)
        try:
            self._daemon.request("POST", f"/containers/{self._container}/restart?t=0")
        except DaemonError as error:
            if error.status != 404:
                raise
        self.restarted = True


def kill_processes(daemon: Daemon, container: str, marker: str) -> None:
    """Kill the processes of a command, by its marker, with all that they have started; what has ended is no error.

    Raises:
        DaemonError: the daemon is lost.
    """
    body = {"Cmd": ["/bin/sh", "-c", KILL_SCRIPT], "User": "0", "Env": [f"AGENTRL_KILL={MARKER}={marker}"]}
    try:
        killer = daemon.create_exec(container, body)
        daemon.request("POST", f"/exec/{killer}/start", {"Detach": True, "Tty": False})
    except DaemonError as error:
        if error.status == 0:
            raise


def write_json(file: str, value: object) -> None:
    """Write a file at once: it has its whole content or is not there."""
    with open(f"{file}.part", "w") as content:
        json.dump(value, content)
    os.replace(f"{file}.part", file)


def main() -> None:
    """Run the command of the request on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request: Request = json.load(sys.stdin)
    execution = Execution(request)
    signal.signal(signal.SIGTERM, execution.interrupt)
    if request["caller"]:
        import ctypes  # few commands need it

        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != request["caller"]:
            return
    with open(os.path.join(request["folder"], "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result_file = os.path.join(request["folder"], "result.json")
        if os.path.exists(result_file):
            return
        output = Output(os.path.join(request["folder"], "head"), request["output_bytes"])
        start = time.time()
        failure, refusal = "", ""
        exit_code = None
        try:
            exit_code = execution.run(output)
        except DaemonError as error:
            # Errors of the runtime are about the command: no such program, user or folder, or no process left.
            if error.status == 400 or "OCI runtime" in error.text or "unable to find user" in error.text:
                refusal, exit_code = error.text.strip(), 126
            else:
                failure = error.text
        result = {
            "exit_code": exit_code,
            "output": refusal or output.text(),
            "is_cut": bool(output.left_out()) or execution.is_lost,
            "timed_out": execution.timed_out,
            "flooded": execution.flooded,
            "restarted": execution.restarted,
            "seconds": time.time() - start,
        }
        if failure:
            write_json(os.path.join(request["folder"], "failure"), failure)
        else:
            write_json(result_file, result)


if __name__ == "__main__":
    main()
