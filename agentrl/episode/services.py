"""What episodes run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from agentrl.env import Env
from agentrl.episode.limits import Limits
from agentrl.protocols import Renderer, Sampler, ToolClient
from agentrl.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Services:
    """What episodes run on; one for all of them."""

    env_factory: Callable[[], Env]
    renderer: Renderer
    sampler: Sampler
    tool_clients: Mapping[str, ToolClient]
    limits: Limits
    sampling: SamplingParams
    """``max_new_tokens`` is shrunk to what the limits leave; each turn's own stop strings are added."""
    pool: Executor
    """Runs the plain methods of environments."""
    policy: str = "main"
    """Which policy of the sampler speaks."""
