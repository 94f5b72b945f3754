"""The check after a run's first weight sync: engines and learner give fixed rows the same log-probabilities."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.batch.packing import PackOptions, RowSignals, pack
from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError, ConfigError, EngineError
from agentrl.core.types import MaskReason, Message, Provenance, Row, RowKey
from agentrl.inference.base import EngineControl
from agentrl.inference.client.scoring import ScoringClient
from agentrl.learner.base import LearnerGroup, RowLogprobs
from agentrl.learner.registry import make_backend
from agentrl.render.renderer import ChatRenderer
from agentrl.weight_sync.base import WeightSync
from agentrl.weight_sync.gap import GapBand, mean_gap

_log = logging.getLogger(__name__)

TURNS = (1, 2, 4, 8)
"""Depths of the turns that are compared."""
_CONVERSATIONS = 2
_EXCHANGES = (
    ("How many days are there in a week?", "There are seven days in a week, from Monday to Sunday."),
    ("What is 12 + 30?", "12 + 30 = 42."),
    ("Name a river in Egypt.", "The Nile flows through Egypt from the south to the north."),
    ("Write a line of Python that prints hello.", "print('hello')"),
    ("Which is larger, 0.8 or 0.75?", "0.8 is larger, because 0.8 = 0.80."),
    ("What do bees make?", "Bees make honey and wax."),
    ("Sort the words pear, fig, apple.", "apple, fig, pear"),
    ("What is the opposite of early?", "The opposite of early is late."),
    ("Convert 2 km to metres.", "2 km are 2,000 metres."),
    ("Which file holds a Python project's settings?", "Usually pyproject.toml, in the folder of the project."),
)
_MAX_TOKENS = 1024
"""Of a row. A longer one loses its beginning."""
_REQUEST_S = 120.0


@dataclass(frozen=True, slots=True)
class _FixedRow:
    """A conversation up to a turn of the policy, whose tokens are compared."""

    row: Row
    start: int
    """Its first token of that turn."""
    turn: int
    """From 1."""


def fixed_rows(renderer: ChatRenderer, max_tokens: int, seed: int) -> list[_FixedRow]:
    """Return the rows of a run: two conversations in its chat format, each up to turns of several depths."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(_CONVERSATIONS):
        exchanges = [_EXCHANGES[index] for index in rng.permutation(len(_EXCHANGES))]
        for turn in TURNS:
            answer = renderer.encode(exchanges[turn - 1][1])
            prompt = _prompt(renderer, exchanges[:turn])
            token_ids = np.array([*prompt, *answer], np.int32)[-min(max_tokens, _MAX_TOKENS) :]
            start = max(1, len(token_ids) - len(answer))
            if start < len(token_ids):
                rows.append(
                    _FixedRow(_row(RowKey(f"first-sync-{number}", f"turn-{turn}"), token_ids, start), start, turn)
                )
    return rows


def _prompt(renderer: ChatRenderer, exchanges: Sequence[tuple[str, str]]) -> Sequence[int]:
    """Return the tokens up to the last answer; plain lines if the chat format refuses the conversation."""
    *earlier, (question, _) = exchanges
    messages = [
        message for user, answer in earlier for message in (Message("user", user), Message("assistant", answer))
    ]
    try:
        return renderer.render([*messages, Message("user", question)]).token_ids
    except AgentrlError:
        lines = [line for pair in earlier for line in pair]
        return renderer.encode("\n".join([*lines, question, ""]))


