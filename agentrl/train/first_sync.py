"""The check after the first weight sync: engines sample turns, and the learner gives the tokens the same log-probabilities."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.batch.packing import PackOptions, RowSignals, pack
from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError, ConfigError, EngineError, ModelError, SamplerError
from agentrl.core.images import PlacedImage
from agentrl.core.types import (
    Generation,
    MaskReason,
    Message,
    Prompt,
    Provenance,
    Row,
    RowKey,
    SamplingParams,
    message_with_images,
)
from agentrl.inference.base import EngineControl
from agentrl.inference.client.control import ControlEndpoint
from agentrl.inference.client.http import EngineHttp
from agentrl.inference.client.scoring import ScoringClient
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.learner.base import LearnerGroup, RowLogprobs
from agentrl.learner.registry import make_backend
from agentrl.models.module_outputs import ModuleOutputs
from agentrl.models.tensor_dump import read_dump
from agentrl.render.renderer import ChatRenderer
from agentrl.runtime.engine_gap import GapBand, TokenGap, token_gap
from agentrl.train.reference_pass import first_difference, reference_pass
from agentrl.weight_sync.base import WeightSync
from agentrl.weight_sync.engines import OtherWeightsError

_log = logging.getLogger(__name__)

TURNS = (1, 2, 4, 8)
"""Depths of the turns that are compared."""
_CONVERSATIONS = 4
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
"""Longest length of a row. A longer conversation loses its beginning."""
_ANSWER_TOKENS = 32
"""Most tokens that an engine samples after a conversation."""
_REQUEST_S = 120.0
_DUMP_OPTION = "debug_tensor_dump_output_folder"
_GONE = 0.1
"""What is left of a gap that has gone; the tokens are those of the engine as it was, so the limits do not hold of them."""


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """A conversation of fixed text, up to a turn that the policy samples."""

    key: RowKey
    prompt: Prompt
    """If the model reads images, every second conversation has one in its last question."""
    turn: int
    """From 1."""
    params: SamplingParams


def turn_prompts(renderer: ChatRenderer, max_tokens: int, seed: int) -> list[TurnPrompt]:
    """Return the prompts of a run: four conversations in its chat format, each up to turns of several depths.

    Prompt and answer are shorter than ``max_tokens``, so that an engine that holds as many can sample the answer and score it.
    """
    rng, prompts = np.random.default_rng(seed), []
    row_tokens = min(max_tokens, _MAX_TOKENS) - 1
    answer_tokens = min(_ANSWER_TOKENS, row_tokens // 2)
    if answer_tokens < 1:
        return []
    for number in range(_CONVERSATIONS):
        exchanges = [_EXCHANGES[index] for index in rng.permutation(len(_EXCHANGES))]
        for turn in TURNS:
            has_image = renderer.reads_images and number % 2 == 0
            prompt = _cut(_prompt(renderer, exchanges[:turn], has_image=has_image), row_tokens - answer_tokens)
            params = SamplingParams(max_new_tokens=answer_tokens, seed=int(rng.integers(1 << 31)))
            prompts.append(TurnPrompt(RowKey(f"first-sync-{number}", f"turn-{turn}"), prompt, turn, params))
    return prompts


def _prompt(renderer: ChatRenderer, exchanges: Sequence[tuple[str, str]], *, has_image: bool) -> Prompt:
    """Return the tokens up to the last answer; plain lines if the chat format refuses the conversation."""
    *earlier, (question, _) = exchanges
    messages = [
        message for user, answer in earlier for message in (Message("user", user), Message("assistant", answer))
    ]
    last = Message("user", question)
    if has_image:
        from PIL import Image as pil

        last = message_with_images("user", pil.linear_gradient("L").resize((96, 64)).convert("RGB"), question)
    try:
        return renderer.render([*messages, last])
    except AgentrlError:
        lines = [line for pair in earlier for line in pair]
        return Prompt(renderer.encode("\n".join([*lines, question, ""])))


def _cut(prompt: Prompt, tokens: int) -> Prompt:
    """Return the last tokens of a prompt, so many or less: no part of an image."""
    first = max(0, len(prompt.token_ids) - tokens)
    first = max([first, *(placed.span.end for placed in prompt.images if placed.span.start < first)])
    images = tuple(placed.shift(-first) for placed in prompt.images if placed.span.start >= first)
    return Prompt(prompt.token_ids[first:], images)


@dataclass(frozen=True, slots=True)
class _SampledTurn:
    """A prompt, and what an engine has sampled after it: the tokens that are compared."""

    row: Row
    """``logprobs`` are the engine's."""
    start: int
    """The first sampled token."""
    turn: int
    images: tuple[PlacedImage, ...] = ()
    """Images of the row."""


