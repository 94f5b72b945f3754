"""Reading of files that may be damaged: one kind of error, which names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

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
"""What decoders raise on data that is not theirs."""


@contextmanager
def reading(place: Path | str, what: str, error: type[AgentrlError] = ConfigError) -> Iterator[None]:
    """Turn what the body raises while it reads ``place``, a file or a part of it, into an ``error`` of one line.

    Args:
        place: named by the message.
        what: it should be, such as ``rollout of agentrl``.
        error: the class of the error.

    Raises:
        AgentrlError: of that class; one that the body raises goes on as it is.

    """
    try:
        yield
    except AgentrlError:
        raise
    except OSError as fault:
        raise error(f"{place} cannot be read: {one_line(fault.strerror or fault)}") from fault
    except DECODE_ERRORS as fault:
        raise error(f"{place} is not a {what}, or is damaged: {type(fault).__name__}: {one_line(fault)}") from fault


def one_line(text: object) -> str:
    """Return a message of several lines as one of at most 300 characters."""
    return " ".join(str(text).split())[:300]
