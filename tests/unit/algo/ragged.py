"""Rollouts of every shape that estimators, losses and corrections must get right, with the place of every sampled token.

Groups of any size, dropped rollouts, several agents a rollout, several rows an agent. A later row begins with turns of
earlier ones, which are sampled but not trained there, and an agent may return to an earlier row::

    row 0    p p a a o b b o d      a, b, d sampled and trained
    row 1    p p a a o c            a shared: mask 0; c trained, sampled before d
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.core.types import FinishReason, MaskReason, Provenance, Rollout, Row, RowKey, StopReason, Turn

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SampledTokens:
    """What an agent sampled in a rollout."""

    group: str
    rollout_id: str
    agent_id: str
    reward: float
    turn_rewards: tuple[float, ...]
    places: tuple[tuple[RowKey, int], ...]
    """Row and position of each token, in the order sampled."""
    turns: tuple[int, ...]
    """The turn of each token."""
    role: str = ""
    seat: int = 0
    opponent: str = ""
    episode: str = ""

    def of(self, values: Mapping[RowKey, NDArray[np.float32]]) -> Floats:
        """Return the values of its tokens."""
        return np.array([values[key][position] for key, position in self.places], np.float64)


@dataclass(frozen=True)
class Ragged:
    """Rollouts of a training step, as the driver has them and as references want them."""

    groups: RolloutGroups
    sequences: tuple[SampledTokens, ...]
    """Of rollouts that were not dropped; those without a token are left out."""

    @property
    def rows(self) -> list[Row]:
        return self.groups.rows

    def random_values(self, rng: np.random.Generator, scale: float = 1.0) -> dict[RowKey, NDArray[np.float32]]:
        """Return values of every token, also of those that nobody may look at."""
        return {row.key: rng.normal(0, scale, len(row.mask)).astype(np.float32) for row in self.rows}


def make_ragged(
    seed: int,
    *,
    sizes: Sequence[int] = (4, 1, 2, 3),
    agents: int = 2,
    rewards: Sequence[float] = (-1.0, 0.0, 0.5, 2.0),
    dropped: int = 1,
    players: bool = False,
) -> Ragged:
    """Return groups of ``sizes``, of which each loses ``dropped`` more rollouts.

    Args:
        seed: of everything.
        sizes: rollouts that each group keeps.
        agents: a rollout has 1 to so many.
        rewards: a rollout has one of these.
        dropped: rollouts that a group lost; their rewards are far from all others.
        players: each rollout is that of one of two players of an episode.
    """
    rng = np.random.default_rng(seed)
    rollouts, sequences = [], []
    for number, size in enumerate(sizes):
        for sample in range(size + dropped):
            lost = sample >= size
            name = f"{number}/{sample}"
            reward = 1000.0 if lost else float(rng.choice(rewards))
            count = 1 if players else int(rng.integers(1, agents + 1))
            seat = int(rng.integers(2)) if players else 0
            rollout, actual_rollout = _rollout(rng, f"p{number}", name, reward, count, lost, first=seat)
            if players:
                player = _player(rng, number, seat)
                rollout = replace(rollout, **player)
                actual_rollout = [replace(sampled_rollout, **player) for sampled_rollout in actual_rollout]
            rollouts.append(rollout)
            sequences += [] if lost else actual_rollout
    mixed = [rollouts[index] for index in rng.permutation(len(rollouts))]
    return Ragged(group_rollouts(mixed), tuple(sequences))


def _player(rng: np.random.Generator, group: int, seat: int) -> dict[str, object]:
    opponent = str(rng.choice(["mirror", "past", "fixed:random"]))
    return {
        "role": ("first", "solver")[seat],
        "seat": seat,
        "opponent": opponent,
        "episode": f"{group}/{rng.integers(2)}",
    }


def _rollout(
    rng: np.random.Generator, group: str, name: str, reward: float, agents: int, lost: bool, first: int
) -> tuple[Rollout, list[SampledTokens]]:
    rows: list[Row] = []
    sequences = []
    counts = rng.integers(1, 5, agents)
    parts = rng.normal(size=counts[0]).round(3)
    parts[-1] += reward - parts.sum()
    for agent, count in enumerate(counts, first):
        made, places, turns = _rows(rng, group, name, f"agent{agent}", int(count))
        rows += made
        sequences.append(SampledTokens(group, name, f"agent{agent}", reward, tuple(parts), tuple(places), tuple(turns)))
    turns_ = [Turn("", "", FinishReason.STOP, float(turn_reward)) for turn_reward in parts]
    mixed = [rows[index] for index in rng.permutation(len(rows))]
    sampled = sum(len(sequence.places) for sequence in sequences)
    rollout = Rollout(
        group, name, mixed, reward, StopReason.TERMINATED, turns=turns_, dropped=lost, sampled_tokens=sampled
    )
    return rollout, sequences


def _rows(
    rng: np.random.Generator, group: str, name: str, agent: str, turns: int
) -> tuple[list[Row], list[tuple[RowKey, int]], list[int]]:
    """Return an agent's rows; a turn continues the last row or the first, or branches off after a turn of the last."""
    tokens = [[(-1, "observed")] * int(rng.integers(1, 4))]  # of each row: the turn of each token, and what it is
    places, of_turn = [], []
    for turn in range(turns):
        if turn and rng.random() < 0.5:
            known_tokens = tokens[-1]
            cuts = [
                at
                for at in range(1, len(known_tokens))
                if known_tokens[at - 1][0] >= 0 and known_tokens[at][0] != known_tokens[at - 1][0]
            ]
            cut = int(rng.choice([*cuts, 1]))
            tokens.append([(which, "shared" if which >= 0 else kind) for which, kind in known_tokens[:cut]])
            row = tokens[-1]
        else:
            row = tokens[0 if turn == 2 else -1]
        row += [(-1, "observed")] * int(rng.integers(0, 3))
        for _ in range(int(rng.integers(1, 6))):
            number = next(number for number, other_token in enumerate(tokens) if other_token is row)
            places.append((RowKey(group, name, agent, number), len(row)))
            of_turn.append(turn)
            row.append((turn, "trained"))
    made = [_row(rng, RowKey(group, name, agent, number), row) for number, row in enumerate(tokens)]
    return made, places, of_turn


def _row(rng: np.random.Generator, key: RowKey, tokens: list[tuple[int, str]]) -> Row:
    sampled = np.array([turn >= 0 for turn, _ in tokens])
    mask = np.array([kind == "trained" for _, kind in tokens], np.uint8)
    reasons = {"observed": MaskReason.OBSERVED, "shared": MaskReason.SHARED, "trained": MaskReason.NONE}
    names = sorted({turn for turn, _ in tokens if turn >= 0})
    return Row(
        key=key,
        token_ids=rng.integers(2, 90, len(tokens)).astype(np.int32),
        provenance=np.where(sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=mask,
        mask_reason=np.array([reasons[kind] for _, kind in tokens], np.uint8),
        logprobs=(rng.uniform(-5, -0.1, len(tokens)) * sampled).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        requests=np.array([names.index(turn) if turn >= 0 else -1 for turn, _ in tokens], np.int32),
        request_ids=tuple(f"{key.agent_id}/{turn}" for turn in names),
        turns=tuple(names),
    )