def _sampled_turn(prompt: TurnPrompt, generation: Generation, engine: int) -> _SampledTurn:
    token_ids = np.array([*prompt.prompt.token_ids, *generation.token_ids], np.int32)
    start, images = len(prompt.prompt.token_ids), prompt.prompt.images
    is_sampled = np.arange(len(token_ids)) >= start
    logprobs = np.zeros(len(token_ids), np.float32)
    logprobs[start:] = generation.logprobs
    row = Row(
        key=RowKey(f"{prompt.key.prompt_id}-engine-{engine}", prompt.key.rollout_id),
        token_ids=token_ids,
        provenance=np.where(is_sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=is_sampled.astype(np.uint8),
        mask_reason=np.where(is_sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=logprobs,
        versions=np.where(is_sampled, 0, -1).astype(np.int32),
        requests=np.where(is_sampled, 0, -1).astype(np.int32),
        request_ids=(generation.request_id,),
        images=tuple(placed.span for placed in images),
    )
    return _SampledTurn(row, start, prompt.turn, images)


class TurnSampler(Protocol):
    """Samples with one engine; see `SGLangClient`."""

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample one turn; see `agentrl.core.sampler.Sampler`."""
        ...

    async def aclose(self) -> None:
        """Close its connections."""
        ...


class Scorer(Protocol):
    """Scores tokens with an engine; see `ScoringClient`."""

    async def score(
        self, token_ids: Sequence[int], start: int, *, images: Sequence[PlacedImage] = ()
    ) -> NDArray[np.float32]:
        """Return the log-probabilities of ``token_ids[start:]``, of a prompt with images."""
        ...

    async def aclose(self) -> None:
        """Close its connections."""
        ...


class EngineClients(Protocol):
    """Opens the connections to an engine that the check needs."""

    def sampler(self, engine: EngineControl) -> TurnSampler:
        """Return what samples with an engine."""
        ...

    def scorer(self, engine: EngineControl) -> Scorer:
        """Return what scores with an engine."""
        ...

    async def module_outputs(self, engine: EngineControl, token_ids: Sequence[int]) -> ModuleOutputs:
        """Return the outputs of the engine's modules for the last of the tokens; none if it reports none.

        Raises:
            EngineError: it refuses.
        """
        ...


@dataclass(frozen=True, slots=True)
class SGLangClients(EngineClients):
    """Connections of the check alone: a router in front of the engines would choose the engine."""

    vocabulary: Vocabulary
    reports_modules: bool = False
    """Whether the engines report outputs of modules, as the embedded one does."""
    dump_folder: Path | None = None
    """Where engines of SGLang write outputs of modules (``sampler.sglang.debug_tensor_dump_output_folder``)."""

    def sampler(self, engine: EngineControl) -> SGLangClient:
        """Return a client that samples."""
        return SGLangClient(engine.url, timeout_s=_REQUEST_S, vocabulary=self.vocabulary, number=engine.number)

    def scorer(self, engine: EngineControl) -> ScoringClient:
        """Return a client that scores."""
        name = f"engine {engine.number}"
        return ScoringClient(
            engine.url,
            name,
            timeout_s=_REQUEST_S,
            vocabulary_size=self.vocabulary.size,
            image_token_id=self.vocabulary.image_token_id,
        )

    async def module_outputs(self, engine: EngineControl, token_ids: Sequence[int]) -> ModuleOutputs:
        """Return the outputs of modules, of engines that report or write them."""
        if self.dump_folder is not None:
            scorer = self.scorer(engine)
            try:
                await engine.flush()  # a cached prefix would not be computed
                await scorer.score(token_ids, 1)
            finally:
                await scorer.aclose()
            ranks = await engine.groups.ranks()
            return await asyncio.to_thread(partial(read_dump, self.dump_folder, token_ids, tensor_ranks=ranks))
        if not self.reports_modules:
            return {}
        http = EngineHttp(engine.url, _REQUEST_S)
        try:
            reply = await ControlEndpoint(http).call("/module_outputs", {"input_ids": [*token_ids]})
        finally:
            await http.aclose()
        return {name: np.frombuffer(base64.b64decode(data), np.float32) for name, data in reply["outputs"].items()}


@dataclass(slots=True)
class FirstSyncCheck:
    """Compares engines and learner once: call `sample`, `score_learner` and `compare` in this order, after the first sync."""

    prompts: Sequence[TurnPrompt]
    packing: PackOptions
    band: GapBand
    clients: EngineClients
    resend: WeightSync
    """Sends weights again, with checksums, to find what is wrong."""
    folder: Path
    """Folder of the model, for a reference pass where the weights are right."""
    is_float32: bool = False
    """Whether the engines compute in float32."""
    _turns: dict[int, list[_SampledTurn]] = field(default_factory=dict, init=False)
    """What each engine has sampled, by its number."""
    _learner_logprobs: RowLogprobs = field(default_factory=dict, init=False)

    @classmethod
    def open(
        cls,
        config: Config,
        folder: Path,
        renderer: ChatRenderer,
        band: GapBand,
        vocabulary: Vocabulary,
        resend: WeightSync,
        dtype: str | None,
    ) -> FirstSyncCheck:
        """Return the check of a run.

        Args:
            config: of the run.
            folder: of the model.
            renderer: of its chat format.
            band: the gap that is allowed.
            vocabulary: of the policy.
            resend: sends weights by value and compares checksums.
            dtype: of the engines' weights; None: not known.
        """
        max_tokens = min(source.rollout.max_tokens for source in config.by_source().values())
        packing = PackOptions(
            tokens_per_micro=config.batch.micro_tokens,
            data_parallel_size=make_backend(config.learner).data_parallel_size,
            pad_id=renderer.pad_token_id,
        )
        prompts = turn_prompts(renderer, max_tokens, config.run.seed)
        dump_folder = config.sampler.sglang_option(_DUMP_OPTION) if config.sampler.uses_sglang else None
        clients = SGLangClients(
            vocabulary,
            reports_modules=not config.sampler.uses_sglang,
            dump_folder=Path(str(dump_folder)) if dump_folder else None,
        )
        return cls(prompts, packing, band, clients, resend, folder, dtype == "float32")

    async def sample(self, engines: Sequence[EngineControl]) -> None:
        """Let each engine sample a turn after every prompt, at temperature 1. One that fails is left out, with a warning."""
        for engine, turns in zip(
            engines, await asyncio.gather(*(self._sample(engine) for engine in engines)), strict=True
        ):
            if turns:
                self._turns[engine.number] = turns

    async def _sample(self, engine: EngineControl) -> list[_SampledTurn]:
        sampler = self.clients.sampler(engine)

        async def sample_turn(prompt: TurnPrompt) -> _SampledTurn:
            name = f"{prompt.key.prompt_id}-{prompt.key.rollout_id}"
            generation = await sampler.generate(prompt.prompt, prompt.params, session_id=name, request_id=name)
            return _sampled_turn(prompt, generation, engine.number)

        try:
            return await asyncio.gather(*map(sample_turn, self.prompts))
        except (EngineError, SamplerError) as error:
            _log.warning("the check after the first weight sync is left out for %s: %s", engine.url, error)
            return []
        finally:
            await sampler.aclose()

    def score_learner(self, learner: LearnerGroup) -> None:
        """Let the learner score what the engines have sampled, with the weights that were sent. Blocks."""
        turns = [turn for engine_turns in self._turns.values() for turn in engine_turns]
        if turns:
            rows = [turn.row for turn in turns]
            zeros = {row.key: np.zeros(len(row.token_ids), np.float32) for row in rows}
            images = {placed.span.digest: placed.image for turn in turns for placed in turn.images}
            signals = RowSignals(advantages=zeros, images=images)
            self._learner_logprobs = learner.logprobs(pack(rows, self.packing, signals))

    async def compare(self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int) -> dict[str, float]:
        """Compare the engines with the learner; return metrics of the largest gaps.

        Raises:
            ConfigError: a gap is over its limit by more than its error. The message states which weights an engine lacks, and
                what to do.
        """
        worst: dict[int, float] = {}
        for engine in engines:
            if engine.number not in self._turns:
                continue
            gaps = self._gaps(engine, [turn.row.logprobs[turn.start :] for turn in self._turns[engine.number]])
            if not self._is_within(gaps):
                raise ConfigError(await self._fault(learner, engine, version, gaps))
            worst = {turn: max(gap.mean, worst.get(turn, 0.0)) for turn, gap in gaps.items()}
        if not worst:
            return {}
        by_turn = {f"sync/gap/turn={turn}": gap for turn, gap in worst.items()}
        return {"sync/gap": max(worst.values()), "sync/gap_limit": self.band.first_turn} | by_turn

    def _gaps(self, engine: EngineControl, logprobs: Sequence[NDArray[np.float32]]) -> dict[int, TokenGap]:
        """Return the gap by depth of turn; ``logprobs`` are the engine's, of each sampled turn."""
        pairs: defaultdict[int, list[tuple[NDArray[np.float32], NDArray[np.float32]]]] = defaultdict(list)
        for turn, engine_N in zip(self._turns[engine.number], logprobs, strict=True):
            pairs[turn.turn].append((self._learner_logprobs[turn.row.key][turn.start :], engine_N))
        return {turn: token_gap(*map(np.concatenate, zip(*both, strict=True))) for turn, both in pairs.items()}

    def _is_within(self, gaps: Mapping[int, TokenGap]) -> bool:
        return all(self.band.allows(gap, turn) for turn, gap in gaps.items())

    async def _fault(
        self, learner: LearnerGroup, engine: EngineControl, version: int, gaps: Mapping[int, TokenGap]
    ) -> str:
        by_turn = ", ".join(
            f"{gap.mean:.2g} ± {gap.error:.1g} in turn {turn} (limit {self.band.limit(turn):.2g})"
            for turn, gap in gaps.items()
        )
        return (
            f"engine {engine.number} ({engine.url}) and the learner give other log-probabilities after the first weight sync: k3 "
            f"{by_turn} nats a token, for {self.band.why}. {await self._cause(learner, engine, version, gaps)} "
            "weights.gap_limit=X sets another limit, weights.gap_limit=off leaves this check out"
        )

    async def _cause(
        self, learner: LearnerGroup, engine: EngineControl, version: int, gaps: Mapping[int, TokenGap]
    ) -> str:
        """Send the weights again by value and with checksums, and return in words what that has changed."""
        checksums = "The engine has the weights that were sent, by their checksums"
        try:
            await self.resend.sync_weights(learner, [engine], version)
        except OtherWeightsError as error:
            return f"Sent again by value, with checksums: {error}. The engine's loader drops or changes these weights."
        except EngineError as error:
            checksums = f"Sent again by value, the weights cannot be compared ({error})"
        scores = await self._score(engine)
        gaps_now = self._gaps(engine, scores)
        if self._is_within(gaps_now) or all(gap.mean <= _GONE * gaps[turn].mean for turn, gap in gaps_now.items()):
            return (
                "Sent again by weights.transport=tensor the gap is gone: the run's transport or weights.bucket_mib loses "
                "weights; set weights.transport=tensor."
            )
        return f"{checksums}. {await self._compare_with_reference(learner, engine, scores)}"

    async def _compare_with_reference(
        self, learner: LearnerGroup, engine: EngineControl, scores: Sequence[NDArray[np.float32]]
    ) -> str:
        """Return in words which of both computes another model with the same weights, and where it begins to differ.

        ``scores`` are the engine's log-probabilities of what it has sampled.
        """
        turns = self._turns[engine.number]
        learner_logprobs = [self._learner_logprobs[turn.row.key][turn.start :] for turn in turns]
        gaps = [
            token_gap(learner_N, engine_N).mean for learner_N, engine_N in zip(learner_logprobs, scores, strict=True)
        ]
        worst = int(np.argmax(gaps))
        turn, token_ids = turns[worst], turns[worst].row.token_ids
        if turn.images:
            return (
                f"The largest gap, k3 {gaps[worst]:.2g}, is that of a turn with an image, of which there is no reference pass: "
                "compare sampler.sglang (dtype, and options of images) with learner.precision and model.path."
            )
        keys = "sampler.sglang (dtype, quantization, context_length) with learner.precision and model.path"
        try:
            outputs = await self.clients.module_outputs(engine, token_ids.tolist())
            reference = await asyncio.to_thread(reference_pass, self.folder, learner, token_ids, turn.start)
        except (EngineError, ModelError) as error:
            return f"One of both computes another model with them (no reference pass: {error}): compare {keys}."
        of_learner = token_gap(learner_logprobs[worst], reference.logprobs).mean
        of_engine = token_gap(reference.logprobs, scores[worst]).mean
        module = (
            first_difference(outputs, reference.outputs, is_float32=self.is_float32)
            or f"no outputs of modules to compare (SGLang writes them: sampler.sglang.{_DUMP_OPTION}, and disable_cuda_graph)"
        )
        distances = f"k3 {of_learner:.2g} to the learner, {of_engine:.2g} to the engine"
        if of_engine > of_learner:
            return (
                f"The engine computes another model with them: a reference pass of transformers has {distances}; {module}. "
                f"Compare {keys}."
            )
        return (
            f"The learner computes another model with them: a reference pass of transformers has {distances}. Compare "
            "learner.backend, learner.precision and model.path."
        )

    async def _score(self, engine: EngineControl) -> list[NDArray[np.float32]]:
        """Let an engine score what it has sampled."""
        scorer = self.clients.scorer(engine)
        try:
            turns = self._turns[engine.number]
            return await asyncio.gather(
                *(scorer.score(turn.row.token_ids.tolist(), turn.start, images=turn.images) for turn in turns)
            )
        finally:
            await scorer.aclose()
