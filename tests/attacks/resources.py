"""Attacks that want more than their share: memory, processes, CPU, time, disk, output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attacks.attack import ROOMY, Attack, Bare, Without, ends

from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import Defence

OK, ERROR, TIMEOUT = ends(ToolStatus.OK), ends(ToolStatus.ERROR), ends(ToolStatus.TIMEOUT)
OOM, CUT = ends(ToolStatus.OUT_OF_MEMORY), ends(ToolStatus.OUTPUT_CUT)

TIME = (
    Attack(
        "endless loop",
        "wall clock",
        "end = time.monotonic() + 0.9\nwhile time.monotonic() < end: pass\npwned('ran on')",
        Without(Defence.WALL),
        TIMEOUT,
        wall_s=0.2,
    ),
    Attack(
        "sleep with every stream closed",
        "wall clock",
        "os.closerange(0, 64)\ntime.sleep(1.2)\nopen('/work/proof', 'w').write('PWNED slept on')",
        Without(Defence.WALL),
        TIMEOUT,
        wall_s=0.5,
    ),
    Attack(
        "ignore every signal",
        "wall clock, and SIGKILL",
        """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
time.sleep(1.2)
pwned("ran on")
""",
        Without(Defence.WALL),
        TIMEOUT,
        wall_s=0.5,
    ),
    Attack(
        "burn CPU in one process",
        "CPU seconds of a process (rlimit)",
        "while time.process_time() < 1.2: pass\npwned(time.process_time())",
        Without(Defence.CPU),
        TIMEOUT,
        cpu_s=1,
        wall_s=20,
    ),
    Attack(
        "burn CPU in many processes",
        "cores of all processes together (cgroup)",
        """
import resource
def used():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
for _ in range(3):
    before, began = used(), time.monotonic()
    children = []
    for _ in range(12):
        pid = os.fork()
        if pid == 0:
            while time.monotonic() < began + 0.5: pass
            os._exit(0)
        children.append(pid)
    for pid in children: os.waitpid(pid, 0)
    cores = (used() - before) / (time.monotonic() - began)
    if cores > 0.12:
        pwned("%.2f cores" % cores)
        break
""",
        Without(Defence.CPU),
        OK,
        limits={"cpus": 0.05},
        wall_s=20,
    ),
)

PROCESSES = (
    Attack(
        "fork bomb",
        "processes (cgroup), then the sweep",
        """
made = os.open("made", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
first = os.getpid()
while os.fstat(made).st_size < 80:
    try:
        if os.fork() == 0: os.write(made, b"x")
    except OSError: pass
if os.getpid() == first: pwned("80 processes")
else: time.sleep(30)
""",
        Without(Defence.PROCESSES),
        TIMEOUT,
        limits={"memory_mb": 512},  # for all 80: with too little the kernel kills some, and the bomb does not end
        wall_s=0.4,
        control_wall_s=1.0,
    ),
    Attack(
        "processes one after the other, each stays",
        "processes (cgroup)",
        "for _ in range(80):\n    if os.fork() == 0: time.sleep(30)\npwned('80 processes')",
        Without(Defence.PROCESSES),
    ),
    Attack(
        "thread bomb",
        "processes (cgroup)",
        """
import threading
threading.stack_size(65536)
for _ in range(80): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
pwned("80 threads")
""",
        Without(Defence.PROCESSES),
    ),
    Attack(
        "fork bomb of the process that keeps variables",
        "processes (cgroup), then the sweep",
        """
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.3)
            pwned_file("a child ran on after the call")
    except OSError: time.sleep(0.01)
""",
        Without(Defence.SWEEP),
        TIMEOUT,
        wall_s=0.25,
        stateful=True,
        pause_s=0.6,
    ),
)

# Memory of sockets whose data nobody reads; `pair` is added, and returns two connected sockets. Counted is what can be read
# in the end: what did not fit was lost.
SOCKETS = """
held, size = [], 0
while size < 60 << 20 and len(held) < 50:
    one, two = pair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    held.append((one, two))
    one.setblocking(False)
    try:
        for _ in range(200): size += one.send(b"x" * 30000)
    except OSError: pass
got = 0
for one, two in held:
    two.setblocking(False)
    one.close()
    try:
        while True:
            part = two.recv(1 << 20)
            if not part: break
            got += len(part)
    except OSError: pass
