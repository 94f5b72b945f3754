"""Options of a task of a NeMo Gym resource server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from agentrl.config.base import Seconds
from agentrl.config.services import ServiceConfig


class NemoGymOptions(ServiceConfig):
    """Options of ``env.name=nemo_gym``."""

    url: str
    """Address of the resource server, such as ``http://127.0.0.1:8000``."""
    rows: dict[str, str] = Field(default_factory=dict)
    """Files of rows by split: JSONL with ``responses_create_params``, such as ``{train: train.jsonl}``."""
    timeout_s: Seconds = 120.0
    """Seconds until a request counts as lost."""
    max_steps: PositiveInt | None = None
    """Turns after which the episode ends and is verified; null: it ends with a turn without calls."""
    tool_errors: Literal["show", "fail"] = "show"
    """What HTTP 500 of a tool is: a text for the policy, as for NeMo Gym's own agents, or a failure of the episode."""
