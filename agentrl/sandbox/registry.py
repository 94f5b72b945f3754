"""Sandbox backends by name: entry points of the group ``agentrl.sandboxes``, ``file.py:Class`` and ``module:Class``."""

from __future__ import annotations

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import ConfigError
from agentrl.core.registry import SANDBOXES, plugin_class
from agentrl.sandbox.base import SandboxBackend
from agentrl.sandbox.shown_folders import check_shown

KEY = "sandbox.backend"


def backend_class(name: str) -> type[SandboxBackend]:
    """Return the backend class of a registered name, of ``path/to/file.py:Class`` or ``module:Class``.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: the file, or the class in it, does not exist or is no `SandboxBackend`.
    """
    return plugin_class(SANDBOXES, name, "sandbox backend", KEY, SandboxBackend, {})  # type: ignore[type-abstract]  # for issubclass


def check_images(config: SandboxConfig) -> None:
    """Raise `ConfigError` if ``sandbox.images`` is set for a backend without images."""
    if config.images and not backend_class(config.backend).has_images:
        raise ConfigError(
            f"sandbox.images={', '.join(config.images)}: {KEY}={config.backend} has no images; set {KEY}=docker, or remove it"
        )


def make_backend(config: SandboxConfig) -> SandboxBackend:
    """Return the backend that ``sandbox.backend`` names, not started yet. There is no fallback to another backend.

    Raises:
        UnknownNameError, ConfigError: see `backend_class`, `check_shown` and `check_images`.
    """
    check_shown(config)
    check_images(config)
    return backend_class(config.backend)(config)
