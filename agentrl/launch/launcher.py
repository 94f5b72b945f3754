"""The launchers by name: the template of each, where it runs things, and the command that submits what was written."""

from __future__ import annotations

import importlib.resources
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.errors import ConfigError, MissingError, UserError


@dataclass(frozen=True, slots=True)
class Launcher:
    """One way onto machines."""

    template: str
    """Name of its template in the package."""
    suffix: str
    """Suffix of the file that is written."""
    submit: tuple[str, ...]
    """The command that submits the file, which is its last word."""
    shares_files: bool
    """Whether its machines see the files of this one under the same paths, those of a cluster's shared storage."""
    run_dir: str
    """Where runs are, if ``run.dir`` is not set; ``{cwd}`` is this folder, ``{name}`` the job."""


LAUNCHERS: Mapping[str, Launcher] = {
    "slurm": Launcher("slurm.sbatch.j2", ".sbatch", ("sbatch",), True, "{cwd}/runs/{name}"),
    "kubernetes": Launcher("kubernetes.yaml.j2", ".yaml", ("kubectl", "apply", "-f"), False, "/runs/{name}"),
    "skypilot": Launcher("skypilot.yaml.j2", ".sky.yaml", ("sky", "jobs", "launch", "--yes"), False, "/runs/{name}"),
    "ssh": Launcher("ssh.sh.j2", ".sh", ("bash",), True, "{cwd}/runs/{name}"),
}


def template_text(launcher: Launcher, file: Path | None = None) -> str:
    """Return the template of a launcher, or the user's own.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file is None:
        return importlib.resources.files("agentrl.launch").joinpath("templates", launcher.template).read_text("utf-8")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--template {file} cannot be read: {error}") from error


def submit(launcher: Launcher, file: Path) -> str:
    """Submit a file, and return what the scheduler prints.

    Raises:
        MissingError: the scheduler's command is not installed here.
        UserError: it refuses the file.
    """
    command = [*launcher.submit, str(file)]
    if shutil.which(command[0]) is None:
        raise MissingError(
            f"there is no command {command[0]} here; {file} is written: submit it where there is one, by {' '.join(command)}"
        )
    done = subprocess.run(command, capture_output=True, text=True)
    output = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise UserError(f"{' '.join(command)} ended with status {done.returncode}: {output}")
    return output
