"""Container tasks: the policy runs commands in a machine of its own, and tests grade what it has done."""

from .env import TerminalEnv

__all__ = ["TerminalEnv"]
