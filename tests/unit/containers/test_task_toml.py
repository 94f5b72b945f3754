"""Every field of ``task.toml``, its default, and what is refused."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from agentrl.config.validation import parse_section, subsections
from agentrl.containers.task_toml import (
    ARTIFACTS,
    NetworkPolicy,
    TaskToml,
    expand_header,
    expand_variables,
    with_artifacts_folder,
)
from agentrl.core.errors import ConfigError

EVERY_FIELD = tomllib.loads(Path(__file__).with_name("every_field.toml").read_text())


def parse(text: str) -> TaskToml:
    return parse_section(TaskToml, tomllib.loads(text))


def unset_fields(values: Any, section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield the fields of a section, and of those in it, that no value of a list or table sets."""
    tables = [table for table in (values if isinstance(values, list) else [values]) if isinstance(table, Mapping)]
    for name, info in section.model_fields.items():
        field_values = [table[name] for table in tables if name in table]
        if not field_values:
            yield path + name
        nested = [item for value in field_values for item in (value if isinstance(value, list) else [value])]
        inner = [*subsections(info.annotation)]
        for member in getattr(info.annotation, "__args__", ()):
            inner += subsections(member)
        for subsection in inner:
            yield from unset_fields(nested, subsection, f"{path}{name}.")


def test_the_example_has_every_field() -> None:
    fields = set(unset_fields(EVERY_FIELD, TaskToml))
    # Sections that have the fields of another one, which the example sets where it is by itself.
    again = (
        "verifier.environment.",
        "steps.agent.",
        "steps.verifier.",
        "steps.healthcheck.",
        "steps.artifacts.",
        "verifier.allowed_hosts",
    )
    assert {field for field in fields if not field.startswith(again)} == set()


def test_every_field_is_read() -> None:
    task = parse_section(TaskToml, EVERY_FIELD)
    assert (task.schema_version, task.source, task.multi_step_reward_strategy) == ("1.4", "small-set", "final")
    assert task.artifacts[0].source == "/work/out"
    assert task.artifacts[1].model_dump() == {
        "source": "/var/lib/db",
        "destination": "db",
        "exclude": ["*.tmp"],
        "service": "db",
    }
    assert task.task is not None
    assert task.task.model_dump() == {
        "name": "agentrl/every-field",
        "version": "2.1",
        "description": "All fields",
        "authors": [{"name": "A. Author", "email": "a@example.org"}],
        "keywords": ["fields"],
    }
    assert task.metadata["difficulty"] == "easy"
    hosts = ("example.org", "*.pypi.org", "10.0.0.0/8", "2001:db8::1")
    assert task.agent.policy == NetworkPolicy("allowlist", hosts)
    assert (task.agent.timeout_sec, task.agent.user) == (120.5, "agent")
    verifier = task.verifier
    assert (verifier.timeout_sec, verifier.env, verifier.user) == (90, {"MODE": "strict"}, "1000")
    assert (verifier.mode, verifier.policy) == ("separate", NetworkPolicy("no-network"))
    assert verifier.environment is not None
    assert (verifier.environment.docker_image, verifier.environment.memory_mb) == ("grader:1", 256)
    assert [hook.model_dump() for hook in verifier.collect] == [
        {"command": "pg_dump all > /var/lib/db/dump", "service": "db", "timeout_sec": 7.0, "user": "postgres"}
    ]
    environment = task.environment
    assert (environment.build_timeout_sec, environment.docker_image, environment.os) == (300, "work:1", "linux")
    assert (environment.cpus, environment.memory_mb, environment.storage_mb) == (1.5, 512, 2048)
    assert (environment.gpus, environment.gpu_types) == (1, ["H100"])
    assert environment.tpu is not None
    assert environment.tpu.model_dump() == {"type": "v6e", "topology": "2x4"}
    assert (environment.skills_dir, environment.workdir) == ("/skills", "/work")
    assert environment.policy == NetworkPolicy("public")
    assert environment.healthcheck is not None
    assert environment.healthcheck.model_dump() == {
        "command": "test -f /ready",
        "interval_sec": 1.0,
        "timeout_sec": 2.0,
        "start_period_sec": 3.0,
        "start_interval_sec": 0.5,
        "retries": 9,
    }
    docs, files = environment.mcp_servers
    assert (docs.transport, docs.url) == ("streamable-http", "http://docs:8000/mcp")
    assert docs.headers == {"Authorization": "Bearer ${AGENTRL_TEST_TOKEN}"}
    assert (files.transport, files.command, files.args) == ("stdio", "files-server", ["--root", "/work"])
    assert task.solution.env == {"ANSWER": "${ANSWER:-42}"}
    assert task.steps is not None
    first, second = task.steps
    assert (first.name, first.min_reward, second.min_reward) == ("first", 0.5, {"style": 0.25})
    assert first.healthcheck is not None
    assert (first.healthcheck.command, first.artifacts[0].source) == ("true", "/work/first")
    assert (first.agent.timeout_sec, first.agent.user) == (60, "other")
    assert first.agent.policy == NetworkPolicy("no-network")
    assert (first.verifier.mode, first.verifier.env) == ("shared", {"MODE": "loose"})
    assert second.verifier.model_fields_set == set()


