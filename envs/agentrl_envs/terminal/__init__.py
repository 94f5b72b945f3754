"""Container tasks: the policy runs commands in its own machine, and tests grade what it has done."""

from .env import TerminalEnv

__all__ = ["TerminalEnv"]
