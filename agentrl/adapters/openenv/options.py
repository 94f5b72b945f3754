"""Options of an environment behind an OpenEnv server."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from agentrl.config.base import Seconds
from agentrl.config.services import ServiceConfig


class OpenEnvOptions(ServiceConfig):
    """Options of ``env.name=openenv``; ``concurrency`` limits the sessions, and requests besides them, of each process."""

    url: str
    """Address of the server, such as ``http://127.0.0.1:8000``."""
    transport: Literal["websocket", "http"] = "websocket"
    """``websocket``: each episode is a session at ``/ws``. ``http``: ``/reset`` and ``/step``, for environments whose steps need
    nothing that the server keeps of an episode."""
    timeout_s: Seconds = 60.0
    """Seconds until a reset or a step counts as lost."""
    capacity_wait_s: Seconds = 300.0
    """Seconds to wait for a session while the server is full."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of each reset."""
    prompt: str = ""
    """Text in front of the first observation."""
    observation: str | None = None
    """Field of the observation that the policy reads, or a function of the observation, ``file.py:function``."""
    action: str | None = None
    """Field of the action that gets the text of a turn, or a function ``file.py:function`` from the text to the action."""
    execution_errors: Literal["fail", "show"] = "fail"
    """What an error of the environment's step is: a failure of the episode, or a text for the policy."""
    deterministic: bool = False
    """Whether a step depends on nothing but the parameters of the reset, with their seed, and the actions before it. Then an
    episode whose session is lost continues in a new one, in which its actions are played again and must have the same results."""
    invalid_cost: float = Field(default=0.0, ge=0)
    """Taken from the reward for each turn that is no action."""
    max_invalid: PositiveInt = 3
    """Turns in a row that are no actions, with the last of which the episode ends."""
