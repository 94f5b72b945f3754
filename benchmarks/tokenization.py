"""Cost of exact tokens against retokenizing the whole conversation every turn; for ``agentrl bench masks``."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentrl.core.env import Env
from agentrl.core.types import FinishReason, Generation, Message, Prompt, Row, SamplingParams
from agentrl.episode.context import EpisodeContext
from agentrl.episode.conversation import Conversation
from agentrl.episode.limits import Limits
from agentrl.episode.state import EpisodeState
from agentrl.render.base import Renderer

_TEXT = (
    "the river of town found page was born in capital searching result where old first king named city after answer who "
    "wrote it later moved north mother bridge from 1873 under film year and then question because next document says"
)


@dataclass(frozen=True, slots=True)
class LongEpisode:
    """Observations and samples of an episode. All observations differ, so that no cache has their tokens."""

    observed: tuple[str, ...]
    """Observation before each turn."""
    samples: tuple[Generation, ...]
    """Sample of each turn."""


def long_episode(
    tokenizer: PreTrainedTokenizerBase, end_token_id: int, turns: int, tokens: int, seed: int
) -> LongEpisode:
    """Return an episode of ``turns`` turns, each of about ``tokens`` tokens, half of them observed and half sampled."""
    source = random.Random(seed)
    half = tokens // 2

    def ids() -> list[int]:
        text = " ".join(source.choices(_TEXT.split(), k=half))
        return list(tokenizer.encode(text, add_special_tokens=False))[: half - 1]

    observed = tuple(str(tokenizer.decode(ids())) for _ in range(turns))
    samples = tuple(
        Generation(
            (*words, end_token_id), (-0.5,) * (len(words) + 1), FinishReason.STOP, ((0, 1),), 0, f"request-{turn}"
        )
        for turn, words in enumerate(ids() for _ in range(turns))
    )
    return LongEpisode(observed, samples)


async def converse(renderer: Renderer, episode: LongEpisode) -> list[Row]:
    """Run the conversation with the episode runner and an engine that takes no time, and return its rows."""
    unlimited = 1 << 30
    with ThreadPoolExecutor(1) as pool:  # starts no thread until an environment needs one
        context = EpisodeContext(
            env_factory=Env,
            renderer=renderer,
            sampler=_Recorded(episode),
            tool_clients={},
            limits=Limits(
                max_turns=len(episode.samples),
                max_tokens=unlimited,
                max_seconds=float(unlimited),
                max_new_tokens=unlimited,
            ),
            sampling=SamplingParams(),
            pool=pool,
        )
        state = EpisodeState("bench", seed=0)
        conversation = Conversation(context, state)
        conversation.begin([Message("user", episode.observed[0])], "bench")
        for text in (*episode.observed[1:], None):
            sample = await conversation.sample()
            assert sample is not None, "the limits allow all turns"
            conversation.answer(sample, () if text is None else (Message("user", text),), over=text is None)
        return state.trajectory.rows("bench", "bench")


class _Recorded:
    """A sampler that returns the episode's samples in order."""

    def __init__(self, episode: LongEpisode) -> None:
        self._samples = iter(episode.samples)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        return next(self._samples)

    async def abort(self, request_id: str) -> None:
        """Do nothing: no request is in progress."""

    async def close_session(self, session_id: str) -> None:
        """Do nothing: there is no session state."""


def retokenise(tokenizer: PreTrainedTokenizerBase, episode: LongEpisode, texts: list[str]) -> float:
    """Return the CPU seconds of tokenizing the whole conversation with the chat template every turn.

    Args:
        tokenizer: with a chat template.
        episode: the conversation.
        texts: the samples as text, by turn; decoding is not counted.
    """
    messages: list[dict[str, str]] = []
    start = time.thread_time()
    for observed, sampled_text in zip(episode.observed, texts, strict=True):
        messages.append({"role": "user", "content": observed})
        ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        assert len(ids) > 0
        messages.append({"role": "assistant", "content": sampled_text})
    return time.thread_time() - start
