"""Services of tasks, and what tasks need and machines do not have."""

import asyncio
from pathlib import Path

import pytest

from agentrl.config.containers import ContainersConfig
from agentrl.containers.spec import Healthcheck, VolumeMount
from agentrl.containers.task_compose import ComposeFile, read_compose
from agentrl.containers.task_folder import FOLDER_KEY, TaskFolder, load_task_folder
from agentrl.containers.task_machines import machine_spec
from agentrl.containers.task_needs import HostFacts, check_task_folders, host_facts, unmet_needs
from agentrl.core.errors import ConfigError, TaskError
from agentrl.core.task import Task

COMPOSE = """\
services:
  main:
    build: {context: "${CONTEXT_DIR}"}
    image: ${MAIN_IMAGE_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment: ["DB=db:5432", "TEST_DIR=${TEST_DIR}"]
    volumes: ["${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}", "data:/data:ro"]
    depends_on: {db: {condition: service_healthy}}
  db:
    image: postgres:${PG:-16}
    environment: {POSTGRES_PASSWORD: "${SECRET}", EMPTY: null, PLAIN: "a$$b"}
    user: "70"
    expose: [5432]
    healthcheck: {test: ["CMD", "pg_isready", "-U", "me and you"], interval: 1m30s, timeout: 2s, retries: 7}
    deploy: {resources: {limits: {cpus: "0.5", memory: 256M}}}
  web:
    build: {context: ./web, dockerfile: Web, args: [LEVEL=3]}
    command: serve --port "80 80"
    depends_on: [db, main]
    healthcheck: {test: "curl localhost", start_period: 500ms}
    mem_limit: 1g
    volumes: [{type: volume, source: data, target: /srv/data}, /cache]
volumes: {data: null}
"""


def read(tmp_path: Path, text: str) -> ComposeFile:
    (tmp_path / "docker-compose.yaml").write_text(text)
    return read_compose(tmp_path, {"SECRET": "s"})


