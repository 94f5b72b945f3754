"""Tasks of other formats as folders in Harbor's: terminal-bench's older folders, and rows as SWE-bench has them."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import yaml

from agentrl.containers.task_folder import load_task_folder
from agentrl.core.errors import ConfigError
from agentrl.core.reading import reading

TASK_YAML = "task.yaml"
_OWN_FILES = (TASK_YAML, "docker-compose.yaml", "solution.sh", "run-tests.sh", "tests")
_LOGS = "T_BENCH_"
"""Begin of the variables with which terminal-bench mounts its logs."""
_MAIN_KEYS = ("depends_on",)
_RUN_TESTS = """\
#!/bin/bash
# The exit code of terminal-bench's script is the reward.
export TEST_DIR=/tests
mkdir -p /logs/verifier
if bash /tests/run-tests.sh; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
REPOSITORY = "/testbed"
"""Where images of SWE-bench have the repository."""
_DIFF = "/logs/artifacts/agent.diff"
_PYTEST = "python -m pytest -rA --tb=no -p no:cacheprovider"
_SWE_TEST = """\
#!/bin/bash
# The agent's changes have come as a diff. Files of tests are those of the repository and of test.patch.
reward() {{ mkdir -p /logs/verifier; echo "$1" > /logs/verifier/reward.txt; exit 0; }}
cd {repository} || exit 1
if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi
git config --global --add safe.directory {repository}
if [ -s {diff} ]; then git apply --whitespace=nowarn {diff} || reward 0; fi
{restore}git apply --whitespace=nowarn /tests/test.patch || exit 1
{command} > /tmp/test-output.txt 2>&1
if python /tests/check.py /tmp/test-output.txt; then reward 1; else reward 0; fi
"""
_SWE_CHECK = '''\
"""Exits with 0 if all tests of tests.json passed, by the summary of pytest."""

import json
import sys

with open("/tests/tests.json") as file:
    needed = set(json.load(file))
passed = set()
with open(sys.argv[1], errors="replace") as file:
    for line in file:
        status, _, name = line.strip().partition(" ")
        if status in ("PASSED", "XFAIL"):
            passed.add(name.split(" - ")[0])
sys.exit(0 if needed <= passed else 1)
'''


def is_terminal_bench(path: Path) -> bool:
    """Return whether a folder is a task of terminal-bench's older format."""
    return (path / TASK_YAML).is_file()


def convert_terminal_bench(source: Path, target: Path) -> None:
    """Write a task of terminal-bench (``task.yaml``, ``docker-compose.yaml``, ``run-tests.sh``) as a folder in Harbor's format.

    The tests run in the agent's container, as they did: they look at programs and services there.

    Raises:
        ConfigError: a file is missing or cannot be converted, or ``target`` is there already.
    """
    _write(target, lambda folder: _write_terminal_bench(source, folder))


def convert_swe_row(row: Mapping[str, object], location: str, target: Path) -> None:
    """Write a row of SWE-bench's columns as a folder in Harbor's format, whose tests run in another container.

    Columns: ``instance_id``, ``problem_statement``, ``repo``, ``base_commit``, ``patch``, ``test_patch``, ``FAIL_TO_PASS``,
    ``PASS_TO_PASS``; and ``image`` (by default that of SWE-bench), ``test_command`` (by default pytest on the tests' files).

    Raises:
        ConfigError: a column is missing or cannot be used; the message begins with ``location``. Or ``target`` is there already.
    """
    _write(target, lambda folder: _write_swe_row(row, location, folder))


