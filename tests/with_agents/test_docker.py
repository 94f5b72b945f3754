"""Unmodified agent programs finish a task in containers of Docker, from an image that has them."""

from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from agent_image import AGENT, program_files
from dockerd import DockerHost
from harness_cases import CASES, Case, check_rollout
from program_episodes import play_program

from agentrl.config.agent import AgentConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.gateway.program import check_agent
from agentrl.render.renderer import ChatRenderer

pytestmark = pytest.mark.agents


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
