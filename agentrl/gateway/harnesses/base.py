"""What a recipe of an agent program has, and the check of the installed program."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.core.errors import MissingError

_log = logging.getLogger(__name__)

_VERSION_S = 30.0
"""Most seconds that a program has to print its version."""
_VERSION_CODE = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class Harness:
    """How an agent program is started.

    Words and files may contain names of the program's variables, such as ``$OPENAI_BASE_URL``, ``$AGENTRL_PROMPT``
    and ``$HOME``.

    Example::

        Harness(("mini", "--task=$AGENTRL_PROMPT"), "pip install mini-swe-agent", "2.4.6", "mini-swe-agent")
    """

    command: tuple[str, ...]
    """Words that start the program; the prompt is also its standard input."""
    install: str
    """The command that installs it."""
    tried: str
    """The version that was tried. A warning is logged for a version whose first two numbers differ."""
    distribution: str | None = None
    """The Python distribution that has the version; None for a program that prints it with ``--version``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables besides those that every program gets."""
    home_files: Mapping[str, str] = field(default_factory=dict)
    """Contents of files by their path in ``$HOME``."""

    def check(self, name: str, path: str | None) -> None:
        """Check that the program is installed, and warn if the version is another than the one that was tried.

        Args:
            name: of the recipe, for messages.
            path: folders in which the program is looked for; None: those of this process.

        Raises:
            MissingError: it is not installed.
        """
        folders = os.environ.get("PATH", "") if path is None else path
        program = shutil.which(self.command[0], path=folders)
        output = "" if program is None else self._version_output(program, folders)
        if program is None or (self.distribution is not None and self.distribution in output):
            missing = f"there is no program {self.command[0]}"
            if program is not None:
                missing = f"{program} finds no package {self.distribution}"
            raise MissingError(
                f"rollout.agent.harness={name}: {missing} in PATH={folders}. Install it with: {self.install}. If it is installed "
                "elsewhere, set rollout.agent.env.PATH"
            )
        version = re.search(r"\d+(\.\d+)+", output)
        if version is None or version[0].split(".")[:2] != self.tried.split(".")[:2]:
            installed = "of unknown version" if version is None else f"of version {version[0]}"
            _log.warning(
                "rollout.agent.harness=%s: %s is %s; the recipe was tried with %s", name, program, installed, self.tried
            )

    def _version_output(self, program: str, folders: str) -> str:
        """Return what a program prints about its version; the name of its distribution if that is missing."""
        command = [program, "--version"]
        if self.distribution is not None:
            command = [*_interpreter(Path(program)), "-c", _VERSION_CODE, self.distribution]
        with tempfile.TemporaryDirectory(prefix="agentrl-version-") as home:
            env = {"PATH": folders, "HOME": home, **self.env}
            try:
                done = subprocess.run(
                    command,
                    cwd=home,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=_VERSION_S,
                )
            except (OSError, subprocess.TimeoutExpired):
                return ""
        if "PackageNotFoundError" in done.stderr:
            return self.distribution or ""
        return done.stdout


def _interpreter(script: Path) -> list[str]:
    """Return the words that start the interpreter of a script; a program without ``#!`` is one itself."""
    with script.open("rb") as file:
        first = file.readline(4096)
    return shlex.split(first[2:].decode(errors="replace")) if first.startswith(b"#!") else [str(script)]
