"""Who plays against the policy: in the episodes of a training step, by share of the tasks, and in evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.config.self_play import ENDPOINT, FIXED, MIRROR, PAST, SelfPlayConfig, is_fixed, label
from agentrl.config.tasks import EnvConfig
from agentrl.core.env import EnvBase
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.imports import is_reference
from agentrl.core.lineup import EndpointSeat, Lineup, ScriptedSeat, Seat
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import make_any_env
from agentrl.inference.client.openai_endpoint import OpenAiEndpoint
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


def eval_lineups(section: SelfPlayConfig | None, env_config: EnvConfig) -> dict[str, tuple[Lineup, ...]]:
    """Return who plays the episodes of each task, by the name of the opponent in metrics.

    Against a scripted player or an endpoint each seat of the policy has a lineup. There is none
    without ``self_play.eval.opponents``.
    """
    if section is None or not section.eval.opponents:
        return {}
    env = make_any_env(env_config.name, env_config.options)
    assert isinstance(env, MultiAgentEnv), "check_self_play comes first"
    agents, policies = env.possible_agents, env_config.policy_of
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
        return EndpointSeat(OpenAiEndpoint(config.endpoints[name]), name)
    return ScriptedSeat(opponent.removeprefix(FIXED))


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
