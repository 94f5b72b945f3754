"""Engines and learner are compared after the first sync, and a run whose engines have other weights stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import PackOptions
from agentrl.config.load import validate
from agentrl.core.errors import ConfigError, EngineError, SamplerError
from agentrl.core.images import PlacedImage
from agentrl.core.types import FinishReason, Generation, Message, Prompt, RowKey, SamplingParams, message_with_images
from agentrl.inference.base import EngineControl
from agentrl.models.resolve import resolve_model
from agentrl.render.registry import load_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.runtime.engine_gap import GapBand, TokenGap, gap_band, token_gap
from agentrl.runtime.engine_precision import read_precision
from agentrl.testing import FakeEngine
from agentrl.train.first_sync import TURNS, FirstSyncCheck, TurnPrompt, turn_prompts
from agentrl.train.reference_pass import first_difference
from agentrl.weight_sync.engines import OtherWeightsError

EXPERTS = {"num_experts": 8}
FLOAT8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
INVARIANT = {
    "learner": {"precision": "float32", "batch_invariant": True, "device": "cpu", "threads": 1},
    "sampler": {"embedded": {"batch_invariant": True}},
}
SGLANG = {"sampler": {"backend": "sglang"}}
CACHE = {"sampler": {"backend": "sglang", "sglang": {"kv-cache-dtype": "fp8_e5m2"}}}


class Letters:
    """A chat format of single letters."""

    pad_token_id = 0
    reads_images = False

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(ord(letter) % 90 for letter in text)

    def render(self, messages: Sequence[Message], tools: object = ()) -> Prompt:
        return Prompt(self.encode("".join(f"<{message.role}>{message.content}" for message in messages)))


class Learner:
    """Gives token ``n`` the log-probability ``-n / 10``."""

    images: Collection[PlacedImage] = ()

    def logprobs(self, batch: GlobalBatch) -> dict[RowKey, NDArray[np.float32]]:
        self.images = [placed for micro in batch.micro[0] for placed in micro.images]
        return {
            key: logprobs(micro.token_ids_L[micro.row_L == row].tolist(), 0)
            for micro in batch.micro[0]
            for row, key in enumerate(micro.keys)
        }


def logprobs(token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
    return -np.array(token_ids[start:], np.float32) / 10


PROMPTS = turn_prompts(Letters(), 1 << 20, seed=3)  # type: ignore[arg-type]


class Engines:
    """What engines sample and score: the learner's log-probabilities, with an error of a size by engine and number of tokens."""

    def __init__(
        self, *errors: float, late: float = 0.0, lost: str = "", resent: float | None = None, shards: bool = False
    ) -> None:
        self.errors, self.late, self.lost, self.resent, self.shards = [*errors], late, lost, resent, shards
        self.engines = [FakeEngine(number) for number in range(len(errors))]
        self.broken: set[int] = set()
        self.scored_images: list[PlacedImage] = []

    def sampler(self, engine: EngineControl) -> Client:
        return Client(self, engine.number)

    scorer = sampler

    async def module_outputs(self, engine: EngineControl, token_ids: Sequence[int]) -> dict[str, NDArray[np.float32]]:
        return {}

    def logprobs(self, engine: int, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        scores = logprobs(token_ids, start)
        error = self.errors[engine] + (self.late if start > 250 else 0.0)
        return scores + error * np.where(np.arange(len(scores)) % 2, 1, -1).astype(np.float32)

    async def sync_weights(self, learner: object, engines: Sequence[EngineControl], version: int) -> None:
        if self.lost:
            raise OtherWeightsError(f"its weights are not those that were sent: {self.lost}")
        if self.shards:
            raise EngineError("it has 2 parts with checksums")
        if self.resent is not None:
            self.errors[engines[0].number] = self.resent

    def check(self, prompts: Sequence[TurnPrompt] = PROMPTS, learner: Any = None) -> dict[str, float]:
        band = GapBand(2e-3, "16-bit weights")
        check = FirstSyncCheck(prompts, PackOptions(4096), band, self, self, Path("/no/model"))  # type: ignore[arg-type]
        learner = learner or Learner()

        async def run() -> dict[str, float]:
            await check.sample(self.engines)
            check.score_learner(learner)
            return await check.compare(learner, self.engines, 0)

        return asyncio.run(run())


@dataclass
class Client:
    engines: Engines
    number: int

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str) -> Generation:
        if self.number in self.engines.broken:
            raise SamplerError("its process ended")
        ids = tuple(int(token) for token in np.random.default_rng(params.seed).integers(0, 90, params.max_new_tokens))
        scores = self.engines.logprobs(self.number, [*prompt.token_ids, *ids], len(prompt.token_ids))
        return Generation(ids, tuple(scores.tolist()), FinishReason.LENGTH, ((0, 0),), request_id=request_id)

    async def score(
        self, token_ids: Sequence[int], start: int, *, images: Sequence[PlacedImage] = ()
    ) -> NDArray[np.float32]:
        self.engines.scored_images += images
        return self.engines.logprobs(self.number, token_ids, start)

    async def aclose(self) -> None: ...


