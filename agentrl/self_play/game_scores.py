"""Exploitability of a policy: exact probabilities of the moves at each information set, scored by an engine; best responses."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentrl.config.schema import Config
from agentrl.core.errors import EngineError
from agentrl.core.lineup import MAIN, Lineup
from agentrl.core.multi_agent_env import CHANCE, GameTree, MultiAgentEnv
from agentrl.core.registry import env_class, make_any_env
from agentrl.core.types import Message
from agentrl.inference.client.scoring import ScoringClient
from agentrl.inference.fleet.fleet import Fleet
from agentrl.render.renderer import ChatRenderer

S = TypeVar("S", bound=Hashable)
Strategy = Mapping[Hashable, Mapping[str, float]]
"""By information set: the probability of each action."""


def expected_payoff(game: GameTree[S], strategies: Sequence[Strategy], player: int) -> float:
    """Return the payoff of ``player`` if both follow their strategies, by seat."""
    payoffs: dict[S, float] = {}

    def value(state: S) -> float:
        if state not in payoffs:
            mover = game.player(state)
            if mover is None:
                payoffs[state] = game.payoff(state, player)
            else:
                chances = game.chances(state) if mover == CHANCE else _chances(game, state, strategies[mover])
                payoffs[state] = sum(p * value(game.child(state, action)) for action, p in chances.items() if p)
        return payoffs[state]

    return value(game.root())


def best_response_payoff(game: GameTree[S], opponent: Strategy, player: int) -> float:
    """Return what ``player`` gets with a best response to the opponent's strategy.

    States that the player cannot tell apart are walked together, with the probability with which chance and the opponent
    reach each: at every information set the player takes the action that is best for all of them.
    """
    payoffs: dict[S, float] = {}

    def value(states: list[tuple[float, S]]) -> float:
        """Return the sum of payoffs, weighted by the probabilities of the states."""
        if len(states) > 1:
            return walk(states)
        weight, state = states[0]  # what follows depends on the state alone
        if state not in payoffs:
            payoffs[state] = walk([(1.0, state)])
        return weight * payoffs[state]

    def walk(states: list[tuple[float, S]]) -> float:
        total, stack = 0.0, list(states)
        mine: dict[Hashable, list[tuple[float, S]]] = {}
        while stack:
            weight, state = stack.pop()
            mover = game.player(state)
            if mover is None:
                total += weight * game.payoff(state, player)
            elif mover == player:
                mine.setdefault(game.information_set(state), []).append((weight, state))
            else:
                chances = game.chances(state) if mover == CHANCE else _chances(game, state, opponent)
                stack += [(weight * p, game.child(state, action)) for action, p in chances.items() if p]
        for indistinguishable in mine.values():
            actions = game.actions(indistinguishable[0][1])
            total += max(
                value([(weight, game.child(state, action)) for weight, state in indistinguishable])
                for action in actions
            )
        return total

    return value([(1.0, game.root())])


def exploitability(game: GameTree[S], strategies: Sequence[Strategy]) -> float:
    """Return ``NashConv / 2``: what a player gains in the mean over both seats by a best response to the other's strategy.

    0 is a Nash equilibrium. Source: Lanctot et al., arXiv:1711.00832, section 4.
    """
    gains = [
        best_response_payoff(game, strategies[1 - player], player) - expected_payoff(game, strategies, player)
        for player in (0, 1)
    ]
    return sum(gains) / 2


def average_strategies(game: GameTree[S], mixed: Sequence[Sequence[Strategy]]) -> tuple[Strategy, Strategy]:
    """Return, by seat, the strategy that plays like a player who draws one of ``mixed`` before each game, all equally probable.

    At an information set each strategy has the weight with which its player's own actions lead there, which is the same
    for all states in it (perfect recall). Where none leads, all have the same weight. Source: Kuhn (1953).

    Args:
        game: of two players.
        mixed: each by seat, with the probabilities of all legal actions.
    """
    averages: tuple[dict[Hashable, dict[str, float]], ...] = ({}, {})

    def walk(state: S, reach: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
        """Go on from a state, with the probability of each strategy's own actions so far, by seat."""
        mover = game.player(state)
        if mover is None:
            return
        if mover == CHANCE:
            for event in game.chances(state):
                walk(game.child(state, event), reach)
            return
        information_set, mine = game.information_set(state), reach[mover]
        chances = [_chances(game, state, strategies[mover]) for strategies in mixed]
        weights = mine if sum(mine) > 0 else (1.0,) * len(mixed)
        averages[mover][information_set] = {
            action: sum(weight * strategy.get(action, 0.0) for weight, strategy in zip(weights, chances, strict=True))
            / sum(weights)
            for action in game.actions(state)
        }
        for action in game.actions(state):
            next_reach = tuple(
                weight * strategy.get(action, 0.0) for weight, strategy in zip(mine, chances, strict=True)
            )
            walk(game.child(state, action), (next_reach, reach[1]) if mover == 0 else (reach[0], next_reach))

    begin = (1.0,) * len(mixed)
    walk(game.root(), (begin, begin))
    return averages[0], averages[1]


