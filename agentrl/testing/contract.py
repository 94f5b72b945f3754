"""The error of all contract checks, and helpers that they share."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from agentrl.core.errors import UserError
from agentrl.core.tool import Tool
from agentrl.core.tool_arguments import schema_problem
from agentrl.core.types import Info
from agentrl.core.user_code import describe, user_code

T = TypeVar("T")


class ContractError(UserError, AssertionError):
    """A plugin violates a contract; the message has what it does and what it should."""


def require(holds: bool, message: str, cause: BaseException | None = None) -> None:
    """Raise `ContractError` unless ``holds``."""
    if not holds:
        raise ContractError(message) from cause


def call_author_code(description: str, method: Callable[[], T], hint: str = "") -> T:
    """Call a method of the plugin and return its result; an exception is a violation of the contract."""
    with user_code(lambda error: ContractError(f"{description} raised {describe(error)}{hint}")):
        return method()


def check_schemas(name: str, tools: Iterable[Tool]) -> None:
    """Check that calls can fit the JSON Schemas of tools; ``name`` is who offers them."""
    for tool in tools:
        problem = schema_problem(tool.parameters)
        require(not problem, f"{name}: no call of the tool {tool.name!r} could fit: {problem}")


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
