"""Opponents of self-play in training and in evaluations, with the policy in each seat, and results of games."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config.schema import Config
from agentrl.config.self_play import ENDPOINT, FIXED, MIRROR, SelfPlayConfig, label
from agentrl.core.lineup import EndpointSeat, Lineup, ScriptedSeat, Seat
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import make_any_env
from agentrl.core.types import Rollout
from agentrl.evaluation.intervals import mean
from agentrl.inference.client.openai_endpoint import OpenAiEndpoint
from agentrl.selfplay.games import POLICY, Game, WinTable, rollout_score


def eval_lineups(config: Config) -> dict[str, tuple[Lineup, ...]]:
    """Return who plays the episodes of each task, by the name of the opponent in metrics.

    Against a scripted player or an endpoint each seat of the policy has a lineup. There is none
    without ``self_play.eval.opponents``.
    """
    if config.self_play is None or not config.self_play.eval.opponents:
        return {}
    env = make_any_env(config.env.name, config.env.options)
    assert isinstance(env, MultiAgentEnv), "check_self_play comes first"
    given, agents, policies = config.self_play, env.possible_agents, config.env.policy_of
    return {label(one): _lineups(given, one, agents, policies) for one in given.eval.opponents}


def _lineups(
    config: SelfPlayConfig, opponent: str, agents: Sequence[str], policies: Mapping[str, str]
) -> tuple[Lineup, ...]:
    if opponent == MIRROR:
        return (Lineup(opponent=MIRROR, policies=policies),)
    seat = fixed_seat(opponent, config)
    return tuple(Lineup({other: seat for other in agents if other != mine}, opponent, policies) for mine in agents)


def fixed_seat(opponent: str, config: SelfPlayConfig) -> Seat:
    """Return who plays the seats of an opponent that does not learn: ``fixed:NAME`` or ``endpoint:NAME``."""
    if opponent.startswith(ENDPOINT):
        name = opponent.removeprefix(ENDPOINT)
        return EndpointSeat(OpenAiEndpoint(config.endpoints[name]), name)
    return ScriptedSeat(opponent.removeprefix(FIXED))


def game_metrics(rollout: Rollout) -> dict[str, float]:
    """Return score (1 for a win, 0.5 for a draw), win, draw and loss of a game; empty if it failed."""
    if rollout.failure is not None or not rollout.seat_rewards:
        return {}
    score = rollout_score(rollout)
    return {"score": score, "win": float(score == 1), "draw": float(score == 0.5), "loss": float(score == 0)}


def games_report(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return results of the policy's games (see `WinTable.state`) and its mean reward by seat, JSON-able.

    Args:
        rollouts: of a set with opponents; failed ones are left out.

    """
    played = [one for one in rollouts if one.failure is None and one.seat_rewards]
    results, games = WinTable(), {one.episode: _game(one) for one in played}
    results.add(games.values())
    by_seat: dict[int, list[float]] = {}
    for one in played:
        by_seat.setdefault(one.seat, []).append(one.reward)
    return {
        "results": [row for row in results.state() if row[0] == POLICY],
        "reward": {str(seat): mean(some) for seat, some in sorted(by_seat.items())},
    }


def _game(rollout: Rollout) -> Game:
    other = POLICY if rollout.opponent == MIRROR else rollout.opponent
    players = tuple(POLICY if seat == rollout.seat else other for seat in range(len(rollout.seat_rewards)))
    return Game(rollout.episode, players, rollout.seat_rewards)
