"""Advantage estimators, one file each, and the table of ``algo.advantage.name``."""

from __future__ import annotations

from agentrl.algo.advantages.agent_norm import AgentNorm
from agentrl.algo.advantages.at_grpo import AtGrpo
from agentrl.algo.advantages.gae import Gae
from agentrl.algo.advantages.gdpo import Gdpo
from agentrl.algo.advantages.grpo import Grpo
from agentrl.algo.advantages.hierarchical_grpo import HierarchicalGrpo
from agentrl.algo.advantages.maxrl import MaxRl
from agentrl.algo.advantages.plain_reward import PlainReward
from agentrl.algo.advantages.rae import Rae
from agentrl.algo.advantages.reinforce_plus_plus import ReinforcePlusPlus
from agentrl.algo.advantages.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from agentrl.algo.advantages.rloo import Rloo
from agentrl.algo.advantages.seat_grpo import SeatGrpo
from agentrl.algo.advantages.turn_level import TurnLevel
from agentrl.algo.base import AdvantageEstimator

ESTIMATORS: dict[str, type[AdvantageEstimator]] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "maxrl": MaxRl,
    "gae": Gae,
    "turn_level": TurnLevel,
    "rae": Rae,
    "at_grpo": AtGrpo,
    "hierarchical_grpo": HierarchicalGrpo,
    "seat_grpo": SeatGrpo,
    "agent_norm": AgentNorm,
    "gdpo": Gdpo,
    "reward": PlainReward,
}
"""The estimators by ``algo.advantage.name``."""
