"""How a policy plays a game with a tree, from the log-probabilities of an engine."""

import asyncio
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from agentrl_envs.kuhn_poker.players import NASH
from agentrl_envs.kuhn_poker.tree import KuhnTree, nash_strategy

from agentrl.config.load import load_config
from agentrl.core.errors import EngineError
from agentrl.core.types import Prompt
from agentrl.self_play.game_scores import GameScores, PlayedStrategy, exploitability, open_game_scores

ENDS = {1: 0.75, 2: 0.25}
"""Probability of each end token."""
UNIFORM = {where: dict.fromkeys(moves, 0.5) for where, moves in nash_strategy(NASH).items()}


class Bytes:
    """A renderer of one token a byte."""

    end_token_ids = tuple(ENDS)

    def render(self, messages, tools=()):
        [message] = messages
        return Prompt(self.encode(message.content))

    def encode(self, text):
        return tuple(byte + 10 for byte in text.encode())


class Engine:
    """Scores moves with the probabilities of a strategy, and of something else with probability ``other``."""

    def __init__(self, strategy, other_share):
        self.strategy, self.other = strategy, other_share

    async def score(self, token_ids, start, adapter):
        text, move = (
            bytes(token - 10 for token in token_part).decode()
            for token_part in (token_ids[:start], token_ids[start:-1])
        )
        chance = self.strategy[text][move] * ENDS[token_ids[-1]] * (1 - self.other)
        scores = np.zeros(len(token_ids) - start, np.float32)
        scores[-1] = math.log(chance) if chance else -1e4
        return scores


SCORES = GameScores(KuhnTree(), Bytes(), 1.0, 300)


@pytest.mark.parametrize(("strategy", "actual"), [(nash_strategy(NASH), 0.0), (UNIFORM, 11 / 24)])
def test_legal_moves_are_normalised_and_the_rest_is_reported(strategy, actual):
    played = asyncio.run(SCORES.strategy(Engine(strategy, 0.2)))
    first, second = played.moves
    for where, moves in strategy.items():
        assert (first | second)[where] == pytest.approx(moves, abs=1e-6)
    metrics = SCORES.metrics(played)
    assert metrics == pytest.approx({"eval/exploitability": actual, "eval/other_output": 0.2}, abs=1e-5)


def test_the_pool_plays_the_mixture_of_its_snapshots():
    nash, uniform = PlayedStrategy((nash_strategy(NASH),) * 2, 0.0), PlayedStrategy((UNIFORM,) * 2, 0.0)
    assert SCORES.pool_metrics([]) == {}
    assert SCORES.pool_metrics([uniform, uniform])["eval/pool_exploitability"] == pytest.approx(11 / 24)
    assert 0 < SCORES.pool_metrics([nash, uniform])["eval/pool_exploitability"] < 11 / 48


class TwoPolicies:
    """An engine with adapters: of the policy ``first`` that of an equilibrium, of ``second`` that of uniform play."""

    def __init__(self):
        self.played = {"first-v1": nash_strategy(NASH), "second-v1": UNIFORM}

    async def score(self, token_ids, start, adapter):
        return await Engine(self.played[adapter], 0.0).score(token_ids, start, None)


def test_each_seat_is_played_by_its_policy():
    played = asyncio.run(SCORES.strategy(TwoPolicies(), ("first-v1", "second-v1")))
    swapped = asyncio.run(SCORES.strategy(TwoPolicies(), ("second-v1", "first-v1")))
    actual = [SCORES.metrics(strategy)["eval/exploitability"] for strategy in (played, swapped)]
    expected = [
        exploitability(KuhnTree(), seats) for seats in ((nash_strategy(NASH), UNIFORM), (UNIFORM, nash_strategy(NASH)))
    ]
    assert actual == pytest.approx(expected, abs=1e-5)
    assert sum(expected) == pytest.approx(11 / 24), "each player of an equilibrium gains nothing by it"


@dataclass
class Synced:
    """An engine whose adapters a sync replaces."""

    version: int = 1
    url: str = "http://127.0.0.1:1"

    def adapter(self, policy):
        return f"{policy}-v{self.version}"


@dataclass(frozen=True)
class Disturbed(GameScores):
    """The engine refuses the adapters of its first version once it has unloaded them."""

    engine: Synced = field(default_factory=Synced)
    last: int = 2

    async def strategy(self, scorer, adapters):
        self.engine.version = self.last
        if "main-v1" in adapters:
            raise EngineError("main-v1 is not loaded")
        return adapters


def test_adapters_that_a_sync_replaces_meanwhile_are_read_again():
    scores = Disturbed(KuhnTree(), Bytes(), 1.0, 300)
    assert asyncio.run(scores.score_strategy(SimpleNamespace(live=[scores.engine]))) == ("main-v2", "main-v2")
    failing = Disturbed(KuhnTree(), Bytes(), 1.0, 300, last=1)
    with pytest.raises(EngineError, match="not loaded"):
        asyncio.run(failing.score_strategy(SimpleNamespace(live=[failing.engine])))


def test_policies_and_their_adapters_are_those_of_the_roles():
    roles = [f"env.roles.{role}.policy={role}" for role in ("first", "second")]
    words = ["env.name=kuhn_poker", "learner.lora.rank=2", "weights.adapters=only"]
    assert open_game_scores(load_config(None, [*words, *roles]), Bytes(), 300).policies == ("first", "second")
    assert open_game_scores(load_config(None, words), Bytes(), 300).policies == ("main", "main")


def test_without_a_live_engine_there_is_no_strategy():
    with pytest.raises(EngineError, match="no engine is live"):
        asyncio.run(SCORES.score_strategy(SimpleNamespace(live=())))


@pytest.mark.parametrize(("env", "has"), [("kuhn_poker", True), ("tictactoe", False), ("single_turn", False)])
def test_only_an_environment_with_a_tree_has_it(env, has):
    game_scores = open_game_scores(load_config(None, [f"env.name={env}"]), Bytes(), 300)
    assert (game_scores is not None) is has
