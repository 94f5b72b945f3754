"""What code in a sandbox may see of this machine's files: programs, and the packages that agentrl itself requires.

Hidden tests, answers and reference programs are files of tasksets, environments, rewards and tools. Code that can read them
passes every test. So of the folders that this process imports from, nothing is shown but packages that agentrl requires.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from pathlib import Path

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import ConfigError
from agentrl.core.registry import ENVS, REWARDS, SANDBOXES, TASKS, TOOLS, definition_paths, installed_paths

SYSTEM = Path("/usr")
"""The folder of the machine's programs; the bubblewrap backend shows `program_folders` of it."""
_LIBRARIES = ("lib", "lib32", "lib64", "libx32", "libexec", "include")
_PROGRAMS = ("bin", "sbin", "games", "share", *_LIBRARIES, *(f"local/{name}" for name in ("bin", "sbin", *_LIBRARIES)))

_PRIVATE_GROUPS = {TOOLS: "tool", REWARDS: "reward", ENVS: "environment", TASKS: "taskset"}


def program_folders() -> list[Path]:
    """Return the folders of programs and libraries below `SYSTEM`; not ``src`` and ``local/share``, which may hold anything."""
    return [SYSTEM / name for name in _PROGRAMS if (SYSTEM / name).exists()]


def is_program(path: Path) -> bool:
    """Return whether code can see a path because it is in a program folder."""
    resolved = path.resolve()
    return _is_below(resolved, program_folders()) and not _is_below(resolved, hidden_paths())


def _is_below(path: Path, folders: list[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


@cache
def plugin_paths() -> Mapping[Path, str]:
    """Return the folders and files of plugins that may hold answers, each with a description for messages."""
    return {
        path: f"{kind} {name!r}"
        for find_paths in (installed_paths, definition_paths)  # the latter say whose a folder is more exactly
        for group, kind in _PRIVATE_GROUPS.items()
        for name, paths in find_paths(group).items()
        for path in paths
    }


def environment_folders() -> Mapping[Path, str]:
    """Return the folders of this process's Python environment, each with a description."""
    folders = (sys.prefix, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sys.pycache_prefix)
    return {Path(folder).resolve(): "this process's Python environment" for folder in folders if folder is not None}


def hidden_paths() -> list[Path]:
    """Return the files and folders in program folders that code must not see: what this process imports from, and plugins.

    Python's standard library, which holds no tasks, stays visible.
    """
    library = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    library |= {folder / "lib-dynload" for folder in library}
    programs = program_folders()
    candidates = {*(Path(folder).resolve() for folder in sys.path), *plugin_paths(), *environment_folders()}
    hidden: list[Path] = []
    for path in sorted(candidates - library):  # a folder comes before what is in it
        inside = any(path != folder and path.is_relative_to(folder) for folder in programs)
        if inside and path.exists() and not _is_below(path, hidden):
            hidden.append(path)
    return hidden


@cache
def required_packages() -> list[Path]:
    """Return the packages and modules that agentrl requires, and all that these require: tasks cannot be in them."""
    [own] = entry_points(group=SANDBOXES, name="bubblewrap") or [None]
    names, seen, paths = (own.dist.requires or [] if own is not None and own.dist is not None else []), set(), set()
    while names:
        requirement, _, marker = names.pop().partition(";")
        match = re.match(r"[\w.-]+", requirement)
        name = match[0].lower() if match else ""
        if name in seen or "extra" in marker:
            continue
        seen.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        names += package.requires or []
        paths |= _importable(package)
    return sorted(paths)


def _importable(package: Distribution) -> set[Path]:
    """Return a distribution's entries of ``site-packages``; not ``*.pth``, nor folders that it shares with others."""
    site = Path(str(package.locate_file(""))).resolve()
    entries = {site / file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}
    return {
        path
        for path in entries
        if path.suffix in (".py", ".so", ".libs", ".dist-info") or (path / "__init__.py").is_file()
    }


def check_shown(config: SandboxConfig, private_paths: Mapping[Path, str] | None = None) -> None:
    """Check that code can see no tasks and answers, and that what ``sandbox.readonly`` shows cannot be written to.

    Args:
        config: the sandbox section.
        private_paths: further files and folders that code must not read, each with a description.

    Raises:
        ConfigError: with the folder, what is in it, and where.
    """
    private_paths = private_paths or {}
    for folder in config.readonly:
        resolved = folder.resolve()
        for path, description in {**plugin_paths(), **private_paths}.items():
            if path.is_relative_to(resolved) or resolved.is_relative_to(path):
                raise _readonly_error(folder, description, path)
        for path, description in environment_folders().items():
            if path.is_relative_to(resolved):
                raise _readonly_error(folder, description, path)
        _check_special_files(folder)
    for path, description in private_paths.items():
        if config.backend == "bubblewrap" and is_program(path):
            raise ConfigError(
                f"the {description} ({path}) is among the machine's programs, which sandbox.backend=bubblewrap shows to code: "
                "move it to another folder"
            )


def _readonly_error(folder: Path, description: str, path: Path) -> ConfigError:
    return ConfigError(
        f"sandbox.readonly has {folder}, which shows the {description} ({path}) to code in the sandbox: it could read hidden "
        "tests, answers and reference programs. Show a virtual environment made for the sandbox, or single packages"
    )


def _check_special_files(folder: Path) -> None:
    """Raise ConfigError for a socket, a pipe or a device: read-only mounts do not keep code from writing to them."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            mode = os.lstat(os.path.join(parent, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                kind = "socket" if stat.S_ISSOCK(mode) else "named pipe" if stat.S_ISFIFO(mode) else "device"
                raise ConfigError(
                    f"sandbox.readonly has {folder} with the {kind} {os.path.join(parent, name)}: code in the sandbox could "
                    "write to it, read-only or not. Show a folder without it"
                )
