"""Adapter of multi-agent environments to PettingZoo's AEC interface, in which one agent acts at a time."""

from __future__ import annotations

from typing import Any

import gymnasium
from pettingzoo import AECEnv

from agentrl.core.multi_agent_env import MultiAgentEnv, View
from agentrl.core.types import Message, Rewrite


class AecAdapter(AECEnv[str, View, Message | None]):
    """A `MultiAgentEnv` as an AEC environment: only agents in ``acting`` are selected, one after the other.

    ``pettingzoo.utils.parallel_to_aec`` asks all agents for an action in each step, also those that do not act.

    An agent observes all messages since its last action.
    """

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env = env
        self.metadata = {**env.metadata, "is_parallelizable": False}
        self.render_mode = env.render_mode
        self.possible_agents = list(env.possible_agents)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start an episode."""
        views, infos = self.env.reset(seed=seed, options=options)
        self.agents = list(self.env.agents)
        self._views = {agent: views[agent] for agent in self.agents}
        self.infos = {agent: infos[agent] for agent in self.agents}
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._actions: dict[str, Message] = {}
        self.agent_selection = self.env.acting[0]

    def step(self, action: Message | None) -> None:
        """Take the action of ``agent_selection``; the environment steps when all agents that act have acted."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert action is not None, "a live agent takes an action"
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self._views[agent] = {"messages": ()}
        self._actions[agent] = action
        waiting = [agent_id for agent_id in self.env.acting if agent_id not in self._actions]
        if waiting:
            self.agent_selection = waiting[0]
            return
        views, rewards, terminations, truncations, infos = self.env.step(self._actions)
        self._actions = {}
        for agent_id in self.agents:
            self._views[agent_id] = _join_views(self._views[agent_id], views[agent_id])
            self.rewards[agent_id] = rewards[agent_id]
            self.terminations[agent_id], self.truncations[agent_id] = terminations[agent_id], truncations[agent_id]
            self.infos[agent_id] = infos[agent_id]
        self._accumulate_rewards()
        if self.env.acting:
            self.agent_selection = self.env.acting[0]
        self._deads_step_first()

    def observe(self, agent: str) -> View:
        """Return the messages since the agent's last action."""
        return self._views[agent]

    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the space of an agent's observations."""
        return self.env.observation_space(agent)

    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the space of an agent's actions."""
        return self.env.action_space(agent)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def _join_views(previous: View, new: View) -> View:
    """Return two observations of an agent as one."""
    first, second = previous["messages"], new["messages"]
    if isinstance(second, Rewrite):
        return new
    if isinstance(first, Rewrite):
        return {"messages": Rewrite((*first.messages, *second))}
    return {"messages": (*first, *second)}
