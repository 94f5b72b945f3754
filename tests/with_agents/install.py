"""Install the agent programs of the tests: ``python -m tests.with_agents.install FOLDER``.

Python programs get an environment each, those of npm one prefix. Versions are those that the recipes were tried with.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from agentrl.gateway.harnesses.recipes import HARNESSES

VERIFIERS = "pip install verifiers==0.4.0 uv"
NULL_HARNESS = "openai mcp==2.0.0 httpx httpx2 tenacity certifi"
"""What verifiers' harness ``null`` has uv install for an episode; the test has uv take it from a folder."""
SDKS = "pip install openai==3.57.0 anthropic==2.14.0"


def install(folder: Path, command: str) -> None:
    """Run a command that installs with pip or npm, into a folder."""
    program, *words = shlex.split(command)
    if program == "npm":
        subprocess.run(
            ["npm", *words, "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error"], check=True
        )
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / program), *words, "--quiet"], check=True)


def download(folder: Path, packages: str) -> None:
    """Download packages and what they require into ``wheels`` of an environment."""
    pip = [str(folder / "bin" / "pip"), "download", "--quiet", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder / "wheels"), *packages.split()], check=True)


def main() -> None:
    """Install all."""
    folder = Path(sys.argv[1]).resolve()
    install(folder / "sdks", SDKS)
    install(folder / "verifiers", VERIFIERS)
    download(folder / "verifiers", NULL_HARNESS)
    for name, harness in HARNESSES.items():
        install(folder / ("node" if harness.install.startswith("npm") else name), harness.install)


if __name__ == "__main__":
    main()
