"""Install the servers of the tests: ``python -m tests.with_environments.install FOLDER``. Each has an environment of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

OPENENV = {"openenv-0.3": "openenv-core==0.3.0", "openenv-0.10": "openenv==0.10.0"}
"""What is installed, by folder."""
NEMO_GYM = "nemo-gym==0.7.0"
NEMO_GYM_PYTHONS = ("python3.13", "python3.12")
"""Its metadata requires the newest patch of 3.13, its code does not."""


def works(program: str) -> bool:
    """Whether a program is a Python that starts; names on the PATH need not be."""
    return (
        shutil.which(program) is not None and subprocess.run([program, "-c", ""], capture_output=True).returncode == 0
    )


def install(python: str, folder: Path, *words: str) -> None:
    """Make an environment and install into it."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *words], check=True)


def main() -> None:
    """Install all."""
    folder = Path(sys.argv[1]).resolve()
    for name, package in OPENENV.items():
        install(sys.executable, folder / name, package)
    pythons = [
        python for python in (os.environ.get("NEMO_GYM_PYTHON", ""), *NEMO_GYM_PYTHONS) if python and works(python)
    ]
    if not pythons:
        print("NeMo Gym needs Python 3.12 or 3.13: set NEMO_GYM_PYTHON. Its tests are skipped.")
        return
    install(pythons[0], folder / "nemo-gym", "--ignore-requires-python", NEMO_GYM)


if __name__ == "__main__":
    main()
