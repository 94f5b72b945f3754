"""``agentrl gateway``."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import suppress
from pathlib import Path

from agentrl.api.settings import hardware_layer
from agentrl.cli.options import COMMAND_LINE, add_plain_config_arguments, check_one_model, command_line_layers
from agentrl.config.layers import Layer, load_layers, merge_layers
from agentrl.config.merging import Tree
from agentrl.config.schema import Config
from agentrl.core.child_process import LOOPBACK
from agentrl.obs.console import make_console

EMBEDDED_CONTEXT = 4096
"""Most tokens of a conversation with the embedded engine, unless ``sampler.embedded.context`` is set."""
ENGINE_CONTEXT = 32_768
"""Most tokens of a conversation with another engine, unless ``rollout.max_tokens`` is set."""
PORT = 8100
RESERVE = 8
"""Tokens of an engine's context that are left to it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--model", required=True, help="a run's folder, a checkpoint, a model folder, or a model's name"
    )
    parser.add_argument(
        "--host", help=f"address to listen on, {LOOPBACK} by default; others than the loopback want a token"
    )
    parser.add_argument("--port", type=int, help=f"port to listen on, {PORT} by default; 0 takes a free one")
    parser.add_argument(
        "--out", type=Path, help="write the sessions to this .jsonl or .parquet, which agentrl view reads"
    )
    add_plain_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Serve a policy to agents until Ctrl-C."""
    from agentrl.evaluation.serve_policy import check_gateway, serve_policy

    config = gateway_config(arguments)
    check_gateway(config, arguments.out)
    asyncio.run(serve_policy(config, arguments.out, make_console()))


def gateway_config(arguments: argparse.Namespace) -> Config:
    """Return the configuration: limits that do not get in the way, and those of the command line on top.

    Raises:
        UserError: the model does not exist, or a setting does not fit.
    """
    from agentrl.evaluation.checkpoint_model import checkpoint_model
    from agentrl.models.load import read_max_positions
    from agentrl.models.resolve import resolve_model

    check_one_model(arguments, f"--model {arguments.model}")
    path = checkpoint_model(arguments.model, "--model")
    layers = [hardware_layer(), *command_line_layers(arguments)]
    positions = read_max_positions(resolve_model(path, "--model")) or ENGINE_CONTEXT
    tokens = ENGINE_CONTEXT
    with suppress(AttributeError, TypeError, ValueError):  # a value of another type, which load_layers refuses
        tokens = _context(merge_layers(layers), positions)
    address = {"host": arguments.host, "port": arguments.port}
    agent = {"reward": "session", **{key: value for key, value in address.items() if value is not None}}
    limits: Tree = {
        "rollout": {
            "max_turns": 100_000,
            "max_tokens": tokens,
            "max_seconds": 1e8,
            "concurrency": 64,
            "runners": 0,
            "agent": {"host": LOOPBACK, "port": PORT},
            "failure": {"sampler": "drop", "agent": "drop", "task": "drop"},
        },
        "sampler": {"max_new_tokens": max(1, tokens // 2), "embedded": {"context": tokens, "slots": 4}},
        "env": {"name": "single_turn"},
    }
    fixed: Tree = {"model": {"path": path}, "rollout": {"agent": agent}}
    return load_layers([Layer("default of agentrl gateway", limits), *layers, Layer(COMMAND_LINE, fixed)])


def _context(tree: Tree, positions: int) -> int:
    """Return the most tokens of a conversation that model and engine take."""
    sampler = tree.get("sampler", {})
    if sampler.get("url") is None and sampler.get("backend") == "embedded":
        return min(positions, int(sampler.get("embedded", {}).get("context", EMBEDDED_CONTEXT)))
    length = int(sampler.get("sglang", {}).get("context_length", positions))
    return max(1, min(length, ENGINE_CONTEXT) - RESERVE)
