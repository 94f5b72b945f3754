"""``agentrl eval``."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from rich.console import Console

from agentrl.api.evaluating import check_own_engine, checkpoint_layers
from agentrl.api.settings import load_environment
from agentrl.cli.options import add_config_arguments, check_one_model, command_line_layers, resolve_config
from agentrl.config.schema import Config
from agentrl.core.atomic_files import write_atomically
from agentrl.core.errors import ConfigError
from agentrl.obs.console import make_console

_OPENAI = "https://api.openai.com/"
"""The address to which a key in ``OPENAI_API_KEY`` is sent: it is for no other."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_policy_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all metrics to this file too")
    parser.add_argument("--rollouts", type=Path, metavar="FILE", help="write the samples to this .jsonl or .parquet")
    parser.add_argument(
        "--resume", action="store_true",
        help="play only the episodes that the file of --rollouts lacks, after an evaluation that was interrupted or killed",
    )  # fmt: skip


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a configuration, ``--checkpoint``, and those of a model at an endpoint; see `policy_config`."""
    add_config_arguments(parser)
    parser.add_argument(
        "--checkpoint",
        help="a run's folder, a checkpoint, or a model folder; default model.path. "
        "Without --env and --config the configuration is that of the run",
    )
    parser.add_argument(
        "--url",
        help="in place of a policy: a model that others serve with OpenAI's chat completions, the address up to /v1",
    )
    parser.add_argument("--model", metavar="NAME", help="name of the model at --url")
    parser.add_argument(
        "--api-key-env", metavar="VARIABLE",
        help="environment variable with the key of --url; default OPENAI_API_KEY for https://api.openai.com",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Evaluate a policy and print its metrics."""
    from agentrl.evaluation.evaluate import flat_metrics, report
    from agentrl.evaluation.evaluate_policy import evaluate_policy
    from agentrl.evaluation.table import failure_lines, results_table

    console = make_console()
    config = policy_config(arguments, console)
    _check_files(arguments)
    results, metrics = asyncio.run(evaluate_policy(config, console, arguments.rollouts, resume=arguments.resume))
    console.print(results_table(results, f"{config.label}: {config.model.label}"))
    for line in failure_lines(results):
        console.print(line, highlight=False, soft_wrap=True)
    if metrics:
        console.print("  ".join(f"{key.removeprefix('eval/')} {_figure(value)}" for key, value in metrics.items()))
    if arguments.json:
        content = {
            "env": config.label,
            "model": config.model.label,
            **flat_metrics(results),
            **metrics,
            "sets": report(results),
        }
        with write_atomically(arguments.json.resolve()) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for path in (arguments.json, arguments.rollouts):
        if path is not None:
            console.print(f"written {path}", soft_wrap=True)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else f"{value:.3f}"


def policy_config(arguments: argparse.Namespace, console: Console) -> Config:
    """Return the configuration of the command line, with the checkpoint or the model at an endpoint as the policy."""
    url, name, variable = arguments.url, arguments.model, arguments.api_key_env
    if url is None:
        for option, value in (("--model", name), ("--api-key-env", variable)):
            if value is not None:
                raise ConfigError(
                    f"{option} {value} without --url: it is of a model that others serve. A model of yours is model.path=…, or "
                    "--checkpoint"
                )
        return checkpoint_config(arguments, console)
    if arguments.checkpoint:
        raise ConfigError(f"--url {url} with --checkpoint {arguments.checkpoint}: two policies; leave out one")
    if name is None:
        raise ConfigError(
            f"--url {url} without --model NAME: a server may have several models; {url}/models lists them"
        )
    if variable is None and url.startswith(_OPENAI):
        variable = "OPENAI_API_KEY"
    endpoint = {"url": url, "model": name} | ({} if variable is None else {"api_key_env": variable})
    return resolve_config(arguments, {"model": {"endpoint": endpoint}})


def checkpoint_config(arguments: argparse.Namespace, console: Console) -> Config:
    """Return the configuration of the command line, with ``--checkpoint`` that of the run, and the checkpoint as model."""
    if not arguments.checkpoint:
        return resolve_config(arguments)
    check_one_model(arguments, f"--checkpoint {arguments.checkpoint}")
    use_run = not (arguments.env or arguments.config)
    run_config, layers = checkpoint_layers(arguments.checkpoint, use_run=use_run)
    if run_config is None:
        config = resolve_config(arguments, layers[-1].tree)
    else:
        config = load_environment([*layers, *command_line_layers(arguments)])
        console.print(f"configuration {run_config}", soft_wrap=True)
    check_own_engine(config)
    return config


def _check_files(arguments: argparse.Namespace) -> None:
    from agentrl.evaluation.saved_samples import keys_path

    samples: Path | None = arguments.rollouts
    if arguments.resume and samples is None:
        raise ConfigError("--resume without --rollouts FILE: the file has the episodes that were finished")
    if samples is not None and samples.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--rollouts {samples}: the format follows from the name; end it in .jsonl or .parquet")
    for path in (arguments.json, samples):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}")
        if path is not None and path.exists() and not path.is_file():
            raise ConfigError(f"{path} is a folder or a device; name a file")
    if samples is not None and not keys_path(samples).exists():
        for path in (samples, samples.with_suffix(".jsonl")):  # the lines that a parquet file is made of
            if path.exists() and path.stat().st_size:
                raise ConfigError(f"--rollouts {samples}: {path} exists and is of no evaluation; name another file")
