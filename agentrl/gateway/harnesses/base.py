"""What a recipe of an agent program has, and the check of the installed program."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import yaml

from agentrl.config.sandbox import SandboxLimits
from agentrl.core.errors import MissingError
from agentrl.gateway.harnesses import installed
from agentrl.gateway.harnesses.installed import find_program, inspect_program, start_words

if TYPE_CHECKING:
    from agentrl.gateway.harnesses.installed import Installation, Program

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Harness:
    """How an agent program is started.

    Words and files may contain names of the program's variables, such as ``$OPENAI_BASE_URL``, ``$AGENTRL_PROMPT``
    and ``$HOME``. ``$PROMPT_YAML`` is the prompt as a scalar of YAML.

    Example::

        Harness(("mini", "--config=$HOME/task.yaml"), "pip install mini-swe-agent", "2.4.6", "mini-swe-agent")
    """

    command: tuple[str, ...]
    """Words that start the program; the prompt is also its standard input."""
    install: str
    """The command that installs it."""
    tried: str
    """The version that was tried. A warning is logged for a version whose first two numbers differ."""
    distribution: str | None = None
    """The Python distribution that has the version; None for a program that prints it with ``--version``."""
    script: Path | None = None
    """A Python file that the program's interpreter runs in place of the program, with the other words of the command."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables besides those that every program gets."""
    home_files: Mapping[str, str] = field(default_factory=dict)
    """Contents of files by their path in ``$HOME``."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Limits of a sandbox in which the program finishes a small task."""

    def find(self, path: str | None) -> Program | None:
        """Return where the program is installed on this machine; None if it is not; see `check`."""
        return find_program(self.command[0], self.distribution, program_path(path))

    def check(self, name: str, path: str | None, key: str) -> Installation:
        """Return how the program is installed on this machine, and warn if its version is another than the one that was tried.

        Args:
            name: of the recipe, for messages.
            path: folders in which the program is looked for; None: those of this process.
            key: the configuration key of the program, for messages.

        Raises:
            MissingError: it is not installed.
        """
        folders = program_path(path)
        program = self.find(path)
        installation = None if program is None else inspect_program(program, self.distribution, folders, self.env)
        hint = f"in PATH={folders}. Install it with: {self.install}. If it is installed elsewhere, set {key}.env.PATH"
        return self.check_installation(f"{key}.harness={name}", program, installation, hint)

    def check_installation(
        self, setting: str, program: Program | None, installation: Installation | None, hint: str
    ) -> Installation:
        """Return how the program is installed, and warn if its version is another than the one that was tried.

        Args:
            setting: the key and value that choose the recipe, for messages.
            program: None: there is none.
            installation: None: there is none.
            hint: where it was looked for, and what to do.

        Raises:
            MissingError: it is not installed.
        """
        if program is None or installation is None:
            raise MissingError(f"{setting}: there is no program {self.command[0]} {hint}")
        if not installation["has_distribution"]:
            raise MissingError(f"{setting}: {program['path']} finds no package {self.distribution} {hint}")
        version = re.search(r"\d+(\.\d+)+", installation["version"])
        if version is None or version[0].split(".")[:2] != self.tried.split(".")[:2]:
            fault = f" ({installation['fault']})" if installation["fault"] else ""
            installed = f"of unknown version{fault}" if version is None else f"of version {version[0]}"
            _log.warning(
                "%s: %s is %s; the recipe was tried with %s", setting, program["path"], installed, self.tried,
            )  # fmt: skip
        return installation

    def query(self, program: Program | None = None) -> tuple[str, ...]:
        """Return the arguments of a Python elsewhere that prints where the program is installed there; see `read_answer`.

        Args:
            program: None: it is looked for.
        """
        source = Path(installed.__file__).read_text(encoding="utf-8")
        query = {"name": self.command[0], "distribution": self.distribution, "program": program}
        return "-I", "-c", source, json.dumps(query)

    def read_answer(
        self, answer: str, setting: str, where: str, *, install_hint: str = "", fault_hint: str = ""
    ) -> Program:
        """Return the program that a `query` has found.

        Args:
            answer: what was printed.
            setting: the key and value that choose the recipe, for messages.
            where: it was looked for, for messages.
            install_hint: advice if it is not installed, besides how to install it.
            fault_hint: advice if it does not start.

        Raises:
            MissingError: it is not installed, or does not start.
        """
        result: tuple[Program, Installation] | None = json.loads(answer)
        program, installation = result or (None, None)
        hint = f"{where}. Install it in the image with: {self.install}{install_hint}"
        installation = self.check_installation(setting, program, installation, hint)
        assert program is not None, "it was checked"
        if installation["fault"]:
            raise MissingError(
                f"{setting}: {program['path']} does not start {where}: {installation['fault']}{fault_hint}"
            )
        return program

    def place(self, program: Program | None, values: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return the words that start the program elsewhere, and the contents of its files there, by their path in its home.

        Args:
            program: None: there is none any more.
            values: of the names in words and files, the home among them.
        """
        files = self.files(values)
        if self.script is not None:
            files[self.script.name] = self.script.read_text(encoding="utf-8")
        return self.words(program, values, f"{values['HOME']}/{self.script.name}" if self.script else ""), files

    def words(self, program: Program | None, values: Mapping[str, str], script: str) -> list[str]:
        """Return the words that start the program.

        Args:
            program: None: there is none any more.
            values: of the names in words.
            script: path of `script`.
        """
        words = [Template(word).safe_substitute(values) for word in self.command[1:]]
        if program is None:
            return [self.command[0], *words]
        return [*start_words(program), *words] if self.script is None else [*program["interpreter"], script, *words]

    def files(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the contents of `home_files`.

        Args:
            values: of the names in them.
        """
        prompt = yaml.safe_dump(values["AGENTRL_PROMPT"], default_style='"', width=float("inf")).strip()
        known = {**values, "PROMPT_YAML": prompt}
        return {name: Template(text).safe_substitute(known) for name, text in self.home_files.items()}

    def raise_limits(self, limits: SandboxLimits) -> SandboxLimits:
        """Return limits of a sandbox: those of the recipe in place of those that have their default and are lower."""
        default = SandboxLimits()
        raised = {
            key: value
            for key, value in self.limits
            if getattr(limits, key) == getattr(default, key) and value > getattr(limits, key)
        }
        return limits.model_copy(update=raised)


def program_path(path: str | None) -> str:
    """Return the folders in which a program of this machine is looked for; ``path`` None: those of this process."""
    return os.environ.get("PATH", "") if path is None else path
