"""Who plays against the policy: in the episodes of a training step, by share of the tasks, and in evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.clients.chat_completions import open_chat_model
from agentrl.config.schema import Config
from agentrl.config.self_play import ENDPOINT, FIXED, MIRROR, PAST, SelfPlayConfig, is_fixed, label
from agentrl.config.services import EndpointConfig
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.imports import is_reference
from agentrl.core.lineup import EndpointSeat, Lineup, ScriptedSeat, Seat
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import make_any_env
from agentrl.core.types import SamplingParams
from agentrl.episode.multi_agent_episode import load_player
from agentrl.episode.seats import agent_roles
from agentrl.self_play.games import POLICY

_MIX = 0x6D6978
"""Keeps these random numbers apart from others of the same seed and step."""


@dataclass(frozen=True, slots=True)
class Seating:
    """Who plays in an episode."""

    opponent: str
    """Class of opponents: ``mirror``, ``past``, ``fixed:NAME`` or ``endpoint:NAME``."""
    players: tuple[str, ...]
    """By seat: `POLICY`, the name of a snapshot, ``fixed:NAME`` or ``endpoint:NAME``."""


def task_opponents(mix: Mapping[str, float], tasks: int, seed: int, step: int) -> list[str]:
    """Return the class of opponents of each task of a step, a function of mix, seed and step.

    Each class has its share of the tasks, up to one more or less, and over many steps exactly its share in the mean
    (systematic sampling); which tasks it has is random.
    """
    rng = np.random.default_rng([seed, step, _MIX])
    names = [name for name, share in mix.items() if share]
    shares = np.array([mix[name] for name in names], np.float64)
    ends = np.cumsum(shares / shares.sum())
    ends[-1] = 1.0
    points = (np.arange(tasks) + rng.random()) / max(tasks, 1)
    return [names[index] for index in rng.permutation(np.searchsorted(ends, points, side="right")).tolist()]


def step_opponents(config: SelfPlayConfig, *, tasks: int, seed: int, step: int, snapshots: Sequence[str]) -> list[str]:
    """Return the opponent of each task of a step: `POLICY`, a snapshot's name, ``fixed:NAME`` or ``endpoint:NAME``.

    Tasks against past snapshots are dealt out to ``snapshots`` in turn.

    Args:
        config: of self-play.
        tasks: of the step.
        seed: of the run.
        step: whose groups begin.
        snapshots: names of those that can play in this step; without any, ``past`` tasks are mirror play.
    """
    opponents, past = [], 0
    for opponent in task_opponents(config.mix, tasks, seed, step):
        if opponent == PAST:
            opponents.append(snapshots[past % len(snapshots)] if snapshots else POLICY)
            past += 1
        else:
            opponents.append(POLICY if opponent == MIRROR else opponent)
    return opponents


def group_seatings(config: SelfPlayConfig, opponent: str, *, task: int, seats: int, samples: int) -> list[Seating]:
    """Return who plays in each episode of a task.

    All of them have the same opponent, so that the task's rollouts can be compared. With ``swap_seats`` the policy's seat
    changes from sample to sample, and from task to task if a task has one sample.

    Args:
        config: of self-play.
        opponent: of `step_opponents`.
        task: its number in the step.
        seats: of the environment.
        samples: episodes of the task.
    """
    kind = MIRROR if opponent == POLICY else opponent if is_fixed(opponent) else PAST
    seatings = []
    for sample in range(samples):
        mine = (task + sample) % seats if config.swap_seats else 0
        seatings.append(Seating(kind, tuple(POLICY if seat == mine else opponent for seat in range(seats))))
    return seatings


def eval_lineups(config: Config) -> dict[str, tuple[Lineup, ...]]:
    """Return who plays the episodes of each task, by the name of the opponent in metrics.

    Against a scripted player or an endpoint each seat of the policy has a lineup. There is none
    without ``self_play.eval.opponents``.
    """
    section = config.self_play
    if section is None or not section.eval.opponents:
        return {}
    agents, policies = list(agent_roles(config)), config.env.policy_of
    return {label(opponent): _lineups(section, opponent, agents, policies) for opponent in section.eval.opponents}


def _lineups(
    config: SelfPlayConfig, opponent: str, agents: Sequence[str], policies: Mapping[str, str]
) -> tuple[Lineup, ...]:
    if opponent == MIRROR:
        return (Lineup(opponent=MIRROR, policies=policies),)
    seat = fixed_seat(opponent, config)
    return tuple(
        Lineup({agent: seat for agent in agents if agent != policy_agent}, opponent, policies)
        for policy_agent in agents
    )


def fixed_seat(opponent: str, config: SelfPlayConfig) -> Seat:
    """Return who plays the seats of an opponent that does not learn: ``fixed:NAME`` or ``endpoint:NAME``."""
    if opponent.startswith(ENDPOINT):
        name = opponent.removeprefix(ENDPOINT)
        return endpoint_seat(config.endpoints[name], f"self_play.endpoints.{name}", name)
    return ScriptedSeat(opponent.removeprefix(FIXED))


def endpoint_seat(config: EndpointConfig, key: str, name: str) -> EndpointSeat:
    """Return the seat of a model at an endpoint.

    Args:
        config: of the endpoint.
        key: its configuration key, for messages.
        name: of the player.
    """
    sampling = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    return EndpointSeat(open_chat_model(config, key), sampling, name)


def check_self_play(config: Config) -> None:
    """Check that the episodes of a run have the agents and scripted players of ``self_play``.

    Raises:
        ConfigError: they have one agent, or there is no such scripted player, by name or in its file.
    """
    section = config.self_play
    if section is None:
        return
    episodes = config.rollout.agent.setting or f"env.name={config.env.name}"
    if len(agent_roles(config)) < 2:
        more = (
            "; set rollout.agent.agents, or leave out self_play"
            if config.rollout.agent.setting
            else "; leave out self_play"
        )
        raise ConfigError(f"self_play is set, and {episodes} has one agent{more}")
    players: Sequence[str] = ()
    if config.rollout.agent.setting is None:
        env = make_any_env(config.env.name, config.env.options)
        assert isinstance(env, MultiAgentEnv), "it has several agents"
        players = sorted(env.players)
    for key, names in (("self_play.mix", section.mix), ("self_play.eval.opponents", section.eval.opponents)):
        for name in names:
            player = name.removeprefix(FIXED)
            if not name.startswith(FIXED) or player in players:
                continue
            if not is_reference(player):
                raise unknown_name(f"player of {episodes}", player, players, key)
            load_player(player, key)