def legal_actions(game: GameTree[S]) -> tuple[dict[Hashable, tuple[str, ...]], dict[Hashable, tuple[str, ...]]]:
    """Return the legal actions at each information set, by seat."""
    actions_by_seat: tuple[dict[Hashable, tuple[str, ...]], dict[Hashable, tuple[str, ...]]] = ({}, {})
    stack = [game.root()]
    while stack:
        state = stack.pop()
        mover = game.player(state)
        if mover is not None:
            actions = tuple(game.chances(state) if mover == CHANCE else game.actions(state))
            stack += [game.child(state, action) for action in actions]
            if mover != CHANCE:
                actions_by_seat[mover][game.information_set(state)] = actions
    return actions_by_seat


def _chances(game: GameTree[S], state: S, strategy: Strategy) -> Mapping[str, float]:
    """Return the probabilities of the actions that a strategy takes in a state.

    Raises:
        ValueError: the strategy lacks the information set, or its probabilities of the legal actions do not sum up to 1.
    """
    information_set, legal = game.information_set(state), game.actions(state)
    probabilities = strategy.get(information_set)
    if (
        probabilities is None
        or set(probabilities) - set(legal)
        or abs(sum(probabilities.values()) - 1) > 1e-6
        or min(probabilities.values()) < 0
    ):
        raise ValueError(
            f"the strategy has {probabilities!r} at {information_set!r}, where the legal actions are {', '.join(legal)}"
        )
    return probabilities


class Scorer(Protocol):
    """Scores tokens; see `ScoringClient`."""

    async def score(self, token_ids: Sequence[int], start: int, adapter: str | None) -> NDArray[np.float32]:
        """Return the log-probabilities of ``token_ids[start:]`` at temperature 1, with an adapter of this name."""


@dataclass(frozen=True, slots=True)
class PlayedStrategy:
    """How a policy, or that of each seat, plays a game."""

    moves: tuple[Strategy, Strategy]
    """By seat and information set: the probability of each legal move, given that the policy makes one."""
    other_output: float
    """Mean probability, over the information sets, of an output that is not exactly a legal move."""


