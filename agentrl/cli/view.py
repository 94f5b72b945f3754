"""``agentrl view``: a run's rollouts in the terminal or as one HTML page, or all runs under a folder on a local web page."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from agentrl.core.errors import UserError
from agentrl.core.types import StopReason
from agentrl.dashboard.token_decoder import load_decode
from agentrl.obs.console import make_console, print_error
from agentrl.obs.viewer.page import build_page, describe_run, run_metrics, write_page
from agentrl.obs.viewer.run_files import Filters, RunFiles, open_run, select
from agentrl.obs.viewer.terminal import legend, newest_rollouts, rollout_view, steps_table, tokens_table

MOST = 2000
"""Rollouts in a page without ``--max-rollouts``."""

LIMIT = 3
"""Rollouts in the terminal without ``--limit``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="the folder of a run, or a file of rollouts; with --serve of many runs",
    )
    parser.add_argument("--serve", action="store_true", help="serve a web page of all runs under RUN_DIR, live")
    parser.add_argument("--host", help="with --serve, address to listen on (127.0.0.1; others with AGENTRL_VIEW_TOKEN)")
    parser.add_argument("--port", type=int, help="with --serve, port to listen on (8642; 0: a free one)")
    parser.add_argument(
        "--html", nargs="?", type=Path, const=Path(), metavar="FILE", help="write one HTML page (RUN_DIR/view.html)"
    )
    parser.add_argument(
        "--max-rollouts", type=int, metavar="N", help=f"in the page at most, whole groups, evenly ({MOST}; 0: all)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help=f"in the terminal at most, the newest ({LIMIT})")
    parser.add_argument("--tokens", action="store_true", help="in the terminal, a table token by token")
    chosen = parser.add_argument_group("which rollouts")
    chosen.add_argument("--steps", "--step", type=_steps, metavar="N|N:M", help="of these steps, both ends included")
    chosen.add_argument("--reward-min", type=float, metavar="R", help="with at least this reward")
    chosen.add_argument("--reward-max", type=float, metavar="R", help="with at most this reward")
    reasons = [reason.value for reason in StopReason]
    chosen.add_argument("--stop-reason", choices=reasons, help="that ended so")
    chosen.add_argument("--failed", action="store_true", help="that failed or were dropped")
    chosen.add_argument("--group", metavar="PROMPT_ID", help="of one prompt")


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        return int(first), int(last if colon else first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no step such as 12 and no range such as 10:20") from None


def run(arguments: argparse.Namespace) -> None:
    """Print rollouts, write the page, or serve one."""
    if arguments.serve:
        _serve(arguments)
        return
    files = open_run(arguments.run_dir)
    filters = Filters(
        steps=arguments.steps,
        reward_min=arguments.reward_min,
        reward_max=arguments.reward_max,
        stop_reason=StopReason(arguments.stop_reason) if arguments.stop_reason else None,
        failed=arguments.failed,
        group=arguments.group,
    )
    _check(arguments)
    if arguments.html is None:
        _terminal(files, filters, arguments, make_console())
    else:
        _page(files, filters, arguments, make_console())


def _serve(arguments: argparse.Namespace) -> None:
    served = {"run_dir", "serve", "host", "port", "command", "run", "tokens", "failed"}
    unused = [name for name, value in vars(arguments).items() if name not in served and value is not None]
    unused += [name for name in ("tokens", "failed") if getattr(arguments, name)]
    if unused:
        raise UserError(f"--{unused[0].replace('_', '-')} is not for --serve: the page has its own filters")
    from agentrl.dashboard.server import HOST, PORT, serve_dashboard

    port = PORT if arguments.port is None else arguments.port
    serve_dashboard(arguments.run_dir, HOST if arguments.host is None else arguments.host, port)


def _check(arguments: argparse.Namespace) -> None:
    for option, value in (("--host", arguments.host), ("--port", arguments.port)):
        if value is not None:
            raise UserError(f"{option} is for --serve only")
    terminal_options = {"--limit": arguments.limit is not None, "--tokens": arguments.tokens}
    misplaced = [option for option, is_set in terminal_options.items() if is_set] if arguments.html is not None else []
    if arguments.html is None and arguments.max_rollouts is not None:
        misplaced = ["--max-rollouts"]
    if misplaced:
        raise UserError(f"{misplaced[0]} is for {'the terminal' if arguments.html is not None else '--html'} only")
    for option, value, minimum in (("--limit", arguments.limit, 1), ("--max-rollouts", arguments.max_rollouts, 0)):
        if value is not None and value < minimum:
            raise UserError(f"{option} {value}: at least {minimum} is needed")


def _terminal(files: RunFiles, filters: Filters, arguments: argparse.Namespace, console: Console) -> None:
    table, words = steps_table(files, filters)
    console.print(table)
    if words:
        console.print(words, style="dim")
    entries = list(newest_rollouts(files, filters, arguments.limit or LIMIT))
    if not entries:
        raise files.no_rollouts(filters)
    decode = load_decode(files)
    if isinstance(decode, str) and any(entry.rollout.rows for entry in entries):
        print_error(console, "The text of tokens is not known", decode, "yellow")
    draw: Callable[..., object] = tokens_table if arguments.tokens else rollout_view
    for entry in entries:
        console.print(draw(entry, decode))
    console.print(legend())


def _page(files: RunFiles, filters: Filters, arguments: argparse.Namespace, console: Console) -> None:
    default = files.folder.parent if files.folder.is_file() else files.folder
    out = arguments.html if arguments.html != Path() else default / "view.html"
    started = time.perf_counter()
    with console.status("reading rollouts"):
        selection = select(files, filters, MOST if arguments.max_rollouts is None else arguments.max_rollouts)
        page = build_page(
            selection.entries(files, filters),
            title=files.folder.resolve().name,
            decode=load_decode(files),
            about=describe_run(files),
            metrics=run_metrics(files),
            notes=selection.notes,
        )
        try:
            write_page(out, page)
        except OSError as error:
            raise UserError(f"--html {out} cannot be written: {error.strerror or error}") from error
    for note in selection.notes:
        console.print(note, style="yellow")
    size = len(page.html) / 2**20
    console.print(
        f"{page.rollouts:,} rollouts, {page.tokens:,} tokens, {size:.1f} MiB in {time.perf_counter() - started:.1f} s: {out}",
        highlight=False,
        soft_wrap=True,
    )
