"""Engines and learner are compared after the first sync, and a run whose engines have other weights stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import PackOptions
from agentrl.config.load import validate
from agentrl.core.errors import ConfigError, EngineError
from agentrl.core.types import Message, Prompt, RowKey
from agentrl.inference.base import EngineControl
from agentrl.testing import FakeEngine
from agentrl.train.first_sync import TURNS, FirstSyncCheck, fixed_rows
from agentrl.weight_sync.gap import GapBand, gap_band, mean_gap

EXPERTS = {"num_experts": 8}


class Letters:
    """A chat format of single letters."""

    pad_token_id = 0

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(ord(letter) % 90 for letter in text)

    def render(self, messages: Sequence[Message], tools: object = ()) -> Prompt:
        return Prompt(self.encode("".join(f"<{message.role}>{message.content}" for message in messages)))


class Learner:
    """Gives token ``n`` the log-probability ``-n / 10``."""

    def logprobs(self, batch: GlobalBatch) -> dict[RowKey, NDArray[np.float32]]:
        return {fixed.row.key: logprobs(fixed.row.token_ids.tolist(), 0) for fixed in ROWS}


def logprobs(token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
    return -np.array(token_ids[start:], np.float32) / 10


ROWS = fixed_rows(Letters(), 1 << 20, seed=3)


class Engines:
    """What engines score: the learner's log-probabilities, with an error of a size by engine and number of tokens."""

    def __init__(self, *errors: float, late: float = 0.0, lost: str = "", resent: float | None = None) -> None:
        self.errors, self.late, self.lost, self.resent = [*errors], late, lost, resent
        self.engines = [FakeEngine(number) for number in range(len(errors))]

    def open(self, engine: EngineControl) -> Engines:
        self.number = engine.number
        return self

    async def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        scores = logprobs(token_ids, start)
        error = self.errors[self.number] + (self.late if start > 250 else 0.0)
        return scores + error * np.where(np.arange(len(scores)) % 2, 1, -1).astype(np.float32)

    async def aclose(self) -> None:
        pass

    async def sync_weights(self, learner: object, engines: Sequence[EngineControl], version: int) -> None:
        if self.lost:
            raise EngineError(f"its weights are not those that were sent: {self.lost}")
        if self.resent is not None:
            self.errors[engines[0].number] = self.resent

    def check(self) -> dict[str, float]:
        check = FirstSyncCheck(ROWS, PackOptions(4096), GapBand(2e-3, "16-bit weights"), self.open, self)
        check.score_learner(Learner())
        return asyncio.run(check.check(Learner(), self.engines, 0))


def test_rows_are_seeded_and_have_turns_of_several_depths() -> None:
    assert [row.turn for row in ROWS] == [*TURNS] * 2
    again, other = fixed_rows(Letters(), 1 << 20, seed=3), fixed_rows(Letters(), 1 << 20, seed=4)
    assert [row.row.token_ids.tolist() for row in again] == [row.row.token_ids.tolist() for row in ROWS]
    assert [row.row.token_ids.tolist() for row in other] != [row.row.token_ids.tolist() for row in ROWS]
    short = fixed_rows(Letters(), 40, seed=3)
    assert all(len(row.row.token_ids) <= 40 and row.start >= 1 and row.row.mask[row.start :].all() for row in short)


def test_engines_within_the_band_are_measured() -> None:
    metrics = Engines(0.01, 0.02).check()
    assert metrics["sync/gap_limit"] == 2e-3
    assert metrics["sync/gap"] == pytest.approx(0.02**2 / 2, rel=0.05)


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        (Engines(0.0, 0.5, lost="3 of 9 weights differ: a.weight"), r"engine 1 .*3 of 9 weights differ: a\.weight"),
        (Engines(0.5, resent=0.0), "the gap is gone: the run's transport"),
        (Engines(0.5), r"by their checksums, so it computes another model.*sampler\.sglang"),
        (Engines(0.0, late=0.5), r"k3 0 in turn 1 .* in turn 8 \(limit 0\.094\)"),
        (Engines(float("nan")), "k3 nan"),
    ],
)
def test_a_run_whose_engines_have_other_weights_stops(engines: Engines, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        engines.check()
    assert "weights.gap_limit=X" in str(raised.value)


def test_k3_is_that_of_its_formula() -> None:
    learner, engine = np.array([-1.0, -2.0], np.float32), np.array([-1.5, -1.0], np.float32)
    assert mean_gap(learner, engine) == pytest.approx((np.exp(0.5) - 1.5 + np.exp(-1.0)) / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "model", "dtype", "limit"),
    [
        ({}, {}, "float32", 1e-4),
        ({"learner": {"precision": "bfloat16"}}, {}, "float32", 2e-3),
        ({}, {}, None, 2e-3),
        ({}, EXPERTS, "bfloat16", 2e-2),
        ({}, {"text_config": EXPERTS}, "bfloat16", 2e-2),
        ({"sampler": {"sglang": {"quantization": "fp8"}}}, {}, "bfloat16", 2e-2),
        ({"sampler": {"sglang": {"kv-cache-dtype": "fp8_e5m2"}}}, EXPERTS, "bfloat16", 5e-2),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "bfloat16", 2e-2),
        ({"weights": {"gap_limit": 0.3}}, EXPERTS, "bfloat16", 0.3),
    ],
)
def test_the_band_is_that_of_the_precision(
    changes: dict[str, object], model: dict[str, object], dtype: str | None, limit: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = validate({"learner": {"precision": "float32"}} | changes, [])
    band = gap_band(config, tmp_path, dtype)
    assert band is not None
    assert (band.first_turn, band.limit(1), band.limit(9)) == pytest.approx((limit, 25 * limit, 50 * limit))


def test_no_band_without_the_check(tmp_path: Path) -> None:
    assert gap_band(validate({"weights": {"gap_limit": "off"}}, []), tmp_path, "float32") is None
