"""Where an agent program is installed, and what it needs: a script for this machine and for sandboxes.

``python installed.py '{"name": …, "distribution": …, "program": …}'`` prints ``[Program, Installation]`` as JSON, or null without
a program. It runs in sandboxes as text, by Python 3.9 or newer, so it uses the standard library only.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

TYPE_CHECKING = False  # typing's own takes a sandbox a while to import
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypedDict

    class Program(TypedDict):
        """The files of a program."""

        path: str
        """Its file, without links."""
        interpreter: list[str]
        """Words that start the interpreter of a script; otherwise the program itself, for a Python distribution as it was found:
        a link to Python says which environment it is of."""

    class Installation(TypedDict):
        """What a program reports about itself."""

        version: str
        """What it prints about its version, or the version of its distribution; empty if it prints nothing."""
        has_distribution: bool
        """Whether its interpreter finds its distribution; True without one."""
        fault: str
        """Why it prints no version; empty if it does."""
        files: list[str]
        """Folders and files that it needs, besides the libraries of the system."""


_VERSION_S = 30.0
"""Most seconds that a program has to print its version."""
_PYTHON = """
import importlib.metadata, json, sys
try:
    version = importlib.metadata.version(sys.argv[1])
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps([version, [sys.prefix, sys.base_prefix, *sys.path[1:]]]))
"""


def find_program(name: str, distribution: str | None, path: str) -> Program | None:
    """Return where a program is installed; None if it is not.

    Args:
        name: of the program.
        distribution: the Python distribution that it is of; None for other programs.
        path: folders in which it is looked for.
    """
    program = shutil.which(name, path=path)
    if program is None:
        return None
    file = os.path.realpath(program)
    interpreter = _interpreter(file) or [file if distribution is None else program]
    if os.path.basename(interpreter[0]) == "env":
        words = [word for word in interpreter[1:] if not word.startswith("-")]
        runtime = shutil.which(words[0], path=path) if words else None
        if runtime is not None:
            interpreter = [runtime if distribution is not None else os.path.realpath(runtime), *words[1:]]
    return {"path": file, "interpreter": interpreter}


def inspect_program(program: Program, distribution: str | None, path: str, env: Mapping[str, str]) -> Installation:
    """Return the version of a program, and what it needs.

    Args:
        program: see `find_program`.
        distribution: see `find_program`; the version is its.
        path: folders of programs.
        env: further variables for it.
    """
    files = [program["path"], os.path.realpath(program["interpreter"][0])]
    if distribution is None:
        version, fault = _output([*start_words(program), "--version"], path, env)
        files += _npm_folder(program["path"])
        return {"version": version, "has_distribution": True, "fault": fault, "files": files}
    output, fault = _output([*program["interpreter"], "-c", _PYTHON, distribution], path, env)
    if fault:
        return {"version": "", "has_distribution": True, "fault": fault, "files": files}
    version, folders = json.loads(output)
    files += [folder for folder in folders if os.path.exists(folder)]
    return {"version": version or "", "has_distribution": version is not None, "fault": "", "files": files}


def start_words(program: Program) -> list[str]:
    """Return the words that start a program."""
    return [*program["interpreter"], *([program["path"]] if program["interpreter"] != [program["path"]] else [])]


def _interpreter(file: str) -> list[str]:
    """Return the words that start the interpreter of a script; none for other files."""
    with open(file, "rb") as script:
        first, second = (script.readline(4096).decode(errors="replace") for _ in range(2))
    if not first.startswith("#!"):
        return []
    if second.startswith(
        "'''exec' "
    ):  # pip and uv write this where the interpreter's path is too long for the first line
        return shlex.split(second)[1:2]
    return shlex.split(first[2:])


def _output(command: list[str], path: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return what a command prints, and what went wrong with it."""
    with tempfile.TemporaryDirectory(prefix="agentrl-version-") as home:
        try:
            done = subprocess.run(
                command,
                cwd=home,
                env={"PATH": path, "HOME": home, **env},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_VERSION_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return "", str(error)
    fault = f"exit status {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}" if done.returncode else ""
    return done.stdout, fault


def _npm_folder(file: str) -> list[str]:
    """Return the folder with all packages of npm that a file of one of them finds."""
    parts = file.split(os.sep)
    return [os.sep.join(parts[: parts.index("node_modules") + 1])] if "node_modules" in parts else []


def main() -> None:
    """Print where the program is installed, with this process's environment."""
    query, path = json.loads(sys.argv[1]), os.environ["PATH"]
    distribution = query["distribution"]
    program = query["program"] or find_program(query["name"], distribution, path)
    print(json.dumps(program and [program, inspect_program(program, distribution, path, os.environ)]))


if __name__ == "__main__":
    main()
