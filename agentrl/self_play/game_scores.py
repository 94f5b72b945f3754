"""Exploitability of a policy: exact probabilities of the moves at each information set of a game, scored by an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.config.schema import Config
from agentrl.core.errors import EngineError
from agentrl.core.game_tree import GameTree
from agentrl.core.lineup import MAIN, Lineup
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import env_class, make_any_env
from agentrl.core.types import Message
from agentrl.inference.client.scoring import ScoringClient
from agentrl.inference.fleet.fleet import Fleet
from agentrl.render.renderer import ChatRenderer
from agentrl.self_play.best_response import Strategy, average_strategies, exploitability, legal_actions


class Scorer(Protocol):
    """Scores tokens; see `ScoringClient`."""

    async def score(self, token_ids: Sequence[int], start: int, adapter: str | None) -> NDArray[np.float32]:
        """Return the log-probabilities of ``token_ids[start:]`` at temperature 1, with an adapter of this name."""
        ...


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
    """Of a request."""
    vocabulary_size: int
    """Of the policy's model."""
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
    if config.sources or not issubclass(env_class(config.env.name), MultiAgentEnv):
        return None
    env = make_any_env(config.env.name, config.env.options)
    assert isinstance(env, MultiAgentEnv), "its class says so"
    game = env.game_tree()
    if game is None:
        return None
    lineup = Lineup(policies=config.env.policy_of)
    first, second = (lineup.policy(agent, env.role_of(agent)) for agent in env.possible_agents)
    return GameScores(game, renderer, config.sampler.request_timeout_s, vocabulary_size, (first, second))
