"""Attacks through the network and through parts of the kernel that code has no need of."""

from __future__ import annotations

from attacks.attack import Attack, Bare, Without, ends

from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import Defence

NETWORK, SECCOMP, PRIVILEGES = Defence.NETWORK, Defence.SECCOMP, Defence.PRIVILEGES
ANY = ends(ToolStatus.OK, ToolStatus.ERROR)
OK = ends(ToolStatus.OK)
CONNECT = "one = socket.create_connection({0}, 1)\npwned(one.recv(100))"

NET = (
    Attack("a service on the machine's loopback", "network namespace", CONNECT.format("T['tcp']"), Without(NETWORK)),
    Attack("the same over IPv6", "network namespace", CONNECT.format("T['tcp6']"), Without(NETWORK)),
    Attack("an address outside", "network namespace", CONNECT.format("T['outside']"), Without(NETWORK)),
    Attack(
        "a datagram, such as to a name server",
        "network namespace",
        """
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.settimeout(0.3)
one.sendto(b"?", tuple(T["udp"]))
pwned(one.recv(100))
""",
        Without(NETWORK),
    ),
    Attack(
        "an abstract unix socket of the machine",
        "network namespace",
        "one = socket.socket(socket.AF_UNIX)\none.connect('\\0' + T['abstract'])\npwned(one.recv(100))",
        Without(NETWORK),
    ),
    Attack(
        "a vsock to the hypervisor",
        "seccomp; it is in no network namespace",
        "socket.socket(40, socket.SOCK_STREAM)\npwned('made')",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "a vsock, its family in 64 bits",
        "seccomp compares what the kernel reads",
        "syscall('socket', ctypes.c_ulong(40 + (7 << 32)), 1, 0)\npwned('made')",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "a netlink socket",
        "seccomp",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\npwned('made')",
        Without(SECCOMP),
    ),
    Attack(
        "a packet socket",
        "seccomp, no privileges",
        "libc.unshare(0x50000000)\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)\npwned('made')",
        Without(SECCOMP),
    ),
    Attack(
        "a raw socket",
        "no privileges",
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\npwned('made')",
        Without(PRIVILEGES),
    ),
    Attack(
        "the kernel's crypto socket",
        "seccomp",
        "socket.socket(38, socket.SOCK_SEQPACKET)\npwned('made')",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "every other family of sockets",
        "seccomp",
        """
for family in set(range(64)) - {1, 2, 10, 40}:
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind).close()
            pwned(family)
        except OSError: pass
""",
        Without(SECCOMP),
        OK,
    ),
)

CALLS = (
    Attack(
        "io_uring",
        "seccomp",
        "syscall('io_uring_setup', 4, ctypes.create_string_buffer(256))\npwned('a ring')",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "bpf",
        "seccomp, no privileges",
        "syscall('bpf', 0, struct.pack('IIIII', 2, 4, 8, 1, 0) + bytes(100), 120)\npwned('a map')",
        Bare("without seccomp the kernel still asks for root of the machine, where sysctl says so"),
        kernel_may_lack=True,
    ),
    Attack(
        "perf_event_open",
        "seccomp",
        "libc.unshare(0x10000000)\n"
        "syscall('perf_event_open', struct.pack('IIQQQQQ', 1, 112, 1, 0, 0, 0, 0x61) + bytes(56), 0, -1, -1, 0)\n"
        "pwned('an event')",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "a keyring that other sandboxes share",
        "seccomp",
        "key = syscall('add_key', b'user', b'agentrl-attack', b'x', 1, ctypes.c_long(-4))\npwned(key)",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "userfaultfd",
        "seccomp",
        "syscall('userfaultfd', 1)\npwned('made')",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "inotify: who opens the files that sandboxes share",
        "seccomp",
        """
fd = syscall("inotify_init1", os.O_NONBLOCK)
syscall("inotify_add_watch", fd, b"/usr", 0x20)
os.listdir("/usr")
pwned(os.read(fd, 100))
""",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "the same by signals",
        "seccomp",
        """
import fcntl, signal
signal.signal(signal.SIGIO, lambda *_: pwned("a signal"))
folder = os.open("/usr", os.O_RDONLY)
fcntl.fcntl(folder, 1026, 1)
os.listdir("/usr")
time.sleep(0.05)
""",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "the same by fanotify",
        "seccomp",
        "fd = syscall('fanotify_init', 0x200, 0)\npwned('a group of watches')",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "read the kernel's log",
        "seccomp",
        "buffer = ctypes.create_string_buffer(4096)\nsyscall('syslog', 3, buffer, 4096)\npwned(buffer.raw[:60])",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
    Attack(
        "memory without a random layout",
        "seccomp",
        "call('personality', ctypes.c_ulong(0x40000))\npwned('set')",
        Without(SECCOMP),
    ),
    Attack(
        "type into the terminal",
        "seccomp; and there is no terminal",
        """
import fcntl, pty
master, slave = pty.openpty()
fcntl.ioctl(slave, 0x540E, 0)
fcntl.ioctl(slave, 0x5412, b"x")
pwned("typed")
""",
        Bare("there is no terminal whichever defence is away"),
        kernel_may_lack=True,
    ),
    Attack(
        "a system call by its number of 32-bit code",
        "seccomp knows one instruction set",
        """
import mmap, platform
code = mmap.mmap(-1, 4096, prot=7)
# push rbx; mov eax, 20 (getpid of i386); int 0x80; pop rbx; ret
code.write(bytes.fromhex("53b814000000cd805bc3"))
if platform.machine() == "x86_64":
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    if result == os.getpid(): pwned("getpid through i386")
""",
        Without(SECCOMP),
        ends(ToolStatus.KILLED, ToolStatus.ERROR),
        kernel_may_lack=True,
    ),
    Attack(
        "a mount of the cgroup file system",
        "seccomp",
        "libc.unshare(0x12020000)\nos.mkdir('g')\ncall('mount', b'none', b'g', b'cgroup2', 0, None)\npwned(os.listdir('g'))",
        Without(SECCOMP),
        kernel_may_lack=True,
    ),
)

ATTACKS = (*NET, *CALLS)
