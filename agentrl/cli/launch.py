"""``agentrl launch``."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.cli.options import add_config_arguments, config_layers
from agentrl.config.layers import Layer, merge_layers
from agentrl.config.load import find_config, shipped_name
from agentrl.core.errors import ConfigError
from agentrl.launch.launcher import LAUNCHERS, Launcher
from agentrl.obs.console import make_console, print_message

_FILES = "/etc/agentrl"
"""Where configuration files are on machines that do not share this one's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("cluster", choices=LAUNCHERS, help="what starts the run")
    parser.add_argument("file", nargs="?", metavar="CONFIG", help="as --config")
    parser.add_argument("--name", help="the job's name; by default that of run.dir, or of the configuration")
    parser.add_argument("--nodes", type=int, help="machines; by default as many as the run's GPUs are on")
    parser.add_argument("--gpus", type=int, help="GPUs of each machine; by default up to 8, as many as the run uses")
    parser.add_argument("--hosts", type=Path, help="of ssh: a file with a machine a line, the head first")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the template; may be repeated"
    )
    parser.add_argument(
        "--template", type=Path, help="your own template; --print-template prints the one to start from"
    )
    parser.add_argument("--print-template", action="store_true", help="print the template, and stop")
    parser.add_argument("--out", type=Path, help="the file that is written; by default the job's name in this folder")
    parser.add_argument("--dry-run", action="store_true", help="write the file, and submit nothing")
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the file of a job, and submit it."""
    from agentrl.api.settings import load_environment
    from agentrl.launch.job import LaunchJob, check_name, log_dir, machine_counts, render
    from agentrl.launch.launcher import submit, template_text

    launcher, console = LAUNCHERS[arguments.cluster], make_console()
    template = template_text(launcher, arguments.template)
    if arguments.print_template:
        sys.stdout.write(template)
        return
    if arguments.file is not None and "=" in arguments.file:  # there is no CONFIG
        arguments.overrides = [arguments.file, *arguments.overrides]
    elif arguments.file is not None:
        arguments.config = [arguments.file, *arguments.config]
    config = load_environment(_cluster_layers(arguments))
    name = check_name(arguments.name or _default_name(config.run.dir, arguments))
    hosts = _hosts(arguments)
    nodes, gpus = machine_counts(config, len(hosts) if hosts else arguments.nodes, arguments.gpus)
    cwd, run_dir = os.getcwd(), str(config.run.dir or launcher.run_dir.format(cwd=Path.cwd(), name=name))
    if launcher.shares_files:
        run_dir = str(Path(run_dir).resolve())
    elif not os.path.isabs(run_dir):
        raise ConfigError(
            f"run.dir={run_dir}: machines of {arguments.cluster} need a whole path, on storage that stays"
        )
    words, files = _train_words(arguments, launcher)
    job = LaunchJob(
        name=name,
        nodes=nodes,
        gpus=gpus,
        cwd=cwd,
        programs=str(Path(sys.executable).parent),
        run_dir=run_dir,
        log_dir=log_dir(run_dir),
        train=("agentrl", "train", *words, f"run.dir={run_dir}"),
        resume=("agentrl", "train", "--resume", f"run.dir={run_dir}"),
        token=secrets.token_hex(32),
        files=files,
        hosts=hosts,
        settings=_settings(arguments.set),
    )
    text = render(template, job)
    file = arguments.out or Path(f"{name}{launcher.suffix}")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file} cannot be written: {error.strerror}") from error
    gpu_text = f"{gpus} GPU{'s' if gpus != 1 else ''} each" if nodes > 1 else f"{gpus} GPU{'s' if gpus != 1 else ''}"
    print_message(console, f"wrote {file}: {nodes} machine{'s' if nodes > 1 else ''}, {gpu_text}, run.dir={run_dir}")
    if arguments.dry_run:
        print_message(console, f"submit it by {' '.join(launcher.submit)} {file}")
        return
    if launcher.shares_files:
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)  # Slurm fails a job whose folder of logs is missing
    print_message(console, submit(launcher, file))


def _cluster_layers(arguments: argparse.Namespace) -> list[Layer]:
    """Return the layers of the command line with the defaults of machines with GPUs, unless the run is for a CPU."""
    hardware, *layers = config_layers(arguments)
    learner = merge_layers(layers).get("learner")
    if arguments.gpus == 0 or (isinstance(learner, dict) and learner.get("device") == "cpu"):
        return [hardware, *layers]
    return [Layer("default of machines with GPUs", {"sampler": {"backend": "sglang"}}), *layers]


def _default_name(run_dir: Path | None, arguments: argparse.Namespace) -> str:
    source = run_dir.name if run_dir is not None else (arguments.config or [arguments.env or "agentrl"])[-1]
    name = re.sub(r"[^a-z0-9]+", "-", str(source).removesuffix(".yaml").lower()).strip("-")
    return name[:40].rstrip("-") if name[:1].isalpha() else f"run-{name}"[:40].rstrip("-")


def _hosts(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the machines of the file of ``--hosts``."""
    if arguments.hosts is None:
        if arguments.cluster == "ssh":
            raise ConfigError("agentrl launch ssh needs --hosts FILE, with a machine a line, such as user@node1")
        return ()
    if arguments.cluster != "ssh":
        raise ConfigError(
            f"--hosts {arguments.hosts} is for agentrl launch ssh; {arguments.cluster} chooses the machines"
        )
    try:
        lines = [line.partition("#")[0].strip() for line in arguments.hosts.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"--hosts {arguments.hosts} cannot be read: {error}") from error
    hosts = tuple(filter(None, lines))
    if not hosts:
        raise ConfigError(f"--hosts {arguments.hosts} names no machine")
    return hosts


def _train_words(arguments: argparse.Namespace, launcher: Launcher) -> tuple[list[str], dict[str, str]]:
    """Return the words after ``agentrl train``, and the text of the files that they name on other machines."""
    words, files = ["--env", arguments.env] if arguments.env else [], {}
    for index, name in enumerate(arguments.config):
        path = find_config(name)
        if shipped_name(path):
            words += ["--config", name]
        elif launcher.shares_files:
            words += ["--config", str(path.resolve())]
        else:
            inside = f"{index}-{path.name}"
            files[inside] = path.read_text(encoding="utf-8")
            words += ["--config", f"{_FILES}/{inside}"]
    settings = [override for override in arguments.overrides if not override.startswith("run.dir=")]
    return [*words, *settings], files


def _settings(words: Sequence[str]) -> dict[str, str]:
    """Return the settings of ``--set``."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--set {word}: settings of a template are NAME=VALUE, such as partition=gpu")
        settings[name] = value
    return settings
