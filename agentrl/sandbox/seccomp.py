"""The seccomp profile, from one table: as a BPF program (bubblewrap) and as JSON (Docker).

`NUMBERS` has the number of every system call, per machine. Calls in `DENIED` fail with EPERM, calls in `CHECKED` depend on
one argument, every other call of the table is allowed. A call that is not in the table, such as one of a newer kernel,
fails with ENOSYS, so that programs fall back as on an older kernel. A process is killed only for calls of another
instruction set, whose numbers mean other calls.

Numbers and layouts: the kernel's ``asm-generic/unistd.h``, ``syscall_64.tbl``, ``linux/seccomp.h`` and ``linux/filter.h``.
"""

from __future__ import annotations

import errno
import json
import platform
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentrl.core.errors import MissingError

_SHARED = {
    424: """
pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig fsmount fspick
pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr quotactl_fd
landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret process_mrelease futex_waitv
set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue statmount listmount
lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal setxattrat getxattrat listxattrat removexattrat
open_tree_attr file_getattr file_setattr
"""
}
"""Calls with the same number on every machine."""

_X86_64 = {
    0: """
read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn
ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise shmget shmat shmctl
dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept sendto recvfrom sendmsg
recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt getsockopt clone fork vfork execve exit
wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock fsync fdatasync truncate ftruncate
getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink readlink chmod fchmod chown fchown lchown
umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid syslog getgid setuid setgid geteuid getegid setpgid
getppid getpgrp setsid setreuid setregid getgroups setgroups setresuid getresuid setresgid getresgid getpgid setfsuid
setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod
uselib personality ustat statfs fstatfs sysfs getpriority setpriority sched_setparam sched_getparam sched_setscheduler
sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall
munlockall vhangup modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync acct settimeofday
mount umount2 swapon swapoff reboot sethostname setdomainname iopl ioperm create_module init_module delete_module
get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid readahead
setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr
fremovexattr tkill time futex sched_setaffinity sched_getaffinity set_thread_area io_setup io_destroy io_getevents
io_submit io_cancel get_thread_area lookup_dcookie epoll_create epoll_ctl_old epoll_wait_old remap_file_pages
getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime
timer_getoverrun timer_delete clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl
tgkill utimes vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify
mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set ioprio_get inotify_init inotify_add_watch
inotify_rm_watch migrate_pages openat mkdirat mknodat fchownat futimesat newfstatat unlinkat renameat linkat symlinkat
readlinkat fchmodat faccessat pselect6 ppoll unshare set_robust_list get_robust_list splice tee sync_file_range
vmsplice move_pages utimensat epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime
accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open
recvmmsg fanotify_init fanotify_mark prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg setns
getcpu process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom
memfd_create kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect
pkey_alloc pkey_free statx io_pgetevents rseq uretprobe uprobe
"""
}

_AARCH64 = {
    0: """
io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie eventfd2 epoll_create1
epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch ioctl ioprio_set ioprio_get
flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2 mount pivot_root nfsservctl statfs fstatfs truncate
ftruncate fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat fchown openat close vhangup pipe2 quotactl
getdents64 lseek read write readv writev pread64 pwrite64 preadv pwritev sendfile pselect6 ppoll signalfd4 vmsplice
splice tee readlinkat newfstatat fstat sync fsync fdatasync sync_file_range timerfd_create timerfd_settime
timerfd_gettime utimensat acct capget capset personality exit exit_group waitid set_tid_address unshare futex
set_robust_list get_robust_list nanosleep getitimer setitimer kexec_load init_module delete_module timer_create
timer_gettime timer_getoverrun timer_settime timer_delete clock_settime clock_gettime clock_getres clock_nanosleep
syslog ptrace sched_setparam sched_setscheduler sched_getscheduler sched_getparam sched_setaffinity sched_getaffinity
sched_yield sched_get_priority_max sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill tgkill
sigaltstack rt_sigsuspend rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn
setpriority getpriority reboot setregid setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid
setfsgid times setpgid getpgid getsid setsid getgroups setgroups uname sethostname setdomainname getrlimit setrlimit
getrusage umask prctl getcpu gettimeofday settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid
sysinfo mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd semget
semctl semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept connect getsockname getpeername
sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key request_key keyctl
clone execve mmap fadvise64 swapon swapoff mprotect msync mlock munlock mlockall munlockall mincore madvise
remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo perf_event_open accept4
recvmmsg
""",
    260: """
wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs setns sendmmsg
process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom
memfd_create bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc
pkey_free statx io_pgetevents rseq kexec_file_load
""",
}


