"""Attacks on the machine's files, its kernel's files, and privileges."""

from __future__ import annotations

from attacks.attack import Attack, Bare, NoControl, Without, ends

from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import Defence

OK = ends(ToolStatus.OK)
NOBODY = 65534
FILES, PRIVILEGES, SECCOMP = Defence.FILES, Defence.PRIVILEGES, Defence.SECCOMP
ROOT_OF_MACHINE = (
    "it asks for root of the machine, which no user namespace has, and Docker keeps from a container's root"
)

HOST = (
    Attack(
        "read /etc/shadow",
        "mount namespace",
        "if T['token'] in open('/etc/shadow').read(): pwned('passwords')",
        Without(FILES, PRIVILEGES, why="only root may read it, on the machine too"),
        ends(ToolStatus.ERROR, ToolStatus.OK),
    ),
    Attack(
        "read the server's home",
        "mount namespace",
        "pwned(open(T['home'] + '/.ssh/id_ed25519').read())",
        Without(FILES),
    ),
    Attack(
        "read /proc/1/root",
        "PID namespace, and the runner is not dumpable",
        "pwned(open('/proc/1/root' + T['home'] + '/.ssh/id_ed25519').read())",
        Bare(ROOT_OF_MACHINE),
    ),
    Attack(
        "change the repository",
        "mount namespace",
        "open(T['repo'] + '/reward.py', 'w').write('PWNED')",
        Without(FILES),
    ),
    Attack(
        "write to /usr",
        "read-only files",
        "open(T['usr'] + '/ls', 'w').write('x')\npwned('written')",
        {
            "bubblewrap": Without(FILES),
            "docker": Without(FILES, PRIVILEGES, why="the image's /usr is root's"),
        },
    ),
    Attack(
        "a link out of /work, read by the tool server",
        "files are read within the sandbox",
        "os.symlink(T['home'] + '/.ssh/id_ed25519', '/work/answer.txt')",
        Without(FILES),
        OK,
        reads=("answer.txt",),
    ),
    Attack(
        "a link out of /work, written by the tool server",
        "files are written within the sandbox",
        "os.symlink(T['repo'] + '/reward.py', '/work/answer.txt')\nos.symlink(T['repo'], '/work/folder')",
        Without(FILES),
        OK,
        writes={"answer.txt": b"PWNED", "folder/reward.py": b"PWNED"},
    ),
    Attack(
        "hard link to a file of the machine",
        "mount namespace",
        "os.link(T['repo'] + '/reward.py', T['repo'] + '/mine')\nopen(T['repo'] + '/mine', 'w').write('PWNED')",
        Without(FILES),
    ),
    Attack(
        "unix socket by path, such as the Docker daemon's",
        "mount namespace",
        """
one = socket.socket(socket.AF_UNIX)
one.connect(T["unix"])
pwned(one.recv(100))
""",
        Without(FILES),
    ),
)

KERNEL_FILES = (
    Attack(
        "write /proc/sys",
        "read-only /proc/sys, no privileges",
        "open('/proc/sys/kernel/hostname', 'w').write('pwned')\npwned('hostname')",
        Bare("it is read-only whichever defence is away"),
    ),
    Attack(
        "raise the own cgroup's limit",
        "no /sys, or a read-only one",
        """
own = [line.split(":", 2)[1:] for line in open("/proc/self/cgroup").read().split()]
for controllers, path in own:
    for file in ("memory.limit_in_bytes", "memory.max"):
        for folder in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
            if controllers in ("memory", "") and os.path.exists(folder + path + "/" + file):
                open(folder + path + "/" + file, "w").write(str(1 << 40))
                pwned(folder + path)
""",
        Bare("it is read-only whichever defence is away"),
        ends(ToolStatus.OK, ToolStatus.ERROR),
    ),
    Attack(
        "open devices: memory, kernel log, disks",
        "a /dev with none of them",
        """
for name in ("mem", "kmem", "kmsg", "port", "kvm", "vda", "sda", "nvme0n1", "fuse", "loop0", "vhost-net", "vhost-vsock"):
    try:
        os.close(os.open("/dev/" + name, os.O_RDONLY))
        pwned(name)
    except OSError: pass
""",
        Bare("devices are not there whichever defence is away"),
        OK,
    ),
    Attack(
        "make a device",
        "no privileges",
        """
import stat
os.mknod("/work/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
open("/work/null", "w").write("x")
pwned("made and used")
""",
        Bare("a sandbox's own files are mounted without devices whichever defence is away"),
    ),
    Attack(
        "open a file by its handle",
        "seccomp, no privileges",
        """
buffer = ctypes.create_string_buffer(136)
struct.pack_into("I", buffer, 0, 128)
mount = ctypes.c_int()
call("name_to_handle_at", -100, b"/work", buffer, ctypes.byref(mount), 0)
pwned("a handle")
""",
        Without(SECCOMP),
    ),
)

