"""Who plays the roles of a run's environment, by ``env.roles``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agentrl.config.tasks import EnvConfig, RoleConfig
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.lineup import MAIN, EndpointSeat, Lineup, PolicySeat, ScriptedSeat, Seat
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import env_class, make_any_env
from agentrl.core.sampler import Sampler
from agentrl.episode.multi_agent_episode import player_factory
from agentrl.inference.client.openai_endpoint import OpenAiEndpoint


def make_lineup(config: EnvConfig, frozen: Mapping[str, Sampler] = MappingProxyType({})) -> Lineup | None:
    """Return who plays in the episodes of a run; None if the environment has one agent.

    Args:
        config: of the environment.
        frozen: samplers of weights that never change, by `RoleConfig.frozen`; a check needs none.

    Raises:
        ConfigError: ``env.roles`` names a role or a player that does not exist, or no role is trained.
    """
    if not issubclass(env_class(config.name), MultiAgentEnv):
        if config.roles:
            raise ConfigError(
                f"env.roles={', '.join(config.roles)}, but env.name={config.name} has one agent; leave it out"
            )
        return None
    env = make_any_env(config.name, config.options)
    assert isinstance(env, MultiAgentEnv), "its class says so"
    role_names = {*env.possible_agents, *(env.role_of(agent) for agent in env.possible_agents)}
    fixed: list[str] = []
    for name, role in config.roles.items():
        if name not in role_names:
            raise unknown_name(f"role of {config.name}", name, role_names, "env.roles")
        if role.player is not None:
            player_factory(env, role.player)
            fixed.append(role.player)
        elif role.endpoint is not None:
            fixed.append(role.endpoint.model)
        elif role.frozen is not None:
            fixed.append("frozen")
    lineup = Lineup(
        {name: _seat(role, frozen) for name, role in config.roles.items()},
        f"fixed:{'+'.join(dict.fromkeys(fixed))}" if fixed else "mirror",
    )
    _check_trained(config, env, lineup)
    return lineup


def _check_trained(config: EnvConfig, env: MultiAgentEnv, lineup: Lineup) -> None:
    """Check that each policy is trained in a role, and that policies with names leave no role to one without."""
    seats = {agent: lineup.seat(agent, env.role_of(agent)) for agent in env.possible_agents}
    trained = {seat.policy for seat in seats.values() if isinstance(seat, PolicySeat) and seat.trained}
    names = config.policies
    for agent, seat in seats.items():
        role = config.roles.get(agent) or config.roles.get(env.role_of(agent)) or RoleConfig()
        if names and isinstance(seat, PolicySeat) and role.policy is None and role.frozen is None:
            raise ConfigError(
                f"env.roles: policies have the names {', '.join(names)}, and none plays the role {env.role_of(agent)}; set "
                f"env.roles.{env.role_of(agent)}.policy"
            )
    for name in names or (MAIN,):
        if name not in trained:
            which = f"the policy {name}" if names else "the policy"
            roles = ", ".join(sorted({env.role_of(agent) for agent in env.possible_agents}))
            raise ConfigError(f"env.roles: {which} is trained in no role of {config.name} ({roles})")


def _seat(role: RoleConfig, frozen: Mapping[str, Sampler]) -> Seat:
    if role.player is not None:
        return ScriptedSeat(role.player)
    if role.frozen is not None:
        return PolicySeat(trained=False, sampler=frozen.get(role.frozen), name=f"frozen {role.frozen}")
    if role.endpoint is not None:
        return EndpointSeat(OpenAiEndpoint(role.endpoint), role.endpoint.model)
    return PolicySeat(role.policy or MAIN, trained=role.train, name=role.policy or "policy")