def test_prompts_are_seeded_and_have_turns_of_several_depths() -> None:
    assert [prompt.turn for prompt in PROMPTS] == [*TURNS] * 4
    assert turn_prompts(Letters(), 1 << 20, seed=3) == PROMPTS  # type: ignore[arg-type]
    assert turn_prompts(Letters(), 1 << 20, seed=4) != PROMPTS  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens", [3, 4, 40, 500])
def test_prompt_and_answer_are_shorter_than_what_an_engine_holds(max_tokens: int) -> None:
    for prompt in turn_prompts(Letters(), max_tokens, seed=3):  # type: ignore[arg-type]
        assert prompt.prompt.token_ids
        assert len(prompt.prompt.token_ids) + prompt.params.max_new_tokens <= max_tokens - 1


@pytest.fixture(scope="module")
def reader() -> ChatRenderer:
    return load_renderer(resolve_model("geometry-warm"))


@pytest.mark.parametrize("max_tokens", [4, 60, 200, 1 << 20])
def test_a_policy_that_reads_images_is_compared_on_some_which_no_limit_divides(
    reader: ChatRenderer, max_tokens: int
) -> None:
    prompts = turn_prompts(reader, max_tokens, seed=3)
    images = [placed for prompt in prompts for placed in prompt.prompt.images]
    assert len(images) == (8 if max_tokens >= 200 else 0)
    for prompt in prompts:
        assert len(prompt.prompt.token_ids) + prompt.params.max_new_tokens <= min(max_tokens, 1024) - 1
        whole = reader.render((message_with_images("user", images[0].image),)) if images else prompt.prompt
        for placed in prompt.prompt.images:
            [expected] = whole.images
            assert (
                prompt.prompt.token_ids[placed.span.start : placed.span.end]
                == whole.token_ids[expected.span.start : expected.span.end]
            )


def test_learner_and_engines_get_the_images_of_the_prompts(reader: ChatRenderer) -> None:
    prompts, learner = turn_prompts(reader, 400, seed=3), Learner()
    assert Engines(0.01).check(prompts, learner)["sync/gap"] == pytest.approx(0.01**2 / 2, rel=0.05)
    digests = {placed.span.digest for prompt in prompts for placed in prompt.prompt.images}
    assert {placed.span.digest for placed in learner.images} == digests != set()
    engines = Engines(0.5)
    with pytest.raises(ConfigError, match=r"is that of a turn with an image|no reference pass"):
        engines.check(prompts)
    assert {placed.span.digest for placed in engines.scored_images} == digests


def test_engines_within_the_band_are_measured() -> None:
    metrics = Engines(0.01, 0.02, late=0.01).check()
    assert metrics["sync/gap_limit"] == 2e-3
    assert metrics["sync/gap"] == metrics["sync/gap/turn=8"] == pytest.approx(0.03**2 / 2, rel=0.05)
    assert metrics["sync/gap/turn=1"] == pytest.approx(0.02**2 / 2, rel=0.05)


