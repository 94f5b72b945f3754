"""Learner backends by name: those of agentrl, entry points of the group ``agentrl.learners``, and references to a class."""

from __future__ import annotations

from agentrl.config.learner import LearnerConfig
from agentrl.core.registry import LEARNERS, plugin_class
from agentrl.learner.base import LearnerBackend
from agentrl.learner.fsdp.backend import FsdpBackend
from agentrl.learner.megatron.backend import MegatronBackend

KEY = "learner.backend"
BACKENDS: dict[str, type[LearnerBackend]] = {"fsdp": FsdpBackend, "megatron": MegatronBackend}
"""Those of agentrl."""


def backend_class(name: str) -> type[LearnerBackend]:
    """Return the backend class of a name, of ``path/to/file.py:Class`` or ``module:Class``.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: the file, or the class in it, does not exist or is no `LearnerBackend`.
    """
    return plugin_class(LEARNERS, name, "learner backend", KEY, LearnerBackend, BACKENDS)  # type: ignore[type-abstract]  # for issubclass


def make_backend(config: LearnerConfig) -> LearnerBackend:
    """Return the backend that ``learner.backend`` names.

    Raises:
        UnknownNameError, ConfigError: see `backend_class`.
    """
    return backend_class(config.backend)(config)
