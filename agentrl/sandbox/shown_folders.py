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
    """Return the folders and files that hold registered environments and tasksets, with what they are."""
    return {
        path.resolve(): f"{what} {name!r}"
        for what, group in (("environment", ENVS), ("taskset", TASKS))
        for name, paths in definition_paths(group).items()
        for path in paths
    }


@cache
def environment_folders() -> Mapping[Path, str]:
    """Return the folders of this process's Python environment, with what they are; nothing of the system's."""
    folders = (Path(sys.prefix), *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))
    what = "this process's Python environment"
    return {folder.resolve(): what for folder in folders if not folder.resolve().is_relative_to(SYSTEM)}


def hidden_below(folder: Path) -> list[Path]:
    """Return the folders and files with environments and tasksets below one that a backend shows, which it has to hide."""
    return sorted(path for path in plugin_folders() if path.is_relative_to(folder) and path.exists())


def check_shown(config: SandboxConfig, of_run: Mapping[Path, str] | None = None) -> None:
    """Check that the folders of ``sandbox.readonly`` give nothing away and that nothing in them can be written to.

    Args:
        config: the sandbox section.
        of_run: further files and folders that code must not read, with what they are.

    Raises:
        ConfigError: with the folder, what is in it, and where.

    """
    for folder in config.readonly:
        real = folder.resolve()
        for path, what in {**plugin_folders(), **(of_run or {})}.items():
            if path.is_relative_to(real) or real.is_relative_to(path):
                raise _shows(folder, what, path)
        for path, what in environment_folders().items():
            if path.is_relative_to(real):
                raise _shows(folder, what, path)
        _check_special_files(folder)


def _shows(folder: Path, what: str, path: Path) -> ConfigError:
    return ConfigError(
        f"sandbox.readonly has {folder}, which shows the {what} ({path}) to code in the sandbox: it could read hidden tests, "
        "answers and reference programs. Show a virtual environment made for the sandbox, or single packages"
    )


def _check_special_files(folder: Path) -> None:
    """Raise ConfigError for a socket, a pipe or a device: read-only mounts do not keep code from writing to them."""
    for top, folders, files in os.walk(folder):
        for name in (*folders, *files):
            mode = os.lstat(os.path.join(top, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                kind = "socket" if stat.S_ISSOCK(mode) else "named pipe" if stat.S_ISFIFO(mode) else "device"
                raise ConfigError(
                    f"sandbox.readonly has {folder} with the {kind} {os.path.join(top, name)}: code in the sandbox could "
                    "write to it, read-only or not. Show a folder without it"
                )