def _write(target: Path, write: Callable[[Path], None]) -> None:
    """Write a folder in a temporary place, check it, and move it to ``target``."""
    if target.exists():
        raise ConfigError(f"{target} is there already; name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        write(folder)
        load_task_folder(folder)
        folder.rename(target)


def _write_terminal_bench(source: Path, folder: Path) -> None:
    with reading(source / TASK_YAML, "YAML file"):
        task = yaml.safe_load((source / TASK_YAML).read_text())
    if not isinstance(task, Mapping) or not str(task.get("instruction") or "").strip():
        raise ConfigError(f"{source / TASK_YAML}: instruction is missing")
    if (source / "solution.yaml").exists():
        raise ConfigError(
            f"{source / 'solution.yaml'}: keys that are typed cannot be converted; write them as solution.sh"
        )
    if not (source / "run-tests.sh").is_file():
        raise ConfigError(f"{source / 'run-tests.sh'}: there is no such file")
    (folder / "instruction.md").write_text(f"{task['instruction'].strip()}\n")
    shutil.copytree(source / "tests", folder / "tests") if (source / "tests").is_dir() else (folder / "tests").mkdir()
    shutil.copy(source / "run-tests.sh", folder / "tests" / "run-tests.sh")
    _write_script(folder / "tests" / "test.sh", _RUN_TESTS)
    if (source / "solution.sh").is_file():
        (folder / "solution").mkdir()
        _write_script(folder / "solution" / "solve.sh", (source / "solution.sh").read_text())
    environment = _write_environment(source, folder)
    metadata = {
        key: value
        for key, value in task.items()
        if isinstance(value, bool | int | float | str) and key != "instruction"
    }
    tags = [str(tag) for tag in task.get("tags") or ()]
    tables: dict[str, Mapping[str, object]] = {
        "metadata": {**metadata, "tags": tags},
        "agent": {"timeout_sec": float(task.get("max_agent_timeout_sec", 360))},
        "verifier": {"timeout_sec": float(task.get("max_test_timeout_sec", 60)), "environment_mode": "shared"},
        "environment": environment,
    }
    (folder / "task.toml").write_text(_toml(tables))


def _write_environment(source: Path, folder: Path) -> dict[str, object]:
    """Write ``environment/``, and return the table of ``task.toml``."""
    path = source / "docker-compose.yaml"
    with reading(path, "YAML file"):
        tree = yaml.safe_load(path.read_text())
    services = tree.get("services") if isinstance(tree, Mapping) else None
    if not isinstance(services, Mapping) or not services:
        raise ConfigError(f"{path}: services must be a mapping")
    name = "client" if "client" in services else next(iter(services))
    main = services[name]
    build = main.get("build")
    section = build if isinstance(build, Mapping) else {"context": build or "."}
    context = (source / str(section.get("context", "."))).resolve()
    if not context.is_relative_to(source.resolve()) or not context.is_dir():
        raise ConfigError(f"{path}: services.{name}.build.context={section.get('context')} is no folder of the task")
    target = folder / "environment"
    left_out = shutil.ignore_patterns(*_OWN_FILES) if context == source.resolve() else None
    shutil.copytree(context, target, ignore=left_out)
    dockerfile = target / str(section.get("dockerfile", "Dockerfile"))
    environment: dict[str, object] = {}
    if build is None and "image" in main:
        environment["docker_image"] = str(main["image"])
    elif not dockerfile.is_file():
        raise ConfigError(f"{context / dockerfile.name}: there is no such file ({path}: services.{name}.build)")
    elif dockerfile.name != "Dockerfile":
        dockerfile.rename(target / "Dockerfile")
    if "working_dir" in main and "$" not in str(main["working_dir"]):
        environment["workdir"] = str(main["working_dir"])
    if variables := _variables(main.get("environment")):
        environment["env"] = variables
    side_services = {service: _without_logs(values) for service, values in services.items() if service != name}
    if side_services:
        for service, values in side_services.items():
            _copy_context(source, target, service, values)
        main_section = {key: main[key] for key in _MAIN_KEYS if key in main}
        compose = {
            "services": {"main": main_section, **side_services},
            **{key: tree[key] for key in tree if key not in ("services", "version")},
        }
        (target / "docker-compose.yaml").write_text(yaml.safe_dump(compose, sort_keys=False))
    return environment


def _copy_context(source: Path, target: Path, service: str, values: Mapping[str, object]) -> None:
    """Copy what another service is built from."""
    build = values.get("build")
    context = str(build.get("context", ".") if isinstance(build, Mapping) else build or ".")
    folder = (source / context).resolve()
    if not folder.is_relative_to(source.resolve()):
        raise ConfigError(
            f"{source / 'docker-compose.yaml'}: services.{service}.build.context={context} leads out of the task"
        )
    if folder != source.resolve() and folder.is_dir():
        shutil.copytree(folder, target / context, dirs_exist_ok=True)


def _variables(section: object) -> dict[str, str]:
    if isinstance(section, Mapping):
        pairs = {str(name): str(value) for name, value in section.items()}
    else:
        pairs = dict(str(item).partition("=")[::2] for item in section) if isinstance(section, list) else {}
    return {name: value for name, value in pairs.items() if _LOGS not in value and name != "TEST_DIR"}


def _without_logs(values: Mapping[str, object]) -> dict[str, object]:
    """Return a service without the mounts of terminal-bench's logs, and without its own names."""
    section = {key: value for key, value in values.items() if key not in ("container_name", "volumes")}
    volumes = values.get("volumes")
    task_volumes = [volume for volume in volumes if _LOGS not in str(volume)] if isinstance(volumes, list) else []
    return {**section, "volumes": task_volumes} if task_volumes else section


def _write_swe_row(row: Mapping[str, object], location: str, folder: Path) -> None:
    def refuse(column: str, fault: str) -> NoReturn:
        raise ConfigError(f"{location}: {column!r} {fault}")

    def text(column: str) -> str:
        value = row.get(column)
        if not isinstance(value, str) or not value.strip():
            refuse(column, "is missing or no text")
        return value

    def names(column: str) -> list[str]:
        value = row.get(column)
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            value = None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            refuse(column, "must be a list of tests, also as JSON text")
        return value

    identity, commit, test_patch = text("instance_id"), text("base_commit"), text("test_patch")
    if not re.fullmatch(r"[0-9a-fA-F]{4,64}", commit):
        refuse("base_commit", f"is {commit!r:.80}, and no commit")
    tests = [*names("FAIL_TO_PASS"), *names("PASS_TO_PASS")]
    command = row.get("test_command")
    if command is None:
        if not all("::" in name for name in tests) or not tests:
            refuse("FAIL_TO_PASS", "has tests that are not pytest's, and there is no column 'test_command'")
        files = dict.fromkeys(name.partition("::")[0] for name in tests)
        command = " ".join([_PYTEST, *map(_quote, files)])
    elif not isinstance(command, str):
        refuse("test_command", "must be a shell command")
    image = row.get("image") or f"swebench/sweb.eval.x86_64.{identity.lower().replace('__', '_1776_')}:latest"
    changed = re.findall(r"^--- a/(.+)$", test_patch, re.MULTILINE)
    added = re.findall(r"^--- /dev/null\n\+\+\+ b/(.+)$", test_patch, re.MULTILINE)
    restore = f"git checkout --quiet {commit} -- {' '.join(map(_quote, changed))} || exit 1\n" if changed else ""
    restore += f"rm -rf -- {' '.join(map(_quote, added))}\n" if added else ""
    (folder / "tests").mkdir()
    (folder / "instruction.md").write_text(f"{text('problem_statement').strip()}\n")
    script = _SWE_TEST.format(repository=REPOSITORY, diff=_DIFF, restore=restore, command=command)
    _write_script(folder / "tests" / "test.sh", script)
    (folder / "tests" / "check.py").write_text(_SWE_CHECK)
    (folder / "tests" / "test.patch").write_text(_with_newline(test_patch))
    (folder / "tests" / "tests.json").write_text(json.dumps(tests, indent=1) + "\n")
    if row.get("patch"):
        (folder / "solution").mkdir()
        apply = f"#!/bin/bash\nset -e\ncd {REPOSITORY}\ngit apply --whitespace=nowarn /solution/solution.patch\n"
        _write_script(folder / "solution" / "solve.sh", apply)
        (folder / "solution" / "solution.patch").write_text(_with_newline(text("patch")))
    collect = (
        f"mkdir -p /logs/artifacts && cd {REPOSITORY} && git add -A && git diff --cached --binary {commit} > {_DIFF}"
    )
    tables: dict[str, Mapping[str, object]] = {
        "metadata": {"repo": text("repo"), "base_commit": commit, "instance_id": identity},
        "agent": {"timeout_sec": 3000.0},
        "verifier": {"timeout_sec": 1800.0, "environment_mode": "separate"},
        "environment": {"docker_image": str(image), "workdir": REPOSITORY, "memory_mb": 8192},
    }
    hook = f"\n[[verifier.collect]]\ncommand = {json.dumps(collect)}\ntimeout_sec = 120.0\n"
    (folder / "task.toml").write_text(_toml(tables) + hook)


def _with_newline(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    lines = ['schema_version = "1.4"']
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items())]
    return "\n".join([*lines, ""])


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(key))} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)