def test_defaults() -> None:
    task = parse("")
    assert (task.schema_version, task.multi_step_reward_strategy, task.steps) == ("1.4", None, None)
    assert (task.environment.policy, task.environment.build_timeout_sec) == (NetworkPolicy("public"), 600)
    assert (task.environment.os, task.environment.cpus, task.environment.memory_mb) == ("linux", None, None)
    assert (task.agent.timeout_sec, task.agent.policy, task.agent.user) == (None, None, None)
    assert (task.verifier.timeout_sec, task.verifier.mode, task.verifier.user) == (600, None, None)
    healthcheck = parse("[environment.healthcheck]\ncommand = 'true'").environment.healthcheck
    assert healthcheck is not None
    assert [*healthcheck.model_dump().values()] == ["true", 5, 30, 0, 5, 3]
    collect = parse("[[verifier.collect]]\ncommand = 'true'").verifier.collect[0]
    assert [*collect.model_dump().values()] == ["true", "main", 60, None]
    server = parse("[[environment.mcp_servers]]\nname = 'a'\nurl = 'http://b'").environment.mcp_servers[0]
    assert server.transport == "sse"
    assert parse("[verifier.environment]").verifier.mode == "separate"


def test_keys_of_older_schemas() -> None:
    task = parse("version = '1.0'\n[environment]\nmemory = '2G'\nstorage = '512m'\nallow_internet = false")
    assert task.schema_version == "1.0"
    assert (task.environment.memory_mb, task.environment.storage_mb) == (2048, 512)
    assert task.environment.policy == NetworkPolicy("no-network")
    assert parse("[environment]\nallow_internet = true").environment.network_mode == "public"
    both = parse("[environment]\nallow_internet = true\nnetwork_mode = 'no-network'\nmemory = '1G'\nmemory_mb = 1024")
    assert both.environment.network_mode == "no-network"
    inner = parse("[verifier.environment]\nallow_internet = false").verifier.environment
    assert inner is not None
    assert inner.network_mode == "no-network"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1", "unknown key 'colour'"),
        ("[environment]\nmemory_md = 5", "unknown key 'environment.memory_md'. Did you mean 'environment.memory_mb'?"),
        ("[[steps]]\nname = 'a'\nreward = 1", "unknown key 'steps.0.reward'"),
        ("[verifier.environment]\nimage = 'a'", "unknown key 'verifier.environment.image'"),
        ("schema_version = '2.0'", "schema_version='2.0': agentrl reads versions 1.0 to 1.4"),
        ("[task]\nname = 'flat'", "task.name='flat': it must be organization/name"),
        ("[task]\nname = 'a/b'\nversion = ''", "task.version"),
        ("multi_step_reward_strategy = 'best'", "multi_step_reward_strategy='best'"),
        ("[environment]\nos = 'plan9'", "environment.os='plan9'"),
        ("[environment]\ncpus = inf", "environment.cpus"),
        ("[environment]\nmemory = '2 apples'", "memory='2 apples' must be a size such as '2G'"),
        ("[environment]\nmemory = '1G'\nmemory_mb = 5", "memory is 1024 MiB, and memory_mb=5; leave out memory"),
        ("[environment]\nallow_internet = 'no'", "allow_internet='no' is neither true nor false"),
        ("[environment]\nallowed_hosts = ['a.org']", "allowed_hosts is for network_mode='allowlist', not for 'public'"),
        ("[agent]\nallowed_hosts = ['a.org']", "allowed_hosts is for network_mode='allowlist', which is not set"),
        ("[agent]\nnetwork_mode = 'public'\nallowed_hosts = ['a.org']", "not for 'public'"),
        ("[agent]\nnetwork_mode = 'lan'", "agent.network_mode='lan'"),
        ("[environment.tpu]\ntype = 'v6e'\ntopology = '2'", "environment.tpu.topology='2': it must be whole numbers"),
        ("[[environment.mcp_servers]]\nname = 'a'", "transport='sse' needs url"),
        ("[[environment.mcp_servers]]\nname = 'a'\ntransport = 'stdio'", "transport='stdio' needs command"),
        (
            "[[environment.mcp_servers]]\nname = 'a'\ntransport = 'stdio'\ncommand = 'b'\nheaders = { A = 'b' }",
            "headers are for the transports over HTTP",
        ),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]", "has no environment of its own"),
        ("[[verifier.collect]]\ncommand = 'a'\nservice = '-x'", "'-x' is no name of a service"),
        ("artifacts = ['a', { source = '/a/../b' }]", "it must not contain '..'"),
        ("artifacts = [{ source = 'a', service = 'db' }]", "of service 'db' must be an absolute path"),
        ("artifacts = [{ source = '/a', destination = '/b' }]", "it must be a relative path"),
        ("artifacts = [{ source = '/a', destination = 'manifest.json' }]", "manifest.json is the name of the list"),
        ("[[steps]]\nname = 'a/b'", "is no name that a folder has on every system"),
        ("[[steps]]\nname = 'nul'", "is no name that a folder has on every system"),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'", "two steps are named 'a'"),
        ("[[steps]]\nname = 'a'\nmin_reward = 'high'", "steps.0.min_reward"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "host", ["http://a.org", "a.org:443", "*", "a.*.org", "*.10.0.0.1", "10.0.0.1/8", "[::1]", "", "-a.org"]
)
def test_hosts_that_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.allowed_hosts"):
        parse(f"[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['{host}']")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Authorization", "Bearer abc"),
        ("X-Api-Key", "${KEY:-abc}"),
        ("X-Note", "${API_TOKEN:-abc}"),
        ("Bad name", "a"),
        ("X-Note", "a\\nb"),
        ("X-Note", "${a b}"),
    ],
)
def test_headers_that_are_refused(name: str, value: str) -> None:
    server = f"[[environment.mcp_servers]]\nname = 'a'\nurl = 'http://b'\nheaders = {{ \"{name}\" = \"{value}\" }}"
    with pytest.raises(ConfigError, match="header"):
        parse(server)