if got > 50 << 20: pwned("%d MiB in sockets" % (got >> 20))
"""
SMALL: Mapping[str, Any] = {"memory_mb": 36, "open_files": 128}

MEMORY = (
    Attack(
        "memory bomb", "memory (cgroup)", "hold = b'x' * (256 << 20)\npwned(len(hold))", Without(Defence.MEMORY), OOM
    ),
    Attack(
        "many children, each below the limit",
        "memory of all processes together (cgroup)",
        """
ready, told = os.pipe()
held, let_go = os.pipe()
children = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        os.close(let_go)
        hold = b"x" * (40 << 20)
        os.write(told, b"x")
        os.close(told)
        os.read(held, 1)  # until the attacker ends
        os._exit(0)
    children.append(child)
os.close(told)
got = 0
while got < 5:
    part = os.read(ready, 5)
    if not part: break
    got += len(part)
alive = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
if got == len(alive) == 5: pwned("200 MiB at once")
""",
        Without(Defence.MEMORY),
        OOM,
    ),
    Attack(
        "memory as files",
        "memory (cgroup) counts the tmpfs",
        """
for number in range(120):
    with open("%d" % number, "wb") as file: file.write(b"x" * (2 << 20))
pwned("240 MiB of files")
""",
        Without(Defence.MEMORY),
        OOM,
        limits=ROOMY,
        hurts_itself=True,
    ),
    Attack(
        "memory as files without a name",
        "memory (cgroup) counts memfd",
        """
hold = []
for number in range(60):
    hold.append(os.memfd_create("hidden"))
    os.write(hold[-1], b"x" * (3 << 20))
pwned("180 MiB in memfds")
""",
        Without(Defence.MEMORY),
        OOM,
    ),
    Attack(
        "memory in pipes",
        "memory (cgroup) counts the kernel's buffers",
        """
import fcntl
hold = []
for _ in range(48):
    read, write = os.pipe()
    hold += [read, write]
    fcntl.fcntl(write, 1031, 1 << 20)
    os.set_blocking(write, False)
    try:
        while os.write(write, b"x" * 65536): pass
    except BlockingIOError: pass
pwned("48 MiB in pipes")
""",
        Without(Defence.MEMORY),
        OOM,
        limits=SMALL,
    ),
    Attack(
        "memory in TCP sockets",
        "memory (cgroup) counts them; on version 1 apart from other memory, by a limit of their own",
        """
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]
"""
        + SOCKETS,
        Without(Defence.MEMORY),
        OOM | OK,
        limits=SMALL,
    ),
    Attack(
        "memory in UDP sockets",
        "memory (cgroup) counts them; on version 1 apart from other memory, by a limit of their own",
        """
def pair():
    one, two = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in "ab")
    two.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    two.bind(("127.0.0.1", 0))
    one.connect(two.getsockname())
    return one, two
"""
        + SOCKETS,
        Without(Defence.MEMORY),
        OOM | OK,
        limits=SMALL,
    ),
    Attack(
        "memory in unix sockets",
        "memory (cgroup) counts the kernel's buffers",
        "pair = socket.socketpair\n" + SOCKETS,
        Without(Defence.MEMORY),
        OOM,
        limits=SMALL,
    ),
    Attack(
        "memory as page tables",
        "memory (cgroup) counts them",
        """
import mmap
where = mmap.mmap(-1, 20 << 30, flags=0x4022, prot=mmap.PROT_READ)
for at in range(0, 20 << 30, 2 << 20): where[at]
pwned("40 MiB of page tables")
""",
        Without(Defence.MEMORY),
        OOM,
        limits=SMALL,
        hurts_itself=True,  # for a moment: the kernel frees page tables late
    ),
    Attack(
        "huge pages, which no limit of memory counts",
        "seccomp",
        "import mmap\nmmap.mmap(-1, 2 << 20, flags=0x44022)\npwned('mapped')",
        Without(Defence.SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "huge pages as a file without a name",
        "seccomp",
        "os.memfd_create('huge', 4)\npwned('made')",
        Without(Defence.SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "memory as System V segments",
        "memory (cgroup) counts them",
        """
