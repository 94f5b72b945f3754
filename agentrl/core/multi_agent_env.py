"""Environments of several agents: PettingZoo environments whose observations and actions are messages; their scripted players."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from pettingzoo import AECEnv, ParallelEnv

from agentrl.core.env import ActionSpace, EnvBase, MessageSpace
from agentrl.core.types import Info, Message, Rewrite, json_state

S = TypeVar("S", bound=Hashable)
CHANCE = -1
"""The player of a state in which a random event follows."""


class GameTree(Protocol[S]):
    """A game with perfect recall. What follows a state depends on the state alone."""

    def root(self) -> S:
        """Return the first state."""

    def player(self, state: S) -> int | None:
        """Return who moves: 0, 1 or `CHANCE`; None if the game is over."""

    def chances(self, state: S) -> Mapping[str, float]:
        """Return the probability of each random event."""

    def actions(self, state: S) -> Sequence[str]:
        """Return the legal actions."""

    def child(self, state: S, action: str) -> S:
        """Return the state after an action or a random event."""

    def information_set(self, state: S) -> Hashable:
        """Return what the player who moves knows: equal for states that this player cannot tell apart."""

    def payoff(self, state: S, player: int) -> float:
        """Return a player's payoff at the end."""


class Player(Protocol):
    """Plays one agent in one episode, without a model."""

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return the text of the agent's turn.

        Args:
            messages: added since its last turn.
            legal_moves: ``legal_moves`` of the agent's ``info``; empty in an environment that lists none.
        """


PlayerFactory = Callable[[np.random.Generator], Player]
"""Makes the player of an episode; the generator is its only source of randomness."""


class RandomPlayer:
    """Takes each legal move with the same probability."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return a legal move; an empty text if none is listed."""
        return legal_moves[int(self._rng.integers(len(legal_moves)))] if legal_moves else ""


View = dict[str, tuple[Message, ...] | Rewrite]
"""What an agent observes: ``{"messages": …}``, the messages added since its last step, or a `Rewrite`."""

MultiReset = tuple[dict[str, View], dict[str, Info]]
"""``(observations, infos)``, each by agent."""

MultiStep = tuple[dict[str, View], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Info]]
"""``(observations, rewards, terminations, truncations, infos)``, each by agent, as in PettingZoo."""

MULTI_RESET_FORM = "(observations, infos)"
"""What `MultiAgentEnv.reset` returns."""
MULTI_STEP_FORM = "(observations, rewards, terminations, truncations, infos)"
"""What `MultiAgentEnv.step` returns."""


