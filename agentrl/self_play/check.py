"""Check of the section ``self_play`` against the environment, before anything is started."""

from __future__ import annotations

from agentrl.config.schema import Config
from agentrl.config.self_play import FIXED
from agentrl.core.env import EnvBase
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.imports import is_reference
from agentrl.core.multi_agent_env import MultiAgentEnv


def check_self_play(config: Config, env: EnvBase) -> None:
    """Check that an environment has the agents and scripted players of ``self_play``.

    Raises:
        ConfigError: the environment has one agent, or no such scripted player.
    """
    if config.self_play is None:
        return
    if not isinstance(env, MultiAgentEnv) or len(env.possible_agents) < 2:
        raise ConfigError(f"self_play is set, and env.name={config.env.name} has one agent; leave out self_play")
    section = config.self_play
    for key, names in (("self_play.mix", section.mix), ("self_play.eval.opponents", section.eval.opponents)):
        for name in names:
            player = name.removeprefix(FIXED)
            if name.startswith(FIXED) and player not in env.players and not is_reference(player):
                raise unknown_name(f"player of {config.env.name}", player, sorted(env.players), key)