def _numbers(*tables: Mapping[int, str]) -> dict[str, int]:
    return {
        name: first + i for table in tables for first, names in table.items() for i, name in enumerate(names.split())
    }


NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": _numbers(_X86_64, _SHARED),
    "aarch64": _numbers(_AARCH64, _SHARED),
}
"""Numbers of all known calls, by machine and name."""

_DENIED = {
    "other processes' memory, descriptors and secrets": """
ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp
""",
    "namespaces, mounts and roots": """
unshare setns mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick
mount_setattr statmount listmount open_by_handle_at name_to_handle_at
""",
    "large parts of the kernel that no program of a policy needs": """
bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register fanotify_init fanotify_mark
lookup_dcookie memfd_secret modify_ldt remap_file_pages lsm_get_self_attr lsm_set_self_attr lsm_list_modules
""",
    "keyrings, which belong to no namespace": """
add_key request_key keyctl
""",
    "the machine itself": """
kexec_load kexec_file_load create_module init_module finit_module delete_module get_kernel_syms query_module
reboot swapon swapoff syslog acct quotactl quotactl_fd iopl ioperm vhangup sethostname setdomainname
settimeofday clock_settime clock_adjtime adjtimex
""",
    "priorities, also those of the runner, which has the same user": """
setpriority
""",
    "NUMA placement of memory": """
mbind set_mempolicy set_mempolicy_home_node migrate_pages move_pages
""",
    "removed from current kernels, or never implemented": """
nfsservctl _sysctl uselib ustat sysfs getpmsg putpmsg afs_syscall tuxcall security vserver epoll_ctl_old
epoll_wait_old
""",
}
DENIED = frozenset(name for names in _DENIED.values() for name in names.split())
"""Fail with EPERM."""

NO_SUCH_CALL = frozenset({"clone3", "inotify_init", "inotify_init1"})
"""Fail with ENOSYS, as in a kernel without them. The flags of ``clone3`` are in memory, which no filter can read; the C library
falls back to ``clone``. inotify reports who opens the files that sandboxes share with each other and with the machine; programs
fall back to polling."""

NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET of clone(2); NEWTIME exists only for clone3 and unshare."""
FULL = 0xFFFFFFFF
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
F_NOTIFY = 1026
MAP_HUGETLB, SHM_HUGETLB, MFD_HUGETLB = 0x40000, 0o4000, 4


@dataclass(frozen=True, slots=True)
class Check:
    """Allows a call by the lower 32 bits of one argument; the kernel reads no more of the arguments checked below."""

    index: int
    """Index of the argument, from 0."""
    values: tuple[int, ...]
    """Values to compare with."""
    allowed: bool = True
    """Whether these values are allowed, or refused."""
    mask: int = FULL
    """Bits to compare."""
    errno: int = errno.EPERM
    """Error of a refused call."""


_FAMILIES = Check(0, (AF_UNIX, AF_INET, AF_INET6), errno=errno.EAFNOSUPPORT)
_OWN_PROCESS = Check(0, (0,))
CHECKED: Mapping[str, Check] = {
    "clone": Check(0, (0,), mask=NAMESPACE_FLAGS),
    "socket": _FAMILIES,
    "socketpair": _FAMILIES,
    "ioctl": Check(1, (TIOCSTI, TIOCLINUX), allowed=False),
    # Signals about who opens files of a folder: as inotify, and older.
    "fcntl": Check(1, (F_NOTIFY,), allowed=False, errno=errno.EINVAL),
    # Huge pages are the machine's own, and no limit of memory counts them. A machine without any gives the same error.
    "mmap": Check(3, (0,), mask=MAP_HUGETLB, errno=errno.ENOMEM),
    "shmget": Check(2, (0,), mask=SHM_HUGETLB, errno=errno.ENOMEM),
    "memfd_create": Check(1, (0,), mask=MFD_HUGETLB, errno=errno.ENOMEM),
    # The default personality, and the query for the current one.
    "personality": Check(0, (0, FULL)),
    # Only for the calling process. The kernel requires only the same user, so code could starve its runner, or have the
    # kernel kill it by a limit of CPU time.
    "prlimit64": _OWN_PROCESS,
    "sched_setscheduler": _OWN_PROCESS,
    "sched_setparam": _OWN_PROCESS,
    "sched_setattr": _OWN_PROCESS,
}
"""Calls that are allowed depending on an argument."""

# ---- BPF ---------------------------------------------------------------------------------------------------------

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # struct seccomp_data; arguments are 64 bits, the lower half first
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_GREATER, _JUMP_AT_LEAST = 0x15, 0x25, 0x35
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
Instruction = tuple[int, int, int, int]


def bpf_program(machine: str | None = None) -> bytes:
    """Return the profile as an array of ``struct sock_filter``, as ``bwrap --seccomp`` and prctl(2) take it.

    Args:
        machine: ``x86_64`` or ``aarch64``; None: this machine.

    Raises:
        MissingError: there is no table for that machine.
    """
    machine = machine or platform.machine()
    if machine not in NUMBERS:
        raise MissingError(
            f"the bubblewrap sandbox has no seccomp profile for {machine}, only for {', '.join(NUMBERS)}; "
            "set sandbox.backend=docker"
        )
    numbers = NUMBERS[machine]
    program = [(_LOAD, 0, 0, _ARCH_AT), *_unless_equal(_AUDIT_ARCH[machine], [_return_instruction(KILL_PROCESS)])]
    program.append((_LOAD, 0, 0, _NUMBER_AT))
    for first, last in _gaps(numbers):
        program += [
            (_JUMP_AT_LEAST, 0, 2, first),
            (_JUMP_GREATER, 1, 0, last),
            _return_instruction(ERRNO | errno.ENOSYS),
        ]
    for name, number in numbers.items():
        if name in DENIED:
            program += _when_equal(number, [_return_instruction(ERRNO | errno.EPERM)])
        elif name in NO_SUCH_CALL:
            program += _when_equal(number, [_return_instruction(ERRNO | errno.ENOSYS)])
        elif name in CHECKED:
            program += _when_equal(number, _argument_check(CHECKED[name]))
    program.append(_return_instruction(ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _argument_check(check: Check) -> list[Instruction]:
    match, otherwise = (ALLOW, ERRNO | check.errno) if check.allowed else (ERRNO | check.errno, ALLOW)
    body = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * check.index)]
    if check.mask != FULL:
        body.append((_AND, 0, 0, check.mask))
    for value in check.values:
        body += _when_equal(value, [_return_instruction(match)])
    return [*body, _return_instruction(otherwise)]


def _return_instruction(result: int) -> Instruction:
    return (_RETURN, 0, 0, result)


def _when_equal(value: int, body: list[Instruction]) -> list[Instruction]:
    return [(_JUMP_EQUAL, 0, len(body), value), *body]


def _unless_equal(value: int, body: list[Instruction]) -> list[Instruction]:
    return [(_JUMP_EQUAL, len(body), 0, value), *body]


def _gaps(numbers: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of ranges of numbers without a call.

    The last range holds calls newer than the table, and x32, whose numbers have bit 30.
    """
    free = 0
    for number in [*sorted(numbers.values()), FULL + 1]:
        if number > free:
            yield free, number - 1
        free = number + 1