libc.shmat.restype = ctypes.c_void_p
for number in range(5):
    segment = call("shmget", 0, ctypes.c_size_t(40 << 20), 0o1600)
    where = libc.shmat(segment, None, 0)
    ctypes.memset(where, 1, 40 << 20)
pwned("200 MiB in segments")
""",
        Without(Defence.MEMORY),
        OOM,
        hurts_itself=True,
    ),
)

DISK = (
    Attack(
        "large file",
        "size of a file (rlimit)",
        "with open('large', 'wb') as file: file.write(b'x' * (6 << 20))\npwned(os.stat('large').st_size)",
        Without(Defence.FILE_SIZE),
    ),
    Attack(
        "sparse file of 10 GB",
        "size of a file (rlimit)",
        "open('sparse', 'w').close()\nos.truncate('sparse', 10 << 30)\npwned(os.stat('sparse').st_size)",
        Without(Defence.FILE_SIZE),
    ),
    Attack(
        "fill the disk with files",
        "size of the tmpfs",
        "for n in range(8):\n    with open('f%d' % n, 'wb') as file: file.write(b'x' * (3 << 20))\npwned('24 MiB')",
        Without(Defence.DISK),
    ),
    Attack(
        "fill /tmp and /dev/shm",
        "size of the tmpfs",
        """
for n in range(8):
    with open("/%s/f%d" % ("tmp" if n % 2 else "dev/shm", n), "wb") as file: file.write(b"x" * (3 << 20))
pwned("24 MiB")
""",
        Without(Defence.DISK),
    ),
    Attack(
        "files without end",
        "inodes of the tmpfs",
        "for n in range(600): os.close(os.open('n%d' % n, os.O_CREAT | os.O_WRONLY))\npwned('600 files')",
        Without(Defence.INODES),
    ),
    Attack(
        "folders in folders",
        "inodes of the tmpfs",
        "for n in range(600):\n    os.mkdir('d')\n    os.chdir('d')\npwned('600 deep')",
        Without(Defence.INODES),
    ),
    Attack(
        "open files without end",
        "open files of a process (rlimit)",
        "hold = [open('/dev/null') for _ in range(100)]\npwned(len(hold))",
        Without(Defence.OPEN_FILES),
    ),
    Attack(
        "pseudo-terminals without end",
        "a /dev without them",
        "hold = [os.open('/dev/ptmx', os.O_RDWR) for _ in range(40)]\npwned(len(hold))",
        Bare("there are none whichever defence is away"),
    ),
    Attack(
        "raise a limit",
        "no privileges: hard limits stay",
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (200000, 200000))\npwned('200,000 files')",
        Bare("it asks for root of the machine with CAP_SYS_RESOURCE, which no sandbox has whichever defence is away"),
        kernel_may_lack=True,
    ),
    Attack(
        "core dumps",
        "RLIMIT_CORE is 0",
        """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))
pid = os.fork()
if pid == 0: os.abort()
if os.WCOREDUMP(os.waitpid(pid, 0)[1]): pwned("dumped")
""",
        Bare("the runner forbids dumps whichever defence is away"),
    ),
)

OUTPUT = (
    Attack(
        "flood of output",
        "bytes of output",
        "for _ in range(32): os.write(1, b'x' * 65536)\npwned('2 MiB')",
        Without(Defence.OUTPUT),
        CUT,
    ),
    Attack(
        "flood of errors",
        "bytes of output",
        "for _ in range(32): os.write(2, b'x' * 65536)\npwned('2 MiB')",
        Without(Defence.OUTPUT),
        CUT,
    ),
    Attack(
        "one huge line",
        "bytes of output",
        "sys.stdout.write('x' * (2 << 20) + 'PWNED at the end of a line')",
        Without(Defence.OUTPUT),
        CUT,
    ),
    Attack(
        "output of a process that continues in the background",
        "the sweep",
        """
if os.fork() == 0:
    os.setsid()
    for _ in range(40):
        try: os.write(1, b"x" * 1024)
        except OSError: pass
        time.sleep(0.01)
    pwned_file("wrote on")
""",
        Without(Defence.SWEEP),
        OK,
        pause_s=0.7,
    ),
)

ATTACKS = (*TIME, *PROCESSES, *MEMORY, *DISK, *OUTPUT)