@dataclass(frozen=True, slots=True)
class GameScores:
    """Scores of a game's moves by engines: how a policy plays."""

    game: GameTree[Any]
    renderer: ChatRenderer
    timeout_s: float
    """Time limit of a request."""
    vocabulary_size: int
    """Vocabulary size of the policy's model."""
    policies: tuple[str, str] = (MAIN, MAIN)
    """The policy of each seat."""

    async def score_strategy(self, fleet: Fleet) -> PlayedStrategy:
        """Return the strategy of the policies that a fleet's engines hold.

        Raises:
            EngineError: no engine is live, or it cannot be reached, or refuses.
        """
        if not fleet.live:
            raise EngineError("no engine is live that could score the moves of the game")
        engine, size = fleet.live[0], self.vocabulary_size
        client = ScoringClient(engine.url, "the engine that plays", timeout_s=self.timeout_s, vocabulary_size=size)
        try:
            while True:
                first, second = (engine.adapter(policy) for policy in self.policies)
                try:
                    return await self.strategy(client, (first, second))
                except EngineError:
                    if (first, second) == tuple(engine.adapter(policy) for policy in self.policies):
                        raise
                    # A sync has replaced the adapters meanwhile.
        finally:
            await client.aclose()

    async def strategy(self, scorer: Scorer, adapters: tuple[str | None, str | None] = (None, None)) -> PlayedStrategy:
        """Return the strategy of a policy: each legal move, then an end token, is scored after the prompt of each set.

        Args:
            scorer: an engine.
            adapters: that play, by seat; None: the engine's weights alone.
        """
        both = await asyncio.gather(
            *(self._moves(scorer, sets, name) for sets, name in zip(legal_actions(self.game), adapters, strict=True))
        )
        (first, first_other), (second, second_other) = both
        return PlayedStrategy((first, second), float(np.mean([*first_other, *second_other])))

    async def _moves(
        self, scorer: Scorer, sets: Mapping[Hashable, Sequence[str]], adapter: str | None
    ) -> tuple[Strategy, list[float]]:
        """Return the strategy of a seat, and by information set the probability of an output that is no legal move."""
        requests = [
            (information_set, move, end)
            for information_set, moves in sets.items()
            for move in moves
            for end in self.renderer.end_token_ids
        ]
        scores = await asyncio.gather(*(self._logprob(scorer, *request, adapter) for request in requests))
        logprobs: dict[tuple[Hashable, str], list[float]] = {}
        for (information_set, move, _), value in zip(requests, scores, strict=True):
            logprobs.setdefault((information_set, move), []).append(value)
        strategy, other_outputs = {}, []
        for information_set, moves in sets.items():
            move_logprobs = [float(np.logaddexp.reduce(logprobs[information_set, move])) for move in moves]
            legal = float(np.logaddexp.reduce(move_logprobs))
            strategy[information_set] = {
                move: float(np.exp(logprob - legal)) for move, logprob in zip(moves, move_logprobs, strict=True)
            }
            other_outputs.append(max(0.0, 1 - float(np.exp(legal))))
        return strategy, other_outputs

    async def _logprob(
        self, scorer: Scorer, information_set: Hashable, move: str, end: int, adapter: str | None
    ) -> float:
        prompt = self.renderer.render((Message("user", str(information_set)),)).token_ids
        scores = await scorer.score([*prompt, *self.renderer.encode(move), end], len(prompt), adapter)
        return float(scores.astype(np.float64).sum())

    def metrics(self, played: PlayedStrategy) -> dict[str, float]:
        """Return the metrics of the policy."""
        return {
            "eval/exploitability": exploitability(self.game, played.moves),
            "eval/other_output": played.other_output,
        }

    def pool_metrics(self, snapshots: Sequence[PlayedStrategy]) -> dict[str, float]:
        """Return the exploitability of a player who draws a snapshot before each game; empty without snapshots."""
        if not snapshots:
            return {}
        averages = average_strategies(self.game, [strategy.moves for strategy in snapshots])
        return {"eval/pool_exploitability": exploitability(self.game, averages)}


def open_game_scores(config: Config, renderer: ChatRenderer, vocabulary_size: int) -> GameScores | None:
    """Return what reads strategies in the game of a run; None if its environment offers no tree, or is one of several."""
    if config.sources or not issubclass(env_class(config.env.name), MultiAgentEnv) or config.rollout.loop is not None:
        return None
    env = make_any_env(config.env.name, config.env.options)
    assert isinstance(env, MultiAgentEnv), "its class says so"
    game = env.game_tree()
    if game is None:
        return None
    lineup = Lineup(policies=config.env.policy_of)
    first, second = (lineup.policy(agent, env.role_of(agent)) for agent in env.possible_agents)
    return GameScores(game, renderer, config.sampler.request_timeout_s, vocabulary_size, (first, second))