# ---- Docker ------------------------------------------------------------------------------------------------------


_FOR_MACHINES = """
ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp chroot name_to_handle_at setpriority mbind
set_mempolicy set_mempolicy_home_node migrate_pages move_pages remap_file_pages
"""
"""Calls of `DENIED` that debuggers, package managers and servers in their own machine need."""
_MACHINE_FAMILIES = Check(0, (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK), errno=errno.EAFNOSUPPORT)
MACHINE_CHECKED: Mapping[str, Check] = {
    **{name: CHECKED[name] for name in ("clone", "ioctl", "mmap", "shmget", "memfd_create")},
    "socket": _MACHINE_FAMILIES,
    "socketpair": _MACHINE_FAMILIES,
    # For 32-bit programs, and without randomized addresses, as debuggers start programs.
    "personality": Check(0, (0, 0x8, 0x20000, 0x20008, 0x40000, FULL)),
}
"""`CHECKED` of task containers."""


def machine_profile() -> str:
    """Return the profile of task containers, in which ordinary programs run as root: see `docker_profile`.

    Other sockets than those of Unix, IP and netlink stay refused, vsock among them, and so do io_uring, BPF, keyrings,
    namespaces and what changes the machine itself.
    """
    return docker_profile(DENIED - set(_FOR_MACHINES.split()), frozenset({"clone3"}), MACHINE_CHECKED)


def docker_profile(
    denied: frozenset[str] = DENIED,
    no_such_call: frozenset[str] = NO_SUCH_CALL,
    checked: Mapping[str, Check] = CHECKED,
) -> str:
    """Return the profile as JSON in Docker's format, for ``--security-opt seccomp=``; dockerd 20.10 and newer.

    Docker compares arguments as 64 bits, but the kernel reads 32, so every rule has a mask without the upper half. The
    format has no "otherwise", so refused values are written as blocks. Calls that are not in the table fail with ENOSYS
    if they are newer than the newest in it (runc does that), otherwise with EPERM.
    """
    names = {name for numbers in NUMBERS.values() for name in numbers}
    rules = [_rule(sorted(names - denied - no_such_call - checked.keys()))]
    rules += [_rule(sorted(no_such_call), errno.ENOSYS)]
    for name, check in checked.items():
        inside = [(check.mask, value) for value in check.values]
        outside = list(_blocks(check.values)) if check.mask == FULL else [(check.mask, check.mask)]
        assert check.mask == FULL or check.values == (0,), "one bit, or several that are refused with EPERM"
        allowed, refused = (inside, outside) if check.allowed else (outside, inside)
        rules += [_rule([name], None, check.index, *pair) for pair in allowed]
        # Calls that no rule allows fail with EPERM; only another errno needs a rule.
        rules += [_rule([name], check.errno, check.index, *pair) for pair in refused if check.errno != errno.EPERM]
    machines = ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"]
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "archMap": [{"architecture": machine, "subArchitectures": []} for machine in machines],
        "syscalls": rules,
    }
    return json.dumps(profile)


def _rule(
    names: list[str], refuse: int | None = None, index: int | None = None, mask: int = 0, value: int = 0
) -> dict[str, object]:
    rule: dict[str, object] = {"names": names, "action": "SCMP_ACT_ALLOW" if refuse is None else "SCMP_ACT_ERRNO"}
    if refuse is not None:
        rule["errnoRet"] = refuse
    if index is not None:
        rule["args"] = [{"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}]
    return rule


def _blocks(values: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield (mask, value) of disjoint blocks that together hold every 32-bit number except ``values``.

    A block is all numbers with the same upper bits; it is halved until it contains none of the values.
    """
    pending = [(0, 0)]
    while pending:
        mask, value = pending.pop()
        if all(excluded & mask != value for excluded in values):
            yield mask, value
        elif mask != FULL:
            bit = (FULL ^ mask).bit_length() - 1
            pending += [(mask | 1 << bit, value), (mask | 1 << bit, value | 1 << bit)]
