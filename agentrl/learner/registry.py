"""Learner backends by name: those of agentrl, entry points of the group ``agentrl.learners``, and references to a class."""

from __future__ import annotations

import inspect

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.imports import is_reference
from agentrl.core.registry import LEARNERS, lookup, names
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
    if name in BACKENDS:
        return BACKENDS[name]
    plugins = names(LEARNERS)
    if not is_reference(name) and name not in plugins:
        raise unknown_name("learner backend", name, [*BACKENDS, *plugins], KEY)
    cls = lookup(LEARNERS, name, "learner backend", KEY)
    if not (inspect.isclass(cls) and issubclass(cls, LearnerBackend)):
        raise ConfigError(f"{KEY}={name}: {cls!r:.100} is no subclass of agentrl.learner.base.LearnerBackend")
    if inspect.isabstract(cls):
        methods = ", ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"{KEY}={name}: {cls.__name__} does not implement {methods}")
    return cls


def make_backend(config: LearnerConfig) -> LearnerBackend:
    """Return the backend that ``learner.backend`` names.

    Raises:
        UnknownNameError, ConfigError: see `backend_class`.
    """
    return backend_class(config.backend)(config)
