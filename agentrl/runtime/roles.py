"""Who plays the roles of a run's environment, by ``env.roles``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agentrl.config.schema import Config
from agentrl.config.tasks import EnvConfig, RoleConfig
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.lineup import MAIN, Lineup, PolicySeat, ScriptedSeat, Seat
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import make_any_env
from agentrl.core.sampler import Sampler
from agentrl.episode.multi_agent_episode import load_player, player_factory
from agentrl.episode.seats import agent_roles
from agentrl.self_play.opponents import endpoint_seat


def make_lineup(config: Config, frozen: Mapping[str, Sampler] = MappingProxyType({})) -> Lineup | None:
    """Return who plays in the episodes of a run, or of one of its sources; None if an episode has one agent.

    Args:
        config: of the run, or of the source.
        frozen: samplers of weights that never change, by `RoleConfig.frozen`; a check needs none.

    Raises:
        ConfigError: ``env.roles`` names a role or a player that does not exist, or no role is trained.
    """
    roles, names = agent_roles(config), config.env.roles
    episodes = config.rollout.agent.setting or f"env.name={config.env.name}"
    if not roles:
        if names:
            raise ConfigError(f"env.roles={', '.join(names)}, but {episodes} has one agent; leave it out")
        return None
    fixed: list[str] = []
    for name, role in names.items():
        if name not in {*roles, *roles.values()}:
            raise unknown_name(f"role of {episodes}", name, {*roles, *roles.values()}, "env.roles")
        if role.player is not None:
            _check_player(config, role.player, f"env.roles.{name}.player")
            fixed.append(role.player)
        elif role.endpoint is not None:
            fixed.append(role.endpoint.model)
        elif role.frozen is not None:
            fixed.append("frozen")
    lineup = Lineup(
        {name: _seat(name, role, frozen) for name, role in names.items()},
        f"fixed:{'+'.join(dict.fromkeys(fixed))}" if fixed else "mirror",
    )
    _check_trained(config.env, roles, lineup, episodes)
    return lineup


def _check_player(config: Config, name: str, key: str) -> None:
    """Check that there is a scripted player, which the configuration key ``key`` names.

    Raises:
        ConfigError: there is none.
    """
    if config.rollout.agent.setting is not None:
        load_player(name, key)
        return
    env = make_any_env(config.env.name, config.env.options)
    assert isinstance(env, MultiAgentEnv), "it has several agents"
    player_factory(env, name, key)


def _check_trained(config: EnvConfig, roles: Mapping[str, str], lineup: Lineup, episodes: str) -> None:
    """Check that each policy is trained in a role, and that policies with names leave no role to one without."""
    seats = {agent: lineup.seat(agent, role) for agent, role in roles.items()}
    trained = {seat.policy for seat in seats.values() if isinstance(seat, PolicySeat) and seat.trained}
    names = config.policies
    for agent, seat in seats.items():
        role = config.roles.get(agent) or config.roles.get(roles[agent]) or RoleConfig()
        if names and isinstance(seat, PolicySeat) and role.policy is None and role.frozen is None:
            raise ConfigError(
                f"env.roles: policies have the names {', '.join(names)}, and none plays the role {roles[agent]}; set "
                f"env.roles.{roles[agent]}.policy"
            )
    for name in names or (MAIN,):
        if name not in trained:
            which = f"the policy {name}" if names else "the policy"
            known = ", ".join(sorted(set(roles.values())))
            raise ConfigError(f"env.roles: {which} is trained in no role of {episodes} ({known})")


def _seat(name: str, role: RoleConfig, frozen: Mapping[str, Sampler]) -> Seat:
    if role.player is not None:
        return ScriptedSeat(role.player)
    if role.frozen is not None:
        return PolicySeat(trained=False, sampler=frozen.get(role.frozen), name=f"frozen {role.frozen}")
    if role.endpoint is not None:
        return endpoint_seat(role.endpoint, f"env.roles.{name}.endpoint", role.endpoint.model)
    return PolicySeat(role.policy or MAIN, trained=role.train, name=role.policy or "policy")
