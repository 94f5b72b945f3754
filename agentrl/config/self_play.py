"""The ``self_play`` section: who plays against the policy, past snapshots of it, and when play has collapsed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from agentrl.config.base import Section
from agentrl.config.services import EndpointConfig

MIRROR, PAST, FIXED, ENDPOINT = "mirror", "past", "fixed:", "endpoint:"
"""Classes of opponents: the policy itself, a snapshot of it, a scripted player of the environment and a model at an
endpoint, both by name."""


class PoolConfig(Section):
    """Snapshots of the policy that play against it."""

    snapshot_every: PositiveInt = 20
    """Steps between snapshots; the first is the policy that the run starts with."""
    keep: PositiveInt = 10
    """Snapshots to keep: the first, the newest, the one with the best rating, and others spread over the run."""
    choose: Literal["latest", "uniform", "recent", "pfsp"] = "uniform"
    """Which one plays: the ``latest``; each with the same probability; newer ones more often (``recent``); or prioritised
    fictitious self-play (``pfsp``): those more often that the policy wins less against."""
    recency: float = Field(default=0.8, gt=0, le=1)
    """With ``recent``, the weight of a snapshot is this times that of the next newer one."""
    pfsp_power: PositiveFloat = 2.0
    """With ``pfsp``, the weight of a snapshot is ``(1 - score) ** pfsp_power``, with the policy's mean score against it, to
    which two draws are added: so each snapshot plays again."""
    score_decay: float = Field(default=0.95, gt=0, le=1)
    """Factor of the weight of earlier games in that mean, each step."""


class AlarmConfig(Section):
    """When a warning is printed that self-play has collapsed; ``null`` switches a condition off."""

    steps: PositiveInt = 5
    """A condition holds in so many steps one after the other, without those that do not show it, as those without mirror
    play."""
    asymmetry: PositiveFloat | None = 0.9
    """Mirror play: one role scores so much more than another; 1 is a win and 0 a loss."""
    reward: PositiveFloat | None = 0.95
    """Mirror play: the mean reward of a role is at least this, or at most minus this."""
    length_share: float | None = Field(default=0.2, gt=0, lt=1)
    """The mean number of sampled tokens of an agent is below this share of what it was in the first step."""


class EvalOpponentsConfig(Section):
    """Who plays in evaluations."""

    opponents: list[str] = Field(default_factory=list)
    """Each evaluation set is played against each of these: ``mirror`` (the policy), ``fixed:NAME`` (a scripted player of the
    environment), ``endpoint:NAME`` (one of ``self_play.endpoints``), with the policy in each seat on the same seeds. Without
    any, the policy plays all seats."""

    @field_validator("opponents")
    @classmethod
    def _fixed(cls, opponents: list[str]) -> list[str]:
        for name in opponents:
            _check_name(name)
            if name != MIRROR and not is_fixed(name):
                raise ValueError(f"{name!r} is no opponent of evaluations: {MIRROR}, {FIXED}NAME or {ENDPOINT}NAME")
        twice = [name for name in opponents if [*map(label, opponents)].count(label(name)) > 1]
        if twice:
            raise ValueError(f"{', '.join(twice)}: each becomes eval/{label(twice[0])}/<metric>; leave out all but one")
        return opponents


def is_fixed(opponent: str) -> bool:
    """Return whether an opponent does not learn: ``fixed:NAME`` or ``endpoint:NAME``."""
    return opponent.startswith((FIXED, ENDPOINT))


def label(opponent: str) -> str:
    """Return the name of an opponent in metrics: without ``fixed:`` and ``endpoint:``."""
    return opponent.removeprefix(FIXED).removeprefix(ENDPOINT)


def _check_name(opponent: str) -> None:
    if opponent in (FIXED, ENDPOINT):
        raise ValueError(f"{opponent!r} names no player; write {opponent}NAME")


class SelfPlayConfig(Section):
    """Self-play in environments of several agents. docs/how_to/self_play.md."""

    mix: dict[str, float] = Field(default_factory=lambda: {MIRROR: 0.5, PAST: 0.5})
    """Share of the tasks by class of opponents: ``mirror`` (the policy), ``past`` (a snapshot), ``fixed:NAME`` (a scripted
    player of the environment), ``endpoint:NAME`` (one of ``endpoints``). Mirror play alone is known to collapse. With
    ``past: 0`` snapshots are taken and do not play."""
    swap_seats: bool = True
    """Against ``past`` and ``fixed`` opponents, the policy sits in each seat in turn among the episodes of a task; ``false``
    keeps it in the first."""
    engines: PositiveInt = 1
    """Engines for snapshots, started if ``mix`` has ``past``. Each plays one snapshot in a step."""
    pool: PoolConfig = Field(default_factory=PoolConfig)
    """Snapshots of the policy that play against it."""
    alarm: AlarmConfig = Field(default_factory=AlarmConfig)
    """When a warning is printed that self-play has collapsed."""
    eval: EvalOpponentsConfig = Field(default_factory=EvalOpponentsConfig)
    """Who plays in evaluations."""
    endpoints: dict[str, EndpointConfig] = Field(default_factory=dict)
    """Models that speak the OpenAI protocol, by the name in ``endpoint:NAME``."""

    @field_validator("mix")
    @classmethod
    def _classes(cls, mix: dict[str, float]) -> dict[str, float]:
        for name, share in mix.items():
            _check_name(name)
            if name not in (MIRROR, PAST) and not is_fixed(name):
                raise ValueError(f"{name!r} is no class of opponents: {MIRROR}, {PAST}, {FIXED}NAME or {ENDPOINT}NAME")
            if not 0 <= share < float("inf"):
                raise ValueError(
                    f"{name!r} has the share {share:g}; shares are at least 0, and count relative to their sum"
                )
        if not any(mix.values()):
            raise ValueError(f"no class of opponents; give {MIRROR}, {PAST}, {FIXED}NAME or {ENDPOINT}NAME a share")
        return mix

    @property
    def snapshot_engines(self) -> int:
        """Engines that play snapshots."""
        return self.engines if PAST in self.mix else 0

    @model_validator(mode="after")
    def _endpoints(self) -> SelfPlayConfig:
        for opponent in (*self.mix, *self.eval.opponents):
            name = opponent.removeprefix(ENDPOINT)
            if opponent.startswith(ENDPOINT) and name not in self.endpoints:
                raise ValueError(f"{opponent} is no endpoint: set self_play.endpoints.{name}.url and .model")
        return self
