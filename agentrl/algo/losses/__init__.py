"""Policy losses, one file each, with the table of ``algo.loss.name``."""

from __future__ import annotations

from agentrl.algo.base import PolicyLoss
from agentrl.algo.losses.cispo import Cispo
from agentrl.algo.losses.dppo import Dppo
from agentrl.algo.losses.gspo import Gspo, GspoToken
from agentrl.algo.losses.ppo_clip import PpoClip
from agentrl.algo.losses.reinforce import Reinforce

POLICY_LOSSES: dict[str, type[PolicyLoss]] = {
    "ppo_clip": PpoClip,
    "gspo": Gspo,
    "gspo_token": GspoToken,
    "cispo": Cispo,
    "reinforce": Reinforce,
    "dppo": Dppo,
}
"""The policy losses by ``algo.loss.name``."""
