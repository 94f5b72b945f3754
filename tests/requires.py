"""Marks of tests that need a package of an extra, which is imported when a test needs it and not when tests are collected; and of
tests that need bubblewrap.
"""

import asyncio
from importlib.util import find_spec

import pytest


def requires(package: str) -> pytest.MarkDecorator:
    """Skip tests where a package is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def require_bubblewrap() -> None:
    """Skip a test where bubblewrap does not work."""
    from agentrl.config.sandbox import SandboxConfig
    from agentrl.core.errors import MissingError
    from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend

    async def start() -> None:
        async with BubblewrapBackend(SandboxConfig()):
            pass

    try:
        BubblewrapBackend.check(SandboxConfig())
        asyncio.run(start())
    except MissingError as error:
        pytest.skip(f"bubblewrap: {error}")