def write_task(folder: Path, toml: str = "", compose: str = "") -> TaskFolder:
    files = {
        "task.toml": toml,
        "instruction.md": "Do it.",
        "tests/test.sh": "",
        "environment/Dockerfile": "FROM scratch",
    }
    for name, text in {**files, **({"environment/docker-compose.yaml": compose} if compose else {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return load_task_folder(folder)


def test_services_of_a_compose_file(tmp_path: Path) -> None:
    compose = read(tmp_path, COMPOSE)
    assert compose.faults == ()
    assert compose.env == {"DB": "db:5432", "TEST_DIR": "/tests"}
    db, web = compose.services
    assert (db.name, db.image, db.user) == ("db", "postgres:16", "70")
    assert db.env == {"POSTGRES_PASSWORD": "s", "EMPTY": "", "PLAIN": "a$b"}
    assert (db.cpus, db.memory_mb, db.depends_on) == (0.5, 256, ())
    assert db.healthcheck == Healthcheck(command="pg_isready -U 'me and you'", interval_s=90, timeout_s=2, retries=7)
    assert web.build is not None
    assert (web.build.context, web.build.dockerfile, web.build.args) == (tmp_path / "web", "Web", {"LEVEL": "3"})
    assert (web.command, web.depends_on, web.memory_mb) == (("serve", "--port", "80 80"), ("db",), 1024)
    assert web.healthcheck == Healthcheck(command="curl localhost", start_period_s=0.5)
    assert compose.volumes == (VolumeMount(name="data", path="/data", read_only=True),)
    assert web.volumes == (VolumeMount(name="data", path="/srv/data"), VolumeMount(path="/cache"))
    assert read_compose(tmp_path / "none", {}) == ComposeFile((), {}, (), ())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("services: {db: {image: a, volumes: [b:/b]}}", "services.db.volumes: b is not declared in volumes"),
        *(
            (
                f"services: {{{service}: {{image: a, build: ., volumes: [{volume}]}}}}\nvolumes: {{b: null}}",
                f"services.{service}.volumes: {source} is a path of the host, which machines never see",
            )
            for service in ("main", "db")
            for volume, source in (
                ("/var/run/docker.sock:/var/run/docker.sock", "/var/run/docker.sock"),
                ("./a:/a:ro", "./a"),
                ("~/.docker:/a", "~/.docker"),
                ("'${SOCKET:-/run/a.sock}:/a'", "/run/a.sock"),
                ("a/b:/a", "a/b"),
                ("..:/a", ".."),
                ("{type: bind, source: b, target: /a}", "b"),
                ("{type: bind, source: /run/containerd, target: /a}", "/run/containerd"),
                ("{source: /run, target: /a}", "/run"),
            )
        ),
        *(
            (f"services: {{main: {{build: ., {key}: {value}}}}}", f"services.main.{key}: machines have none")
            for key, value in (
                ("use_api_socket", "true"),
                ("volumes_from", "[db]"),
                ("devices", "[/dev/kvm]"),
                ("pid", "host"),
                ("ipc", "host"),
                ("cap_add", "[ALL]"),
                ("security_opt", "[a]"),
                ("secrets", "[a]"),
                ("configs", "[a]"),
                ("env_file", "a"),
                ("extends", "{file: a}"),
                ("privileged", "true"),
                ("userns_mode", "host"),
            )
        ),
        (
            "services: {main: {build: ., volumes: ['b:/b']}}\nvolumes: {b: {driver_opts: {type: none, o: bind, device: /}}}",
            "volumes.b.driver_opts: a volume of a machine is made for it, and has no settings",
        ),
        (
            "services: {main: {build: ., volumes: ['b:/b']}}\nvolumes: {b: {external: true}}",
            "volumes.b.external: a volume of a machine is made for it, and has no settings",
        ),
        ("include: [a.yaml]\nservices: {}", "include: machines have none"),
        (
            "services: {db: {image: a, volumes: [{type: tmpfs, target: /a}]}}",
            "services.db.volumes: type=tmpfs: machines have none",
        ),
        ("services: {db: {image: a, volumes: [{target: /a, bind: {}}]}}", "services.db.volumes: bind is not supported"),
        ("services: {db: {image: a, privileged: true}}", "services.db.privileged: machines have none"),
        ("services: {main: {network_mode: host}}", "services.main.network_mode: machines have none"),
        ("services: {main: {image: a}}", "services.main.image: set environment.docker_image in task.toml"),
        ("services: {}\nnetworks: {a: {}}", "networks: machines have none"),
    ],
)
def test_what_machines_do_not_have_is_named(tmp_path: Path, text: str, fault: str) -> None:
    assert read(tmp_path, text).faults == (f"{tmp_path / 'docker-compose.yaml'}: {fault}",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "services must be a mapping"),
        ("services: [a]", "services must be a mapping"),
        ("services: {db: 3}", "services.db must be a mapping"),
        ("services: {db: {}}", "services.db"),
        ("services: {db: {image: '${AWAY}'}}", "the environment variable AWAY is not set on this machine"),
        ("services: {db: {build: ../..}}", "leads out of"),
        ("services: {db: {build: {context: ., target: a}}}", "build.target is not supported"),
        ("services: {db: {image: a, healthcheck: {test: b, interval: soon}}}", "'soon' is no time such as 1m30s"),
        ("services: {db: {image: a, mem_limit: much}}", "'much' is no size such as 512m"),
        ("services: {db: {image: a, environment: 3}}", "3 must be a list"),
        ("services: {db: {image: a, volumes: [a:/b:rw:c]}}", "is no volume such as data:/data:ro"),
        ("services: {db: {image: a, volumes: [b]}}", "'b' is no absolute path"),
        ("services: {}\nvolumes: [a]", "volumes must be a mapping"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert message in str(error.value)


def test_the_machine_of_a_task_has_its_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    task = write_task(tmp_path / "a", "[environment]\nmemory_mb = 512\nenv = { LEVEL = '3', DB = 'mine' }", COMPOSE)
    spec = asyncio.run(machine_spec(task))
    assert [service.name for service in spec.services] == ["db", "web"]
    assert spec.env == {"DB": "mine", "TEST_DIR": "/tests", "LEVEL": "3"}
    assert [volume.path for volume in spec.volumes] == ["/data"]
    assert spec.volume_names == ("data",)
    assert spec.build is not None
    assert (spec.build.context, spec.memory_mb) == (task.context, 512)
    task = write_task(tmp_path / "b", "", "services: {db: {image: a, privileged: true}}")
    with pytest.raises(TaskError, match=r"services\.db\.privileged: machines have none"):
        asyncio.run(machine_spec(task))


NEEDS = """\
[environment]
os = "windows"
gpus = 2
tpu = { type = "v6e", topology = "2x4" }
cpus = 64
memory_mb = 999999
env = { A = "${AWAY}" }
[[environment.mcp_servers]]
name = "docs"
url = "http://docs"
headers = { Authorization = "Bearer ${TOKEN}" }
[agent]
network_mode = "no-network"
[verifier]
environment_mode = "shared"
network_mode = "public"
env = { B = "${AWAY}" }
[[verifier.collect]]
command = "true"
service = "db"
[[verifier.collect]]
command = "true"
service = "cache"
[solution]
env = { C = "${AWAY}" }
"""


def test_what_a_task_needs_and_does_not_get(tmp_path: Path) -> None:
    task = write_task(tmp_path / "a", NEEDS, "services: {db: {image: a, volumes: ['/b:/b']}}")
    lines = unmet_needs(task, HostFacts(cpus=2, memory_mb=1000), {})
    away = "the environment variable AWAY is not set on this machine, and has no default"
    token = "the environment variable TOKEN is not set on this machine, and has no default"
    toml = [
        "environment.gpus=2: machines have no GPUs",
        "environment.tpu: machines have no TPUs",
        "environment.os=windows: machines are Linux containers",
        "environment.cpus=64: the daemon's host has 2",
        "environment.memory_mb=999999: the daemon's host has 1000",
        f"environment.env.A: {away}",
        f"environment.mcp_servers.docs.headers.Authorization: {token}",
        f"solution.env.C: {away}",
        "environment.mcp_servers.docs.url=http://docs: network_mode=no-network does not reach it",
        "verifier.network_mode=public: tests in the agent's machine have its network",
        "artifacts and verifier.collect name cache, which environment/docker-compose.yaml does not have",
        f"verifier.env.B: {away}",
    ]
    compose = f"{task.context / 'docker-compose.yaml'}: services.db.volumes: /b is a path of the host, which machines never see"
    assert lines == [f"{task.path / 'task.toml'}: {line}" for line in toml] + [compose]


def test_mcp_servers_that_the_machines_network_reaches_are_no_need(tmp_path: Path) -> None:
    servers = {
        "program": 'transport = "stdio"\ncommand = "a"',
        "inside": 'url = "http://localhost:1/sse"',
        "side": 'url = "http://db:1/sse"',
        "allowed": 'url = "https://docs.example.org/sse"',
        "other": 'url = "https://example.com/sse"',
    }
    toml = "".join(f'[[environment.mcp_servers]]\nname = "{name}"\n{keys}\n' for name, keys in servers.items())
    toml += "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['*.example.org']"
    task = write_task(tmp_path / "a", toml, "services: {db: {image: a}}")
    assert [line.split(": ", 1)[1] for line in unmet_needs(task, None, {})] == [
        "environment.mcp_servers.other.url=https://example.com/sse: network_mode=allowlist does not reach it"
    ]


def test_a_task_that_needs_nothing_special_gets_all(tmp_path: Path) -> None:
    task = write_task(tmp_path / "a", "[environment]\ncpus = 2\nmemory_mb = 1000")
    assert unmet_needs(task, HostFacts(cpus=2, memory_mb=1000), {}) == []
    windows = HostFacts(cpus=2, memory_mb=1000, os="windows")
    assert unmet_needs(task, windows, {})[0].endswith("environment.os=linux: the daemon's containers are of windows")
    assert unmet_needs(task, None, {}) == []


def test_tasks_of_a_run_are_checked_before_it_starts(tmp_path: Path) -> None:
    fine = write_task(tmp_path / "a")
    bad = write_task(tmp_path / "b", "[environment]\ngpus = 1")
    tasks = [
        Task("plain", ()),
        *(Task(folder.path.name, (), metadata={FOLDER_KEY: str(folder.path)}) for folder in (fine, bad)),
    ]
    no_daemon = ContainersConfig(hosts=(f"unix://{tmp_path}/none.sock",))
    check_task_folders(tasks[:2], no_daemon)
    with pytest.raises(ConfigError, match=r"b/task\.toml: environment\.gpus=1: machines have no GPUs"):
        check_task_folders(tasks, no_daemon)


def test_facts_of_a_daemon() -> None:
    assert host_facts({"NCPU": 8, "MemTotal": 2**34, "OSType": "linux"}) == HostFacts(8, 2**14, "linux")
