"""The error of all contract checks, and helpers that they share."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from agentrl.core.errors import AgentrlError, UserError
from agentrl.core.imports import describe
from agentrl.core.types import Info

T = TypeVar("T")


class ContractError(UserError, AssertionError):
    """A plugin violates a contract; the message has what it does and what it should."""


def require(holds: bool, message: str, cause: BaseException | None = None) -> None:
    """Raise `ContractError` unless ``holds``."""
    if not holds:
        raise ContractError(message) from cause


def call_author_code(description: str, method: Callable[[], T], hint: str = "") -> T:
    """Call a method of the plugin and return its result; an exception is a violation of the contract."""
    try:
        return method()
    except AgentrlError:
        raise
    except Exception as error:
        raise ContractError(f"{description} raised {describe(error)}{hint}") from error


def require_json(value: object, description: str) -> None:
    """Raise `ContractError` unless ``value`` is JSON-able."""
    try:
        json.dumps(value)
    except TypeError as error:
        require(False, f"{description} must be JSON-able: {error}", error)


def require_info(info: Info, name: str) -> None:
    """Raise `ContractError` unless the ``info`` of the environment ``name`` is JSON-able, with floats as metrics."""
    metrics = info.get("metrics", {})
    fits = isinstance(metrics, dict) and all(
        isinstance(key, str) and type(value) is float and math.isfinite(value) for key, value in metrics.items()
    )
    require(fits, f"{name}: info['metrics'] must be a dict of finite floats by name, it is {metrics!r}")
    require_json(info, f"{name}: info")


def global_random_state() -> tuple[Any, ...]:
    """Return the states of the generators of ``random`` and NumPy."""
    _, words, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(words).tobytes(), position


def differences(expected: tuple[Any, ...], returned: tuple[Any, ...]) -> str:
    """Return the first part in which two results of an environment differ."""
    expected_part, returned_part = next(
        (pair for pair in zip(expected, returned, strict=False) if pair[0] != pair[1]), (expected, returned)
    )
    return f"first {expected_part!r:.80}, then {returned_part!r:.80}"