def test_variables_of_this_machine() -> None:
    values = {"A": "${HERE}", "B": "${AWAY:-b}", "C": "${EMPTY:-}", "D": "plain ${HERE}", "E": "${HERE:-e}"}
    expanded = expand_variables(values, {"HERE": "1"}, "environment.env")
    assert expanded == {"A": "1", "B": "b", "C": "", "D": "plain ${HERE}", "E": "1"}
    with pytest.raises(ValueError, match=r"environment\.env\.F: the environment variable AWAY is not set"):
        expand_variables({"F": "${AWAY}"}, {}, "environment.env")
    assert expand_header("Bearer ${A}:${B:-x}", {"A": "1"}, "h") == "Bearer 1:x"
    with pytest.raises(ValueError, match="h: the environment variable A is not set"):
        expand_header("${A}", {}, "h")


def test_the_folder_of_artifacts_is_one_without_being_named() -> None:
    task = parse_section(TaskToml, EVERY_FIELD)
    assert [artifact.source for artifact in with_artifacts_folder(task.artifacts)] == [
        ARTIFACTS,
        "/work/out",
        "/var/lib/db",
    ]
    named = parse(f"artifacts = ['/a', {{ source = '{ARTIFACTS}/', exclude = ['x'] }}]")
    assert [artifact.source for artifact in with_artifacts_folder(named.artifacts)] == ["/a", f"{ARTIFACTS}/"]


def test_what_is_not_from_the_schema_is_no_section() -> None:
    with pytest.raises(ValidationError):
        TaskToml.model_validate({"environment": 3})
