"""Services of a task: ``environment/docker-compose.yaml``, as far as machines have what it says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from agentrl.containers.spec import BuildSpec, Healthcheck, ServiceSpec, VolumeMount
from agentrl.containers.task_toml import MAIN
from agentrl.core.errors import ConfigError
from agentrl.core.reading import flatten_message, reading

COMPOSE = "docker-compose.yaml"
_HARBOR_VARIABLES = ("CONTEXT_DIR", "MAIN_IMAGE_NAME", "PREBUILT_IMAGE_NAME", "TEST_DIR", "CPUS", "MEMORY",
                     "HOST_VERIFIER_LOGS_PATH", "HOST_AGENT_LOGS_PATH", "HOST_ARTIFACTS_PATH",
                     "ENV_VERIFIER_LOGS_PATH", "ENV_AGENT_LOGS_PATH", "ENV_ARTIFACTS_PATH")  # fmt: skip
"""Variables that Harbor sets when it reads the file; what main says with them, machines have without."""
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_SERVICE_KEYS = {
    "image",
    "build",
    "command",
    "environment",
    "user",
    "depends_on",
    "healthcheck",
    "deploy",
    "cpus",
    "mem_limit",
    "volumes",
}
_SILENT_KEYS = {"expose", "hostname", "container_name", "restart", "init", "stdin_open", "tty", "pull_policy"}
"""Keys that change nothing for a task."""
_MAIN_KEYS = {"image", "build", "command", "environment", "depends_on", "deploy", "volumes"}
_FILE_KEYS = {"services", "volumes", "version", "name"}
_VOLUME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZES = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}


@dataclass(frozen=True, slots=True)
class ComposeFile:
    """The content of a file."""

    services: tuple[ServiceSpec, ...]
    """Containers next to the agent's."""
    env: Mapping[str, str]
    """Variables of the agent's container."""
    volumes: tuple[VolumeMount, ...]
    """Volumes of the agent's container."""
    faults: tuple[str, ...]
    """What machines do not have, with file and key."""


def read_compose(context: Path, environ: Mapping[str, str]) -> ComposeFile:
    """Read the services in a folder; none without the file.

    Args:
        context: folder of the file.
        environ: variables of this machine, for ``${NAME}``.

    Raises:
        ConfigError: it is no YAML, or not what Docker Compose reads.
    """
    path = context / COMPOSE
    if not path.is_file():
        return ComposeFile((), {}, (), ())
    with reading(path, "YAML file"):
        tree = yaml.safe_load(path.read_text())
    if not isinstance(tree, Mapping) or not isinstance(tree.get("services"), Mapping):
        raise ConfigError(f"{path}: services must be a mapping")
    faults = [f"{path}: {key}: machines have none" for key in tree if key not in _FILE_KEYS]
    declared = tree.get("volumes") or {}
    if not isinstance(declared, Mapping):
        raise ConfigError(f"{path}: volumes must be a mapping")
    faults += [
        f"{path}: volumes.{name}.{key}: a volume of a machine is made for it, and has no settings"
        for name, section in declared.items()
        for key in section or ()
        if key != "name"
    ]
    services: list[ServiceSpec] = []
    env: Mapping[str, str] = {}
    volumes: tuple[VolumeMount, ...] = ()
    for name, section in tree["services"].items():
        key = f"{path}: services.{name}"
        if not isinstance(section, Mapping):
            raise ConfigError(f"{key} must be a mapping")
        keys = _MAIN_KEYS if name == MAIN else _SERVICE_KEYS
        faults += [
            f"{key}.{other_key}: machines have none" for other_key in section if other_key not in keys | _SILENT_KEYS
        ]
        try:
            mounts, volume_faults = _volumes(section, key, declared, environ)
            faults += volume_faults
            if name == MAIN:
                env, volumes = _environment(section.get("environment"), environ), mounts
                faults += _main_faults(section, key)
            else:
                services.append(_service(str(name), section, context, environ, mounts))
        except ValidationError as error:
            fault = error.errors()[0]
            raise ConfigError(f"{key}.{'.'.join(map(str, fault['loc']))}: {flatten_message(fault['msg'])}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{key}: {flatten_message(error)}") from None
    return ComposeFile(tuple(services), env, volumes, tuple(faults))


def _main_faults(section: Mapping[str, object], key: str) -> list[str]:
    """Return what the agent's service says and its machine does not have: images that are not Harbor's own."""
    if "image" in section and "build" not in section and not _names_harbor(str(section["image"])):
        return [f"{key}.image: set environment.docker_image in task.toml"]
    return []


