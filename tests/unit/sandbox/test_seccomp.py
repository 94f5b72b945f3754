"""The seccomp profile: both formats against the table, in an interpreter, and the program for real on this kernel."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import MissingError
from agentrl.sandbox.seccomp import (
    CHECKED,
    DENIED,
    FULL,
    NAMESPACE_FLAGS,
    NO_SUCH_CALL,
    NUMBERS,
    TIOCSTI,
    bpf_program,
    docker_profile,
)

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386 = 0x40000003
KILLED, ALLOWED = "killed", 0
FAMILIES = {1, 2, 10}


def run_bpf(program: bytes, number: int, arch: int, arguments: tuple[int, ...] = ()) -> int | str:
    """Run classic BPF on a system call; return the errno, 0 for allowed, or "killed"."""
    seen = struct.pack("=IIQ6Q", number & FULL, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    lines = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        code, yes, no, k = lines[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", seen, k)
        elif code == 0x54:
            accumulator &= k
        elif code in (0x15, 0x25, 0x35):
            at += yes if {0x15: accumulator == k, 0x25: accumulator > k, 0x35: accumulator >= k}[code] else no
        else:
            assert code == 0x06, hex(code)
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(k, k & 0xFFFF)


def run_docker(profile: Mapping[str, Any], name: str, arguments: tuple[int, ...]) -> int:
    """Return the action of a call in Docker's format. Rules that contradict each other are a fault of the profile."""
    actions = set()
    for rule in profile["syscalls"]:
        conditions = rule.get("args", [])
        assert all(condition["op"] == "SCMP_CMP_MASKED_EQ" for condition in conditions)
        if name in rule["names"] and all(
            arguments[condition["index"]] & condition["value"] == condition["valueTwo"] for condition in conditions
        ):
            actions.add(ALLOWED if rule["action"] == "SCMP_ACT_ALLOW" else rule["errnoRet"])
    assert len(actions) <= 1, (name, arguments, actions)
    return actions.pop() if actions else errno.EPERM


