"""What a template knows of a run, and the text that it becomes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath

import jinja2

from agentrl.algo.registry import needs_critic
from agentrl.cluster.placement_layout import lay_out
from agentrl.config.engine_checks import check_placement
from agentrl.config.engine_groups import evaluation_group, training_gpus
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError

MACHINE_GPUS = 8
"""GPUs of a machine, if nothing says how many."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
_SETTING = re.compile(r"\bsettings\.(\w+)")


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """A run for a cluster. Each field is a name in templates."""

    name: str
    """Name of the job: small letters, digits and dashes, as Kubernetes allows them."""
    nodes: int
    """Machines."""
    gpus: int
    """GPUs of each machine; 0: none are requested."""
    cwd: str
    """The folder in which the command runs, where machines share files."""
    programs: str
    """The folder of agentrl's command, where machines share files."""
    run_dir: str
    """Folder of the run; a job that starts again resumes it."""
    log_dir: str
    """Folder of the job's own logs, next to that of the run."""
    train: tuple[str, ...]
    """Words of the command that starts the run."""
    resume: tuple[str, ...]
    """Words of the command that resumes it."""
    token: str
    """A random text, with which Ray's processes know each other."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of configuration files by their name in the folder ``/etc/agentrl``, where machines do not share files."""
    hosts: tuple[str, ...] = ()
    """Machines by name, of ``agentrl launch ssh``; the first is the head."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values of ``--set``, such as Slurm's partition."""


def check_name(name: str) -> str:
    """Return the name of a job.

    Raises:
        ConfigError: Kubernetes would refuse it.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name}: a job's name has small letters, digits and dashes, at most 42, and a letter first"
        )
    return name


def run_gpus(config: Config) -> int:
    """Return how many GPUs a run uses on machines that have some; 0 if it is for a CPU.

    Raises:
        ConfigError: the placement does not fit.
    """
    if config.learner.device == "cpu":
        return 0
    if config.placement.mode != "separate":
        check_placement(config, "cuda")
        return lay_out(config, "cuda").total.get("GPU", 0)
    ranks = config.learner.ranks * (2 if needs_critic(config.algo) else 1)
    group = evaluation_group(config.sampler)
    evaluation = 0 if group is None else group[1].engines * group[1].engine_ranks
    return ranks + evaluation + (0 if config.sampler.urls else training_gpus(config.sampler))


def machine_counts(config: Config, nodes: int | None, gpus: int | None) -> tuple[int, int]:
    """Return how many machines a job requests, and GPUs of each.

    Args:
        config: of the run.
        nodes: as many machines; None: as many as its GPUs are on.
        gpus: GPUs of a machine; None: up to `MACHINE_GPUS`, as many as the run uses.

    Raises:
        ConfigError: the run needs more, or more machines than it can use, or there would be none.
    """
    for option, count, least in (("--nodes", nodes, 1), ("--gpus", gpus, 0)):
        if count is not None and count < least:
            raise ConfigError(f"{option} {count}: at least {least} is needed")
    total, separate = run_gpus(config), config.placement.mode == "separate"
    if gpus is None:
        gpus = min(MACHINE_GPUS, -(-total // nodes) if nodes else total)
    if nodes is None:
        nodes = 1 if separate or not gpus else max(1, -(-total // gpus))
    if separate and nodes > 1:
        raise ConfigError(
            f"--nodes {nodes}: placement.mode=separate is for one machine; set placement.mode=disaggregate or colocate"
        )
    if not separate and nodes * gpus < total:
        raise ConfigError(f"--nodes {nodes} --gpus {gpus} are {nodes * gpus} GPUs, and the run uses {total}")
    return nodes, gpus


def log_dir(run_dir: str) -> str:
    """Return the folder of a job's own logs."""
    path = PurePosixPath(run_dir)
    return str(path.with_name(f"{path.name}-job"))


def render(template: str, job: LaunchJob) -> str:
    """Return a template's text for a job.

    In templates ``value | quote`` is a word of a shell, ``words | command`` a command of it, and ``value | yaml`` a value of
    YAML.

    Raises:
        ConfigError: the template has a mistake, or has no setting of a given name.
    """
    known = set(_SETTING.findall(template))
    for name in job.settings:
        if name not in known:
            raise ConfigError(
                f"--set {name}: the template has no such setting; it has {', '.join(sorted(known)) or 'none'}"
            )
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quote": _quote, "command": _command, "yaml": json.dumps}
    values = {name.name: getattr(job, name.name) for name in fields(job)}
    values["settings"] = dict.fromkeys(known, "") | dict(job.settings)
    try:
        return environment.from_string(template).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the template has a mistake in line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"the template has a mistake: {error}") from error


def _quote(value: object) -> str:
    return shlex.quote(str(value))


def _command(words: Sequence[str]) -> str:
    return shlex.join(words)
