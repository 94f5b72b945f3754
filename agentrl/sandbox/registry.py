"""Sandbox backends by name: entry points of the group ``agentrl.sandboxes``, ``file.py:Class`` and ``module:Class``."""

from __future__ import annotations

import inspect

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import ConfigError
from agentrl.core.registry import SANDBOXES, lookup
from agentrl.sandbox.base import SandboxBackend
from agentrl.sandbox.shown_folders import check_shown

KEY = "sandbox.backend"


def backend_class(name: str) -> type[SandboxBackend]:
    """Return the backend class of a registered name, of ``path/to/file.py:Class`` or ``module:Class``.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: the file, or the class in it, does not exist or is no `SandboxBackend`.

    """
    cls = lookup(SANDBOXES, name, "sandbox backend", KEY)
    if not (inspect.isclass(cls) and issubclass(cls, SandboxBackend)):
        raise ConfigError(f"{KEY}={name}: {cls!r:.100} is no subclass of agentrl.sandbox.base.SandboxBackend")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"{KEY}={name}: {cls.__name__} does not implement {missing}")
    return cls


def make_backend(config: SandboxConfig) -> SandboxBackend:
    """Return the backend that ``sandbox.backend`` names, not started yet. There is no fallback to another backend.

    Raises:
        UnknownNameError, ConfigError: see `backend_class` and `check_shown`.

    """
    check_shown(config)
    return backend_class(config.backend)(config)