def test_an_engine_that_is_lost_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    engines = Engines(0.01, 0.5)
    engines.broken = {1}
    assert engines.check()["sync/gap"] == pytest.approx(0.01**2 / 2, rel=0.05)
    assert "left out for http://127.0.0.1:10: its process ended" in caplog.text


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        (Engines(0.0, 0.5, lost="3 of 9 weights differ: a.weight"), r"engine 1 .*3 of 9 weights differ: a\.weight"),
        (Engines(0.5, resent=0.0), "the gap is gone: the run's transport"),
        (Engines(0.5, resent=0.1), "the gap is gone: the run's transport"),
        (Engines(0.5, resent=0.4), "by their checksums. One of both computes another model"),
        (Engines(0.5), r"by their checksums\. One of both .*\(no reference pass: .*/no/model.*sampler\.sglang"),
        (
            Engines(0.5, shards=True),
            r"cannot be compared \(it has 2 parts with checksums\)\. One of both computes another",
        ),
        (Engines(0.0, late=0.5), r"k3 0 ± 0 in turn 1 .* in turn 8 \(limit 0\.0037\)"),
        (Engines(float("nan")), "k3 nan"),
    ],
)
def test_a_run_whose_engines_have_other_weights_stops(engines: Engines, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        engines.check()
    assert "weights.gap_limit=X" in str(raised.value)


def test_k3_is_that_of_its_formula() -> None:
    learner, engine = np.array([-1.0, -2.0], np.float32), np.array([-1.5, -1.0], np.float32)
    gaps = np.exp(0.5) - 1.5, np.exp(-1.0)
    assert token_gap(learner, engine) == pytest.approx(
        (sum(gaps) / 2, abs(gaps[0] - gaps[1]) / 2 / np.sqrt(2)), rel=1e-6
    )


def test_a_gap_is_too_large_if_its_error_does_not_explain_it() -> None:
    band = GapBand(2e-3)
    assert band.allows(TokenGap(1.9e-3, 0.0), 1)
    assert band.allows(TokenGap(2.4e-3, 3e-4), 1), "a few of a hundred tokens"
    assert not band.allows(TokenGap(2.4e-3, 1e-4), 1)
    assert band.allows(TokenGap(3.9e-3, 0.0), 9)
    assert not band.allows(TokenGap(0.5, 0.1), 1), "half of the weights are others"
    assert not GapBand(0.0).allows(TokenGap(1e-9, 1e-9), 1), "equal bits"


@pytest.mark.parametrize(
    ("changes", "model", "dtype", "limit", "why"),
    [
        ({}, {}, "float32", 1e-4, "float32 weights"),
        ({}, EXPERTS, "float32", 1e-3, "float32 weights and experts"),
        (INVARIANT, {}, "float32", 0.0, "learner.batch_invariant=true, with which both compute the same bits"),
        ({"learner": {"precision": "bfloat16"}}, {}, "float32", 2e-3, "16-bit weights"),
        ({}, {}, None, 2e-3, "16-bit weights"),
        ({}, EXPERTS, "bfloat16", 2e-2, "16-bit weights and experts"),
        ({}, {"text_config": EXPERTS}, "bfloat16", 2e-2, "16-bit weights and experts"),
        (SGLANG | {"weights": {"dtype": "float8"}}, {}, "float8_e4m3fn", 2e-2, "float8 weights"),
        (SGLANG | {"weights": {"dtype": "float8"}}, EXPERTS, "float8_e4m3fn", 5e-2, "float8 weights and experts"),
        (SGLANG, FLOAT8, "float8_e4m3fn", 2e-2, "float8 weights"),
        (SGLANG | {"weights": {"dtype": "bfloat16"}}, FLOAT8, "bfloat16", 2e-3, "16-bit weights"),
        ({"sampler": {"url": "http://a:1"}}, {}, "float8_e4m3fn", 2e-2, "float8 weights"),
        ({"learner": {"precision": "bfloat16", "fp8": True}}, {}, "bfloat16", 2e-2, "float8 weights"),
        (CACHE, {}, "bfloat16", 2e-2, "a float8 KV cache"),
        (CACHE, EXPERTS, "bfloat16", 5e-2, "a float8 KV cache and experts"),
        ({"weights": {"gap_limit": 0.3}}, EXPERTS, "bfloat16", 0.3, "weights.gap_limit=0.3"),
    ],
)
def test_the_band_is_that_of_the_precision(
    changes: dict[str, object], model: dict[str, object], dtype: str | None, limit: float, why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = validate({"learner": {"precision": "float32"}} | changes, [])
    band = gap_band(config, read_precision(config, tmp_path), dtype)
    assert band is not None
    assert (band.first_turn, band.limit(1), band.limit(9)) == pytest.approx((limit, limit, 2 * limit))
    assert band.why == why


def test_no_band_without_the_check(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = validate({"weights": {"gap_limit": "off"}}, [])
    assert gap_band(config, read_precision(config, tmp_path), "float32") is None


@pytest.mark.parametrize(
    ("distances", "is_float32", "expected"),
    [
        ({"embed": 0.0, "layers.0": 1e-6, "layers.1": 0.3, "norm": 0.5}, True, "layers.1 (relative distance 0.3)"),
        ({"embed": 2e-3, "layers.0": 0.02, "layers.1": 0.06, "norm": 0.1}, False, None),
        ({"embed": 2e-3, "layers.0": 0.02, "layers.1": 0.3}, False, "layers.1 (relative distance 0.3)"),
        ({"embed": 0.0, "layers.0": float("nan")}, False, "layers.0 (relative distance nan)"),
        ({}, True, None),
    ],
)
def test_the_first_module_that_rounding_does_not_explain(
    distances: dict[str, float], is_float32: bool, expected: str | None
) -> None:
    reference = {name: np.array([3.0, 4.0], np.float32) for name in ("embed", "layers.0", "layers.1", "norm")}
    engine = {name: reference[name] * np.float32(1 + distance) for name, distance in distances.items()}
    difference = first_difference(engine, reference, is_float32=is_float32)
    assert difference == (expected and f"the first module whose output differs is {expected}")
