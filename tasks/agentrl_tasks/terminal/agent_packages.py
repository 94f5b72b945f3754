"""Agent programs in the image of the exercises: packages of Python, which pip of this machine installs."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from .base_image import DOCKERFILE, run_program
from .exercise import IMAGE

FOLDER = "/opt/agent"
"""Python environment of the programs in the image."""
_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")
_COMPILE = f"RUN {FOLDER}/bin/python3 -m compileall -q {FOLDER}/lib > /dev/null; exit 0\n"
"""Compiles modules once, in place of at each start in a machine. Files for other versions of Python in some packages fail."""
MODEL = DOCKERFILE.with_name("requests_model.py")
"""The model class of mini-swe-agent that `terminal/mini_swe_agent` uses."""
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def add_packages(packages: tuple[str, ...]) -> None:
    """Add packages to the image, with `MODEL`, as the environment `FOLDER`.

    Args:
        packages: as pip takes them, such as ``mini-swe-agent==2.4.6``.

    Raises:
        UserError: pip or docker fails; the message has its last lines.
    """
    version = run_program("docker", "run", "--rm", "--network=none", IMAGE, "python3", "-c", _VERSION).strip()
    with tempfile.TemporaryDirectory(prefix="agentrl-packages-") as name:
        environment = Path(name) / "agent"
        target = environment / "lib" / f"python{version}" / "site-packages"
        platforms = [f"--platform={platform}" for platform in _PLATFORMS]
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:")
        run_program(*pip, f"--python-version={version}", *platforms, f"--target={target}", *packages)
        shutil.copy(MODEL, target)
        (environment / "pyvenv.cfg").write_text("home = /usr/bin\n")
        programs = environment / "bin"
        (target / "bin").rename(programs)
        for script in filter(Path.is_file, programs.iterdir()):
            first, _, text = script.read_bytes().partition(b"\n")
            if first.startswith(b"#!") and b"python" in first:
                script.write_bytes(f"#!{FOLDER}/bin/python3\n".encode() + text)
        for python in ("python3", f"python{version}"):
            (programs / python).symlink_to("/usr/bin/python3")
        (Path(name) / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY agent {FOLDER}\n{_COMPILE}")
        run_program("docker", "build", "--quiet", "--network=none", "--tag", IMAGE, name)
