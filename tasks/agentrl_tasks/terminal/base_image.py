"""The image that all exercises begin from: Debian with Python and procps, from a registry's image or by debootstrap."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from agentrl import MissingError, UserError

from .exercise import IMAGE

DOCKERFILE = Path(__file__).with_name("base") / "Dockerfile"
_PACKAGES = "python3,procps"
_LEFT_OUT = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man")
_LAST_LINES = 5


def build(base: str) -> None:
    """Build the image from another image of Debian with the client ``docker``, which may pull it.

    Raises:
        UserError: the client is not installed, or fails; the message has its last lines.
    """
    folder = str(DOCKERFILE.parent)
    run_program("docker", "build", "--build-arg", f"BASE={base}", "--tag", IMAGE, folder)


def bootstrap(suite: str) -> None:
    """Make the image from Debian's packages with ``debootstrap``, as root; no registry of images is needed.

    Raises:
        UserError: a program is not installed, or fails; the message has its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-base-") as folder:
        root, archive = Path(folder) / "root", Path(folder) / "image.tar"
        run_program("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", suite, str(root))
        for path in _LEFT_OUT:
            shutil.rmtree(root / path, ignore_errors=True)
        devices = "--exclude=./dev/*"
        run_program("tar", "--numeric-owner", "--one-file-system", devices, "-C", str(root), "-cf", str(archive), ".")
        run_program("docker", "import", "--change", "CMD /bin/sh", str(archive), IMAGE)


def run_program(*words: str) -> str:
    """Run a program that makes the image, and return what it prints.

    Raises:
        UserError: it is not installed, or fails; the message has its last lines.
    """
    if shutil.which(words[0]) is None:
        raise MissingError(f"{words[0]} is not installed; it makes the image {IMAGE}")
    process = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if process.returncode != 0:
        lines = process.stdout.strip().splitlines()[-_LAST_LINES:]
        raise UserError("\n".join([f"{' '.join(words[:2])} ended with {process.returncode}:", *lines]))
    return process.stdout
