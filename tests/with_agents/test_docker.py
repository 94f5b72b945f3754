"""Unmodified agent programs finish a task in containers of Docker, from an image that has them."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from dockerd import DockerHost
from harness_cases import CASES, Case, check_rollout
from program_episodes import play_program

from agentrl.config.agent import AgentConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.gateway.program import check_agent
from agentrl.render.renderer import ChatRenderer

pytestmark = pytest.mark.agents

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
        archive.add(packages, f"{inside}/lib/python{IMAGE_PYTHON}/site-packages", filter=without_caches)
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


def without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave compiled modules out."""
    return None if "__pycache__" in member.name else member


@pytest.fixture
def image(dockerd: DockerHost, case: Case, bin_folder: Path) -> Iterator[str]:
    """An image with the program."""
    client = docker.APIClient(base_url=dockerd.url, timeout=300)
    name = f"agentrl-agent-{case.harness}"
    try:
        container = client.create_container(dockerd.image, command="true")
        client.put_archive(container, "/", program_files(case, bin_folder))
        client.commit(container, repository=name, tag="test")
        client.remove_container(container)
        yield f"{name}:test"
        client.remove_image(f"{name}:test", force=True)
    finally:
        client.close()


@pytest.mark.parametrize(
    ("case", "bin_folder"),
    [(case, case.environment) for case in CASES if case.harness in ("codex", "openai_agents", "mini_swe_agent")],
    ids=lambda value: value.harness if isinstance(value, Case) else "",
    indirect=["bin_folder"],
)
def test_a_program_finishes_a_task_in_docker(
    case: Case, dockerd: DockerHost, image: str, renderer: ChatRenderer
) -> None:
    path = f"{AGENT}/bin:/usr/local/bin:/usr/bin:/bin"
    config = AgentConfig(harness=case.harness, sandbox="docker", env={"PATH": path})
    sandbox = SandboxConfig(backend="docker", docker_url=dockerd.url, image=image)
    check_agent(config, sandbox)
    rollout, generations = play_program(config, case.script, renderer, sandbox)
    check_rollout(rollout, generations, case.rows, renderer)