RIGHTS = (
    Attack(
        "become root",
        "no privileges",
        "os.setuid(0)\npwned(os.getuid())",
        Without(PRIVILEGES),
    ),
    Attack(
        "hold capabilities",
        "no privileges",
        "held = [l for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapPrm', 'CapBnd'))]\n"
        "if any(int(line.split()[1], 16) for line in held): pwned(held)",
        Without(PRIVILEGES),
        OK,
    ),
    Attack(
        "gain root by a setuid program",
        "no_new_privs",
        """
import shutil, subprocess
su = shutil.which("su")
asks = subprocess.Popen([su], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    for _ in range(20):
        time.sleep(0.01)
        users = [line.split()[1:] for line in open("/proc/%d/status" % asks.pid) if line.startswith("Uid:")]
        if users and users[0][1] == "0" and os.getuid() != 0:
            pwned("runs as root")
            break
finally:
    asks.kill()
    asks.wait()
""",
        Bare("the user namespace has no root, and in Docker it is root already", user=NOBODY),
        OK,
    ),
    Attack(
        "mount in its own user namespace",
        "seccomp",
        """
uid = os.getuid()
libc.unshare(0x10020000)
call("mount", b"none", b"/work", b"tmpfs", 0, None)
pwned("mounted")
""",
        Without(SECCOMP),
    ),
    Attack(
        "mount by the new calls",
        "seccomp",
        "libc.unshare(0x10020000)\nfd = syscall('fsopen', b'tmpfs', 0)\npwned('a file system is being made')",
        Without(SECCOMP),
    ),
    Attack(
        "all capabilities in its own user namespace",
        "seccomp",
        "call('unshare', 0x10000000)\nprint([l for l in open('/proc/self/status') if l.startswith('CapEff')])\npwned('')",
        Without(SECCOMP),
    ),
    Attack(
        "a user namespace by clone",
        "seccomp",
        "pid = syscall('clone', 0x10000000 | 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\npwned('cloned')",
        Without(SECCOMP),
    ),
    Attack(
        "escape by chroot",
        "seccomp",
        "libc.unshare(0x10000000)\nos.mkdir('jail')\nos.chroot('jail')\npwned('out of it goes whoever has a folder outside')",
        Without(SECCOMP),
    ),
    Attack(
        "join the machine's namespaces",
        "seccomp, no privileges",
        "call('setns', os.open('/proc/1/ns/uts', os.O_RDONLY), 0)\npwned('joined')",
        Bare(ROOT_OF_MACHINE),
    ),
    Attack(
        "change the host's name",
        "seccomp, no privileges",
        "call('sethostname', b'pwned', 5)\npwned('hostname')",
        Without(SECCOMP, PRIVILEGES, why="the kernel asks for a capability too"),
    ),
    Attack(
        "set the clock",
        "seccomp, no privileges",
        "time.clock_settime(time.CLOCK_REALTIME, time.time())\npwned('set')",
        NoControl("the clock is in no namespace: a control would set the machine's own"),
    ),
    Attack(
        "a higher priority",
        "seccomp, no privileges",
        "os.setpriority(os.PRIO_PROCESS, 0, -5)\npwned('-5')",
        Bare(ROOT_OF_MACHINE),
    ),
    Attack(
        "real-time scheduling",
        "no privileges",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\npwned('real time')",
        Bare(ROOT_OF_MACHINE),
        kernel_may_lack=True,
    ),
)

ATTACKS = (*HOST, *KERNEL_FILES, *RIGHTS)