def _volumes(
    section: Mapping[str, object], key: str, declared: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[tuple[VolumeMount, ...], list[str]]:
    """Return the volumes of a service, and what is no volume: above all paths of the host, which no machine sees."""
    mounts, faults = [], []
    for volume in _list(section.get("volumes") or []):
        if _names_harbor(str(volume)):  # folders of logs, which machines have
            continue
        values = _long_volume(volume, environ)
        source, kind = values.get("source"), values.get("type", "volume")
        if strange := sorted(set(values) - {"type", "source", "target", "read_only"}):
            faults.append(f"{key}.volumes: {strange[0]} is not supported")
        elif kind == "bind" or (source is not None and not _VOLUME.fullmatch(str(source))):
            faults.append(f"{key}.volumes: {source} is a path of the host, which machines never see")
        elif kind != "volume":
            faults.append(f"{key}.volumes: type={kind}: machines have none")
        elif source is not None and source not in declared:
            faults.append(f"{key}.volumes: {source} is not declared in volumes")
        else:
            values = {"name": source, "path": values.get("target"), "read_only": values.get("read_only", False)}
            mounts.append(VolumeMount.model_validate(values))
    return tuple(mounts), faults


def _long_volume(volume: object, environ: Mapping[str, str]) -> Mapping[str, object]:
    """Return a volume as Compose's long form has it."""
    if isinstance(volume, Mapping):
        return {
            str(name): _expand(value, environ) if isinstance(value, str) else value for name, value in volume.items()
        }
    pieces = _expand(volume, environ).split(":")
    options = pieces.pop() if len(pieces) > 2 else "rw"
    if options not in ("ro", "rw") or len(pieces) > 2:
        raise ValueError(f"volumes: {volume!r} is no volume such as data:/data:ro")
    source = pieces[0] if len(pieces) == 2 else None
    return {"source": source, "target": pieces[-1], "read_only": options == "ro"}


def _names_harbor(text: str) -> bool:
    return any(name in _HARBOR_VARIABLES for match in _VARIABLE.finditer(text) for name in (match[2], match[4]))


def _expand(text: object, environ: Mapping[str, str]) -> str:
    """Return a text with variables of this machine; ``$$`` is a dollar."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = match[2] or match[4]
        if name == "TEST_DIR":
            return "/tests"
        expanded = environ.get(name, match[3])
        if expanded is None:
            raise ValueError(f"the environment variable {name} is not set on this machine, and has no default")
        return expanded

    return _VARIABLE.sub(value, str(text))


def _environment(section: object, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables from a mapping, or from a list of ``NAME=value``; a name alone is that of this machine."""
    if section is None:
        return {}
    pairs = (
        section.items() if isinstance(section, Mapping) else [str(item).partition("=")[::2] for item in _list(section)]
    )
    items = [(str(name), f"${{{name}}}" if value is None or value == "" else value) for name, value in pairs]
    return {name: _expand(value, {name: "", **environ}) for name, value in items}


def _list(section: object) -> list[object]:
    if not isinstance(section, list):
        raise ValueError(f"{section!r:.60} must be a list")
    return section


def _service(
    name: str,
    section: Mapping[str, object],
    context: Path,
    environ: Mapping[str, str],
    volumes: tuple[VolumeMount, ...],
) -> ServiceSpec:
    command, build, check = section.get("command"), section.get("build"), section.get("healthcheck")
    depends = section.get("depends_on") or ()
    limits = _limits(section)
    words = None
    if command is not None:
        words = (
            tuple(shlex.split(_expand(command, environ)))
            if isinstance(command, str)
            else tuple(_expand(word, environ) for word in _list(command))
        )
    return ServiceSpec(
        name=name,
        image=_expand(section["image"], environ) if "image" in section and build is None else None,
        build=None if build is None else _build(build, context, environ),
        command=words,
        env=_environment(section.get("environment"), environ),
        user=None if section.get("user") is None else _expand(section["user"], environ),
        depends_on=tuple(str(service) for service in depends if service != MAIN)
        if isinstance(depends, Iterable)
        else (),
        healthcheck=None if not isinstance(check, Mapping) or check.get("disable") else _healthcheck(check, environ),
        memory_mb=None if "memory" not in limits else max(1, _size(_expand(limits["memory"], environ)) // 2**20),
        cpus=None if "cpus" not in limits else float(_expand(limits["cpus"], environ)),
        volumes=volumes,
    )


def _limits(section: Mapping[str, object]) -> dict[str, object]:
    limits: dict[str, object] = {}
    deploy = section.get("deploy")
    if isinstance(deploy, Mapping):
        limits |= (deploy.get("resources") or {}).get("limits") or {}
    if "cpus" in section:
        limits["cpus"] = section["cpus"]
    if "mem_limit" in section:
        limits["memory"] = section["mem_limit"]
    return limits


def _build(build: object, context: Path, environ: Mapping[str, str]) -> BuildSpec:
    section: Mapping[str, object] = build if isinstance(build, Mapping) else {"context": build}
    if strange := set(section) - {"context", "dockerfile", "args"}:
        raise ValueError(f"build.{min(strange)} is not supported")
    folder = (context / _expand(section.get("context", "."), {"CONTEXT_DIR": str(context), **environ})).resolve()
    if not folder.is_relative_to(context.resolve()):
        raise ValueError(f"build.context={section.get('context')} leads out of {context}")
    return BuildSpec(
        context=folder,
        dockerfile=_expand(section.get("dockerfile", "Dockerfile"), environ),
        args=_environment(section.get("args"), environ),
    )


def _healthcheck(section: Mapping[str, object], environ: Mapping[str, str]) -> Healthcheck | None:
    test = section.get("test")
    if test in (None, ["NONE"]):
        return None
    words = [_expand(word, environ) for word in (test if isinstance(test, list) else ["CMD-SHELL", test])]
    command = shlex.join(words[1:]) if words[0] == "CMD" else " ".join(words[1:])
    times = {
        f"{key}_s": _time(section[key])
        for key in ("interval", "timeout", "start_period", "start_interval")
        if key in section
    }
    retries = section.get("retries", 3)
    return Healthcheck.model_validate({"command": command, "retries": retries, **times})


def _time(text: object) -> float:
    if isinstance(text, int | float):
        return float(text)
    matches = _TIME.findall(str(text))
    if not matches or "".join(number + unit for number, unit in matches) != str(text):
        raise ValueError(f"{text!r} is no time such as 1m30s")
    return sum(float(number) * _SECONDS[unit] for number, unit in matches)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _SIZES:
        raise ValueError(f"{text!r} is no size such as 512m")
    return int(float(match[1]) * _SIZES[match[2]])