def _row(key: RowKey, token_ids: NDArray[np.int32], start: int) -> Row:
    mask = np.zeros(len(token_ids), np.uint8)
    mask[start:] = 1
    compared = mask.astype(bool)
    return Row(
        key=key,
        token_ids=token_ids,
        provenance=np.where(compared, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=mask,
        mask_reason=np.where(compared, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.where(compared, 0, -1).astype(np.int32),
        requests=np.where(compared, 0, -1).astype(np.int32),
        request_ids=("first-sync",),
    )


class Scorer(Protocol):
    """Scores tokens with an engine; see `ScoringClient`."""

    async def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Return the log-probabilities of ``token_ids[start:]``."""
        ...

    async def aclose(self) -> None:
        """Close its connections."""
        ...


@dataclass(slots=True)
class FirstSyncCheck:
    """Compares engines and learner once.

    The learner scores the rows before the sync, with the weights that are sent, while it has its GPUs; the engines after it.
    """

    rows: Sequence[_FixedRow]
    packing: PackOptions
    band: GapBand
    open_scorer: Callable[[EngineControl], Scorer]
    resend: WeightSync
    """Sends weights again, with checksums, to find what is wrong."""
    learner_logprobs: RowLogprobs = field(default_factory=dict, init=False)

    @classmethod
    def open(
        cls, config: Config, renderer: ChatRenderer, band: GapBand, vocabulary_size: int, resend: WeightSync
    ) -> FirstSyncCheck:
        """Return the check of a run."""
        max_tokens = min(source.rollout.max_tokens for source in config.by_source().values())
        packing = PackOptions(
            tokens_per_micro=config.batch.micro_tokens,
            data_parallel_size=make_backend(config.learner).data_parallel_size,
            pad_id=renderer.pad_token_id,
        )

        def open_scorer(engine: EngineControl) -> ScoringClient:
            name = f"engine {engine.number}"
            return ScoringClient(engine.url, name, timeout_s=_REQUEST_S, vocabulary_size=vocabulary_size)

        return cls(fixed_rows(renderer, max_tokens, config.run.seed), packing, band, open_scorer, resend)

    def score_learner(self, learner: LearnerGroup) -> None:
        """Let the learner score the rows. Blocks."""
        rows = [fixed.row for fixed in self.rows]
        zeros = {row.key: np.zeros(len(row.token_ids), np.float32) for row in rows}
        self.learner_logprobs = learner.logprobs(pack(rows, self.packing, RowSignals(advantages=zeros)))

    async def check(self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int) -> dict[str, float]:
        """Compare all engines with the learner; return metrics of the largest gap.

        Raises:
            ConfigError: a gap is over its limit. The message says which weights an engine lacks, and what to do.
        """
        worst: dict[int, float] = {}
        for engine in engines:
            try:
                gaps = await self._gaps(engine)
            except EngineError as error:
                _log.warning("the check after the first weight sync is left out for %s: %s", engine.url, error)
                continue
            if any(not gap <= self.band.limit(turn) for turn, gap in gaps.items()):
                raise ConfigError(await self._fault(learner, engine, version, gaps))
            worst = {turn: max(gap, worst.get(turn, 0.0)) for turn, gap in gaps.items()}
        if not worst:
            return {}
        return {"sync/gap": max(worst.values()), "sync/gap_limit": self.band.first_turn}

    async def _gaps(self, engine: EngineControl) -> dict[int, float]:
        """Return the gap of an engine by depth of turn."""
        scorer = self.open_scorer(engine)
        try:
            scores = await asyncio.gather(*(scorer.score(row.row.token_ids.tolist(), row.start) for row in self.rows))
        finally:
            await scorer.aclose()
        pairs: defaultdict[int, list[tuple[NDArray[np.float32], NDArray[np.float32]]]] = defaultdict(list)
        for fixed, engine_N in zip(self.rows, scores, strict=True):
            pairs[fixed.turn].append((self.learner_logprobs[fixed.row.key][fixed.start :], engine_N))
        return {turn: mean_gap(*map(np.concatenate, zip(*both, strict=True))) for turn, both in pairs.items()}

    async def _fault(
        self, learner: LearnerGroup, engine: EngineControl, version: int, gaps: Mapping[int, float]
    ) -> str:
        by_turn = ", ".join(
            f"{gap:.2g} in turn {turn} (limit {self.band.limit(turn):.2g})" for turn, gap in gaps.items()
        )
        return (
            f"engine {engine.number} ({engine.url}) and the learner give other log-probabilities after the first weight sync: k3 "
            f"{by_turn} nats a token, for {self.band.why}. {await self._cause(learner, engine, version)} weights.gap_limit=X "
            "sets another limit, weights.gap_limit=off leaves this check out"
        )

    async def _cause(self, learner: LearnerGroup, engine: EngineControl, version: int) -> str:
        """Send the weights again by value and with checksums, and return in words what that has changed."""
        try:
            await self.resend.sync_weights(learner, [engine], version)
        except EngineError as error:
            return f"Sent again by value, with checksums: {error}. The engine's loader drops or changes these weights."
        gaps = await self._gaps(engine)
        if all(gap <= self.band.limit(turn) for turn, gap in gaps.items()):
            return (
                "Sent again by weights.transport=tensor the gap is gone: the run's transport or weights.bucket_mib loses "
                "weights; set weights.transport=tensor."
            )
        return (
            "The engine has the weights that were sent, by their checksums, so it computes another model with them: compare "
            "sampler.sglang (dtype, quantization, context_length) with learner.precision and model.path."
        )