class MultiAgentEnv(EnvBase, ParallelEnv[str, View, Message]):
    """Base class of environments with several agents: games, and roles that work together.

    Subclasses set `possible_agents`, and implement `reset` and `step`. Both are synchronous and do no I/O. All randomness
    comes from ``self.np_random``.

    Every agent in ``agents`` gets an observation ``{"messages": (…)}`` from each step, perhaps of no message. `acting` names
    the agents that act next: actions of others are ignored. An agent reads all messages added since its last turn, or
    after a `Rewrite` those alone. Several acting agents act at the same time.

    The ``info`` of an agent may hold ``legal_moves``, a list of texts, for scripted players. Its last one may hold
    ``metrics``, a ``dict[str, float]`` that is averaged over the agent's episodes and logged. An illegal move has a cost that
    the environment states; it raises nothing.
    """

    metadata: dict[str, Any] = {"render_modes": [], "name": "agentrl"}  # noqa: RUF012 (PettingZoo's declaration)
    render_mode: str | None = None

    possible_agents: list[str]
    """All agents, in the order of their seats."""
    agents: list[str]
    """Agents that are still in the episode."""
    acting: tuple[str, ...] = ()
    """Agents that act in the next step."""
    roles: ClassVar[Mapping[str, str]] = {}
    """Role of each agent, such as ``first``; an agent that is not listed has its name as role. Agents with one role are
    alike: baselines and metrics are by role."""
    players: ClassVar[Mapping[str, PlayerFactory]] = {"random": RandomPlayer}
    """Scripted players by name."""
    np_random: np.random.Generator
    """The episode's generator, set by `reset`."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> MultiReset:
        """Start an episode on ``options["task"]`` (without one, on `example_task`): set `agents`, `acting` and ``np_random``.

        Here every agent acts first, and reads the task's prompt. Without ``seed`` the generator continues, as in Gymnasium.
        """
        if seed is not None or not hasattr(self, "np_random"):
            self.np_random, _ = seeding.np_random(seed)
        self.task = (options or {}).get("task") or self.example_task()
        self.agents = list(self.possible_agents)
        self.acting = tuple(self.agents)
        return {agent: {"messages": self.task.prompt} for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Message]) -> MultiStep:
        """Take the assistant messages of the agents in `acting`; update `agents` and `acting`."""
        raise NotImplementedError(f"{type(self).__name__} defines no step(actions)")

    def forfeit(self, agent: str) -> dict[str, float]:
        """Return the rewards, by agent, if ``agent`` must act and has no turns or tokens left; the episode is over then."""
        return {}

    def game_tree(self) -> GameTree[Any] | None:
        """Return the game as a tree, for its exploitability; by default there is none.

        The game has two players, by seat. An information set is the text of the only message that the player reads, and
        an action the text of a legal move.
        """
        return None

    def close(self) -> None:
        """Release what the environment holds; by default nothing."""

    def role_of(self, agent: str) -> str:
        """Return the role of an agent."""
        return self.roles.get(agent, agent)

    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the space of an agent's observations, the same object every time."""
        return self._spaces[agent][0]

    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the space of an agent's actions, the same object every time."""
        return self._spaces[agent][1]

    @cached_property
    def _spaces(self) -> dict[str, tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]:
        return {
            agent: (gymnasium.spaces.Dict({"messages": MessageSpace()}), ActionSpace())
            for agent in self.possible_agents
        }

    def get_state(self) -> dict[str, Any]:
        """Return the JSON-able state of the episode; by default the agents and the random generator."""
        random_state = json_state(self.np_random.bit_generator.state)
        return {"np_random": random_state, "agents": list(self.agents), "acting": list(self.acting)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned, after a `reset` on the same task."""
        self.np_random.bit_generator.state = state["np_random"]
        self.agents, self.acting = list(state["agents"]), tuple(state["acting"])


def view_fault(view: object) -> str:
    """Return what is wrong with an agent's observation and what it should be, in one line; empty if nothing is."""
    if not isinstance(view, dict) or list(view) != ["messages"]:
        return f'{view!r:.160}, which must be {{"messages": (…)}}'
    messages = view["messages"]
    if not isinstance(messages, tuple | Rewrite) or not MessageSpace().contains(messages):
        return f"{view!r:.160}, whose messages must be a tuple of messages or a Rewrite"
    return ""


def multi_agent_fault(env: MultiAgentEnv, returned: object, form: str) -> str:
    """Return what is wrong with what `reset` or `step` returned, in one line; empty if nothing is."""
    names = form.strip("()").split(", ")
    if not isinstance(returned, tuple) or len(returned) != len(names):
        return f"must return {form}, it returned {returned!r:.160}"
    for name, by_agent in zip(names, returned, strict=True):
        if not isinstance(by_agent, dict):
            return f"must return {form}, each a dict by agent, but {name} is {by_agent!r:.160}"
        absent = [agent for agent in env.agents if agent not in by_agent]
        if absent:
            return f"returned {name} without the agent {absent[0]!r}"
    for agent, view in returned[0].items():
        if fault := view_fault(view):
            return f"returned for {agent!r} the observation {fault}"
    for agent, info in returned[-1].items():
        if not isinstance(info, dict):
            return f"returned for {agent!r} the info {info!r:.160}, which must be a dict"
    if not isinstance(env.acting, tuple) or not set(env.acting) <= set(env.agents):
        return (
            f"set acting to {env.acting!r:.160}, which must be a tuple of agents that are in the episode, {env.agents}"
        )
    if env.agents and not env.acting:
        return "left no agent to act, although the episode is not over"
    return ""


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
