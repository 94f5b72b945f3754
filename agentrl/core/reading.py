"""Reading of files that may be damaged: one kind of error, which names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import orjson
from yaml import YAMLError

from agentrl.core.errors import AgentrlError, ConfigError

DECODE_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    MemoryError,
    UnpicklingError,
    YAMLError,
)
"""Exceptions of decoders on data in another format."""


@contextmanager
def reading(location: Path | str, kind: str, error: type[AgentrlError] = ConfigError) -> Iterator[None]:
    """Turn what the body raises while it reads ``location``, a file or a part of it, into an ``error`` of one line.

    Args:
        location: for the message.
        kind: what the file should be, such as ``rollout of agentrl``.
        error: the class of the error.

    Raises:
        AgentrlError: of that class. An AgentrlError of the body is raised unchanged.
    """
    try:
        yield
    except AgentrlError:
        raise
    except OSError as fault:
        raise error(f"{location} cannot be read: {flatten_message(fault.strerror or fault)}") from fault
    except DECODE_ERRORS as fault:
        raise error(
            f"{location} is not a {kind}, or is damaged: {type(fault).__name__}: {flatten_message(fault)}"
        ) from fault


def decode_step_row(line: bytes, location: str) -> tuple[int, dict[str, object]]:
    """Return step and JSON object of a line that a run has written for a step, or an evaluation after it.

    Args:
        line: without its end.
        location: for the message.

    Raises:
        ConfigError: it is none, or has no number of a step: an integer from 0.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{location} is damaged: it is no JSON: {flatten_message(error)}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{location} is damaged: it is no JSON object")
    if "step" not in row:
        raise ConfigError(f"{location} is damaged: it has no step")
    step = row["step"]
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ConfigError(f"{location} is damaged: its step is {flatten_message(repr(step))}, and no integer from 0")
    return step, row


def flatten_message(text: object) -> str:
    """Return a message of several lines as one of at most 300 characters."""
    return " ".join(str(text).split())[:300]