def expected(name: str, arguments: tuple[int, ...]) -> int:
    """Say in words of the manual pages what the profile is meant to do."""
    first, second, third, fourth = (argument & FULL for argument in arguments)
    if name in DENIED:
        return errno.EPERM
    if name in ("clone3", "inotify_init", "inotify_init1"):
        return errno.ENOSYS
    if name in ("socket", "socketpair"):
        return ALLOWED if first in FAMILIES else errno.EAFNOSUPPORT
    if name == "clone":
        return errno.EPERM if first & NAMESPACE_FLAGS else ALLOWED
    if name == "ioctl":
        return errno.EPERM if second in (0x5412, 0x541C) else ALLOWED
    if name == "fcntl":
        return errno.EINVAL if second == 1026 else ALLOWED
    if name in ("mmap", "shmget", "memfd_create"):
        huge = {"mmap": fourth & 0x40000, "shmget": third & 0o4000, "memfd_create": second & 4}[name]
        return errno.ENOMEM if huge else ALLOWED
    if name == "personality":
        return ALLOWED if first in (0, FULL) else errno.EPERM
    if name in ("prlimit64", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        return errno.EPERM if first else ALLOWED
    return ALLOWED


telling = st.sampled_from([0, 1, 2, 10, 16, 40, 0x5412, 0x541C, 0x5413, FULL, 1 << 32, (1 << 32) + 40, (1 << 32) + 1])
argument = telling | st.integers(0, 2**64 - 1) | st.integers(0, 63) | st.integers(0, 31).map(lambda bit: 1 << bit)
machines = st.sampled_from(sorted(NUMBERS))
PROGRAMS = {machine: bpf_program(machine) for machine in NUMBERS}
PROFILE = json.loads(docker_profile())


@given(machine=machines, data=st.data(), arguments=st.tuples(*[argument] * 4))
def test_both_formats_do_what_the_table_says(
    machine: str, data: st.DataObject, arguments: tuple[int, int, int, int]
) -> None:
    name = data.draw(st.sampled_from(sorted(CHECKED)) | st.sampled_from(sorted(NUMBERS[machine])))
    expected_value = expected(name, arguments)
    assert run_bpf(PROGRAMS[machine], NUMBERS[machine][name], ARCH[machine], arguments) == expected_value
    assert run_docker(PROFILE, name, arguments) == expected_value


@pytest.mark.parametrize("machine", sorted(NUMBERS))
def test_every_call_of_the_table(machine: str) -> None:
    for name, number in NUMBERS[machine].items():
        assert run_bpf(PROGRAMS[machine], number, ARCH[machine]) == expected(name, (0,) * 4), name


@given(machine=machines, number=st.integers(0, FULL))
def test_numbers_that_we_do_not_know_are_no_system_calls(machine: str, number: int) -> None:
    if number not in NUMBERS[machine].values():
        assert run_bpf(PROGRAMS[machine], number, ARCH[machine]) == errno.ENOSYS


@pytest.mark.parametrize("name", ["read", "ptrace", "getpid"])
def test_the_second_set_of_numbers_on_x86_64_is_none(name: str) -> None:
    x32 = NUMBERS["x86_64"][name] | 0x40000000
    assert run_bpf(PROGRAMS["x86_64"], x32, ARCH["x86_64"]) == errno.ENOSYS


@given(machine=machines, number=st.integers(0, 500), arch=st.sampled_from([I386, 0, *ARCH.values()]))
def test_code_for_another_machine_is_killed(machine: str, number: int, arch: int) -> None:
    killed = run_bpf(PROGRAMS[machine], number, arch) == KILLED
    assert killed == (arch != ARCH[machine])


def test_names_that_are_denied_or_checked_exist() -> None:
    known_names = {name for numbers in NUMBERS.values() for name in numbers}
    assert known_names >= DENIED | NO_SUCH_CALL | CHECKED.keys()
    assert not DENIED & CHECKED.keys()


def test_numbers_are_those_of_this_machine() -> None:
    """A few, read through the C library's own knowledge."""
    numbers = NUMBERS[platform.machine()]
    libc = ctypes.CDLL(None)
    assert libc.syscall(numbers["getpid"]) == os.getpid()
    assert libc.syscall(numbers["gettid"]) == os.getpid()
    assert libc.syscall(numbers["getppid"]) == os.getppid()
    fd = libc.syscall(numbers["pidfd_open"], os.getpid(), 0)
    assert os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[pidfd]"
    os.close(fd)
    fd = libc.syscall(numbers["memfd_create"], b"ours", 0)
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:ours")
    os.close(fd)


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(MissingError, match=r"riscv64.*sandbox\.backend=docker"):
        bpf_program("riscv64")


# The filter is installed by the child itself; it needs no rights with PR_SET_NO_NEW_PRIVS.
INSTALL = """
import ctypes, errno, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
program = bytes.fromhex(sys.stdin.readline())
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("lines", ctypes.c_char_p)]
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(program) // 8, program)), 0, 0) == 0, ctypes.get_errno()
def failed(number, *arguments):
    ctypes.set_errno(0)
    return ctypes.get_errno() if libc.syscall(number, *arguments) == -1 else 0
"""


def under_filter(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", INSTALL + code],
        input=bpf_program().hex() + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_for_real_denied_calls_fail() -> None:
    numbers = NUMBERS[platform.machine()]
    names = sorted(name for name in DENIED if name in numbers)
    output = under_filter(
        f"for number in {[numbers[name] for name in names]}: print(failed(number, -1, -1, -1, -1, -1))"
    )
    assert dict(zip(names, map(int, output.split()), strict=True)) == dict.fromkeys(names, errno.EPERM)


def test_for_real_checked_calls_go_by_their_argument() -> None:
    numbers = NUMBERS[platform.machine()]
    output = under_filter(
        f"""
for family in (1, 2, 10, 16, 17, 38, 40):
    print(failed({numbers["socket"]}, family, 2, 0), failed({numbers["socket"]}, ctypes.c_ulong(family + 2**32), 2, 0))
print(failed({numbers["ioctl"]}, 0, {TIOCSTI}, 0), failed({numbers["ioctl"]}, 0, ctypes.c_ulong(2**32 + {TIOCSTI}), 0))
print(failed({numbers["clone"]}, 0x10000000 | 17, 0, 0, 0, 0), failed({numbers["clone3"]}, 0, 0))
print(failed(470), failed(9999))
"""
    )
    refused = f"{errno.EAFNOSUPPORT} {errno.EAFNOSUPPORT}"
    assert output.splitlines() == [
        *["0 0"] * 3,
        *[refused] * 4,
        f"{errno.EPERM} {errno.EPERM}",
        f"{errno.EPERM} {errno.ENOSYS}",
        f"{errno.ENOSYS} {errno.ENOSYS}",
    ]


def test_for_real_programs_run() -> None:
    """Threads, processes, numpy, limits and pipes: what a policy's code needs."""
    output = under_filter(
        """
import concurrent.futures, multiprocessing, resource, signal, subprocess, tempfile, threading
import numpy
def square(x):
    return x * x
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(square, range(10))))
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(sum(pool.map(square, range(10))))
print(subprocess.run("echo $((6 * 7)) | cat", shell=True, capture_output=True, text=True).stdout.strip())
print(numpy.linalg.norm(numpy.ones((16, 16)) @ numpy.ones((16, 16))))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(resource.prlimit(0, resource.RLIMIT_CORE))
with tempfile.TemporaryDirectory() as folder:
    os.mkfifo(folder + "/fifo")
    print(os.listdir(folder))
left, right = socket.socketpair()
left.sendall(b"hello")
print(right.recv(5).decode())
"""
    )
    assert output.splitlines() == ["285", "285", "42", "256.0", "(0, 0)", "['fifo']", "hello"]
