"""Harbor's own package beside agentrl: the same schema, and the same rewards of the shipped exercises."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import docker
import pytest
from agentrl_tasks.terminal.data import SHIPPED
from agentrl_tasks.terminal.exercise import IMAGE
from pydantic import BaseModel

from agentrl import ConfigError
from agentrl.config.validation import subsections
from agentrl.containers.task_folder import find_task_folders, load_task_folder
from agentrl.containers.task_toml import TaskToml
from tests.dockerd import image_tar, own_daemon
from tests.unit.containers import test_task_toml as schema_tests

pytestmark = pytest.mark.harbor

HARBOR = Path(os.environ.get("HARBOR_VENV", ".venv-harbor")).resolve() / "bin"
PROGRAM = Path(__file__).with_name("read_schema.py")
EVERY_FIELD = Path(schema_tests.__file__).with_name("every_field.toml")
OLD_KEYS = "version = '1.0'\n[environment]\nmemory = '2G'\nstorage = '512M'\nallow_internet = false"
REFUSED_BY_AGENTRL_ALONE = (
    "unknown key",
    "agentrl reads versions",
    "is neither true nor false",
    "must be a size such as",
)
"""Messages on documents that Harbor reads, or reads in part."""


def ask_harbor(documents: list[str], folders: list[Path]) -> dict[str, Any]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [str(HARBOR / "python"), "-W", "ignore", str(PROGRAM)],
        input=json.dumps({"documents": documents, "folders": list(map(str, folders))}),
        env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    reply: dict[str, Any] = json.loads(process.stdout)
    return reply


def own_fields(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        simple = isinstance(info.default, bool | int | float | str)
        defaults[prefix + name] = info.default if simple else None
        members = [*subsections(info.annotation)]
        for member in getattr(info.annotation, "__args__", ()):
            members += [section for section in subsections(member) if section not in members]
        for section in members:
            defaults |= own_fields(section, f"{prefix}{name}.")
    return defaults


def test_fields_and_defaults_are_those_of_harbor() -> None:
    fields = ask_harbor([], [])["fields"]
    # Of older schemas: read, and then a field of the schema.
    fields = {name: default for name, default in fields.items() if not name.endswith("allow_internet")}
    assert own_fields(TaskToml) == fields


def is_valid(toml: str) -> bool:
    try:
        schema_tests.parse(toml)
    except ConfigError:
        return False
    return True


def test_documents_are_valid_for_both_or_for_none() -> None:
    refused = [
        toml
        for mark in schema_tests.test_what_is_refused.pytestmark  # type: ignore[attr-defined]
        for toml, message in mark.args[1]
        if not any(text in message for text in REFUSED_BY_AGENTRL_ALONE)
    ]
    hosts = [
        f"[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['{host}']"
        for mark in schema_tests.test_hosts_that_are_refused.pytestmark  # type: ignore[attr-defined]
        for host in mark.args[1]
    ]
    documents = ["", OLD_KEYS, EVERY_FIELD.read_text(), *refused, *hosts]
    assert len(documents) > 30
    own = [is_valid(document) for document in documents]
    harbors = ask_harbor(documents, [])["valid"]
    different = [document for document, mine, theirs in zip(documents, own, harbors, strict=True) if mine != theirs]
    assert different == []
    assert own.count(True) == 3


def test_harbor_reads_the_shipped_folders_as_agentrl_does() -> None:
    folders = find_task_folders(SHIPPED)
    assert ask_harbor([], folders)["instructions"] == [load_task_folder(folder).instruction for folder in folders]


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float | None]]:
    """The rewards of Harbor's agents ``oracle`` and ``nop``, by task, in Harbor's own Docker environment.

    A daemon for tests has no bridge, and Harbor's filter of the network needs images from a registry: the tasks are run without
    any network, in place of the filter.
    """
    folder = tmp_path_factory.mktemp("harbor")
    shutil.copytree(SHIPPED, folder / "tasks")
    for toml in (folder / "tasks").glob("*/task.toml"):
        toml.write_text(toml.read_text().replace('network_mode = "no-network"\n', 'network_mode = "public"\n'))
    overlay = folder / "no-network.yaml"
    overlay.write_text("services: {main: {network_mode: none, stop_grace_period: 0s}}\n")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    by_agent: dict[str, dict[str, float | None]] = {}
    with own_daemon() as daemon:
        client = docker.APIClient(base_url=daemon.url, timeout=120)
        repository, tag = IMAGE.split(":")
        client.import_image_from_file(str(image_tar()), repository=repository, tag=tag)
        client.close()
        for agent in ("oracle", "nop"):
            command = [str(HARBOR / "harbor"), "run", "--path", str(folder / "tasks"), "--agent", agent, "--env", "docker",
                       "--extra-docker-compose", str(overlay), "--jobs-dir", str(folder), "--job-name", agent,
                       "--n-concurrent", "2", "--quiet", "--yes"]  # fmt: skip
            process = subprocess.run(
                command, env={**environ, "DOCKER_HOST": daemon.url}, capture_output=True, text=True
            )
            assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
            by_agent[agent] = {}
            for path in (folder / agent).glob("*/result.json"):
                result = json.loads(path.read_text())
                verified = result["verifier_result"]
                by_agent[agent][result["task_name"]] = verified["rewards"]["reward"] if verified else None
    return by_agent


def test_solutions_have_reward_1_and_an_idle_agent_0_in_harbor(rewards: dict[str, dict[str, float | None]]) -> None:
    names = [folder.name for folder in find_task_folders(SHIPPED)]
    assert rewards["oracle"] == dict.fromkeys(names, 1.0)
    assert rewards["nop"] == dict.fromkeys(names, 0.0)
