"""From the configuration's name of a backend to the backend."""

from __future__ import annotations

from agentrl.config.sandbox import SandboxConfig
from agentrl.sandbox.base import SandboxBackend


def make_backend(config: SandboxConfig) -> SandboxBackend:
    """Return the backend that ``sandbox.backend`` names, not started yet. Never another one in its place."""
    # Imported where they are wanted: docker's client takes a tenth of a second, and bubblewrap is Linux only.
    if config.backend == "bubblewrap":
        from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend

        return BubblewrapBackend(config)
    if config.backend == "docker":
        from agentrl.sandbox.docker.backend import DockerBackend

        return DockerBackend(config)
    from agentrl.sandbox.unsafe import UnsafeBackend

    assert config.backend == "unsafe_subprocess", config.backend
    return UnsafeBackend(config)
