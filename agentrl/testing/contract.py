"""The error of all contract checks."""

from __future__ import annotations

from agentrl.core.errors import UserError


class ContractError(UserError, AssertionError):
    """A plugin violates a contract; the message has what it does and what it should."""


def require(holds: bool, message: str, cause: BaseException | None = None) -> None:
    """Raise `ContractError` unless ``holds``."""
    if not holds:
        raise ContractError(message) from cause
