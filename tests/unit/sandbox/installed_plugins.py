"""Plugins as if they were installed for the whole machine, in a private mount namespace; prints which of their files code reads.

Run by ``unshare --mount --propagation private``, as root: /usr/include and /usr/src, which nothing here needs, are replaced.
Prints JSON: the files that hold the secret, what code reads with all defences, without `Defence.FILES`, and what it imports.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import py_compile
import secrets
import subprocess
import sys
import zipfile
from pathlib import Path

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import ConfigError
from agentrl.sandbox.base import ALL_DEFENCES, Defence, Job
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend
from agentrl.sandbox.registry import make_backend

TOP, SOURCES = Path("/usr/include"), Path("/usr/src")
SITE, PYCACHE = TOP / "site-packages", TOP / "pycache"
SECRET = secrets.token_hex(16)
ANSWER = f"ANSWER = '{SECRET}'\n"
READ = """
import os, sys
for top in ("/usr/include", "/usr/src"):
    for folder, _, files in os.walk(top):
        for name in files:
            try:
                content = open(os.path.join(folder, name), "rb").read()
            except OSError:
                continue
            if SECRET in content:
                print(os.path.join(folder, name))
"""
IMPORT = """
import sys
sys.path.insert(0, "/usr/include/site-packages")
import json, sqlite3, zoneinfo, openskill, shown
print(openskill.RATING, shown.TEXT)
"""


def write(path: Path, text: str = ANSWER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def install(name: str, group: str, *more_files: str) -> None:
    """Install a distribution of one single-module plugin, compiled, and ``more_files`` relative to ``site-packages``."""
    info = f"{name}-1.0.dist-info"
    source = write(SITE / f"{name}.py")
    for level in (-1, 2):
        py_compile.compile(str(source), optimize=level, doraise=True)
    for file in more_files:
        write(SITE / file)
    write(SITE / info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    write(SITE / info / "entry_points.txt", f"[{group}]\n{name} = {name}:Plugin\n")
    write(SITE / info / "RECORD", "".join(f"{file},,\n" for file in (source.name, *more_files, f"{info}/METADATA")))


def plant() -> list[str]:
    """Write plugins and return the files with the secret."""
    install("cities", "agentrl.tasks", "../share/cities/answers.json")
    install("capitals", "agentrl.envs")
    install("grading", "agentrl.rewards", "grading_data/right.txt")
    install("lookup", "agentrl.tools")
    write(SITE / "own_tasks.py")  # used as own_tasks:Tasks, without an entry point
    write(SITE / "answers_of_cities/__init__.py")  # a package that a taskset requires
    write(SITE / "answers.txt")
    write(SITE / "_editable.pth", f"{SOURCES}/editable\n")
    write(SOURCES / "editable/more_tasks/__init__.py")
    write(SOURCES / "app/train.jsonl")
    write(PYCACHE / "usr/src/app/tasks.cpython-311.pyc")
    with zipfile.ZipFile(SITE / "zipped.egg", "w") as archive:
        archive.writestr("zipped_tasks.py", ANSWER)
    write(SITE / "openskill-6.2.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: openskill\nVersion: 6.2.0\n")
    write(SITE / "openskill-6.2.0.dist-info/RECORD", "openskill/__init__.py,,\nopenskill-6.2.0.dist-info/METADATA,,\n")
    write(SITE / "openskill/__init__.py", "RATING = 25\n")
    write(SITE / "shown/__init__.py", "TEXT = 'shown'\n")
    files = [path for top in (TOP, SOURCES) for path in top.rglob("*") if path.is_file()]
    return [str(path) for path in files if SECRET.encode() in path.read_bytes()]


async def printed(defences: frozenset[Defence], code: str) -> list[str]:
    """Return the lines that code prints in a sandbox."""
    config = SandboxConfig(accept_no_memory_limit=True, readonly=(SITE / "shown",))
    async with BubblewrapBackend(config, defences) as backend, await backend.open("a") as sandbox:
        outcome = await sandbox.run(Job("read", code=f"SECRET = {SECRET!r}.encode()\n{code}"))
        return (outcome.stdout + outcome.stderr).splitlines()


def refused(path: str) -> bool:
    """Return whether both backends refuse to show a file's folder."""
    errors = 0
    for backend in ("bubblewrap", "docker"):
        try:
            make_backend(SandboxConfig(backend=backend, readonly=(Path(path).parent,)))
        except ConfigError:
            errors += 1
    return errors == 2


def main() -> None:
    for folder in (TOP, SOURCES):
        subprocess.run(["mount", "-t", "tmpfs", "plugins", folder], check=True)
    planted = plant()
    sys.pycache_prefix = str(PYCACHE)
    importlib.invalidate_caches()
    result = {
        "planted": planted,
        "read": asyncio.run(printed(ALL_DEFENCES, READ)),
        "read without files": asyncio.run(printed(ALL_DEFENCES - {Defence.FILES}, READ)),
        "imported": asyncio.run(printed(ALL_DEFENCES, IMPORT)),
        "refused": [path for path in planted if refused(path)],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
