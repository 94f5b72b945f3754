"""Check of the section ``self_play`` against the environment, before anything is started."""

from __future__ import annotations

from agentrl.config.self_play import FIXED, SelfPlayConfig
from agentrl.core.env import EnvBase
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.imports import is_reference
from agentrl.core.multi_agent_env import MultiAgentEnv


def check_self_play(section: SelfPlayConfig | None, env: EnvBase, env_name: str) -> None:
    """Check that an environment, which messages call ``env_name``, has the agents and scripted players of ``self_play``.

    Raises:
        ConfigError: the environment has one agent, or no such scripted player.
    """
    if section is None:
        return
    if not isinstance(env, MultiAgentEnv) or len(env.possible_agents) < 2:
        raise ConfigError(f"self_play is set, and env.name={env_name} has one agent; leave out self_play")
    for key, names in (("self_play.mix", section.mix), ("self_play.eval.opponents", section.eval.opponents)):
        for name in names:
            player = name.removeprefix(FIXED)
            if name.startswith(FIXED) and player not in env.players and not is_reference(player):
                raise unknown_name(f"player of {env_name}", player, sorted(env.players), key)
