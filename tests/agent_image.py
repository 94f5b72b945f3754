"""Agent programs for images of containers, from the environments that `make test-agents` builds."""

import io
import tarfile
from pathlib import Path

import pytest
from harness_cases import Case

IMAGE_PYTHON = "3.11"
"""Of the image of Docker's tests."""
AGENT = "/opt/agent"
"""Where a Python environment is in the image."""
CODEX = "lib/node_modules/@openai/codex/node_modules/@openai/codex-linux-*/vendor/*/bin/codex"
"""Codex itself, which needs no Node; npm's ``codex`` only starts it."""


def program_files(case: Case, bin_folder: Path) -> bytes:
    """Return a tar archive with what the image gets: Codex, or the program's packages in `AGENT`, with the image's Python."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:

        def write(name: str, content: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))

        if case.harness == "codex":
            (binary,) = bin_folder.parent.glob(CODEX)
            write("usr/local/bin/codex", binary.read_bytes())
            return buffer.getvalue()
        packages = bin_folder.parent / f"lib/python{IMAGE_PYTHON}/site-packages"
        if not packages.is_dir():
            pytest.skip(f"{bin_folder} is not of Python {IMAGE_PYTHON}, which the image has")
        inside = AGENT.lstrip("/")
        # With compiled modules: without them each container compiles thousands, which takes longer than an episode.
        archive.add(packages, f"{inside}/lib/python{IMAGE_PYTHON}/site-packages")
        write(f"{inside}/pyvenv.cfg", b"home = /usr/bin\n")
        for name in ("python3", f"python{IMAGE_PYTHON}"):
            link = tarfile.TarInfo(f"{inside}/bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, f"/usr/bin/python{IMAGE_PYTHON}"
            archive.addfile(link)
        for script in bin_folder.iterdir():
            if script.is_file() and not script.is_symlink():
                write(
                    f"{inside}/bin/{script.name}",
                    script.read_bytes().replace(str(bin_folder).encode(), f"{AGENT}/bin".encode()),
                )
    return buffer.getvalue()
