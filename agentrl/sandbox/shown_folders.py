"""What ``sandbox.readonly`` must not show to code: tasks, environments, data of runs, and files that stay writable.

Hidden tests and reference programs are files of the installed tasksets. Code that can read them passes every test.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import ConfigError
from agentrl.core.registry import ENVS, TASKS, definition_paths

SYSTEM = Path("/usr")
"""The folder of programs that the bubblewrap backend shows; see `hidden_below`."""


@cache
def plugin_folders() -> Mapping[Path, str]:
    """Return the folders and files that hold registered environments and tasksets, each with a description for messages."""
    return {
        path.resolve(): f"{kind} {name!r}"
        for kind, group in (("environment", ENVS), ("taskset", TASKS))
        for name, paths in definition_paths(group).items()
        for path in paths
    }


@cache
def environment_folders() -> Mapping[Path, str]:
    """Return the folders of this process's Python environment outside of ``/usr``, each with a description for messages."""
    folders = (Path(sys.prefix), *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))
    description = "this process's Python environment"
    return {folder.resolve(): description for folder in folders if not folder.resolve().is_relative_to(SYSTEM)}


def hidden_below(folder: Path) -> list[Path]:
    """Return the folders and files with environments and tasksets below ``folder``, which a backend that shows it has to hide."""
    return sorted(path for path in plugin_folders() if path.is_relative_to(folder) and path.exists())


def check_shown(config: SandboxConfig, hidden_paths: Mapping[Path, str] | None = None) -> None:
    """Check that the folders of ``sandbox.readonly`` hold no tasks and answers, and nothing that can be written to.

    Args:
        config: the sandbox section.
        hidden_paths: further files and folders that code must not read, each with a description.

    Raises:
        ConfigError: with the folder, what is in it, and where.
    """
    for folder in config.readonly:
        resolved = folder.resolve()
        for path, description in {**plugin_folders(), **(hidden_paths or {})}.items():
            if path.is_relative_to(resolved) or resolved.is_relative_to(path):
                raise _readonly_error(folder, description, path)
        for path, description in environment_folders().items():
            if path.is_relative_to(resolved):
                raise _readonly_error(folder, description, path)
        _check_special_files(folder)


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
