"""What exact tokens cost, against tokenising the whole conversation every turn: behind ``agentrl bench masks``."""

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
    """What is read and said in an episode. Every observation is a text of its own: no cache may spare us its tokens."""

    observed: tuple[str, ...]
    """What the policy reads before each turn."""
    said: tuple[Generation, ...]
    """What it says to it."""


def long_episode(
    tokenizer: PreTrainedTokenizerBase, end_token_id: int, turns: int, tokens: int, seed: int
) -> LongEpisode:
    """Return an episode of ``turns`` turns, each of about ``tokens`` tokens, half of them read and half of them said."""
    source = random.Random(seed)
    half = tokens // 2

    def ids() -> list[int]:
        text = " ".join(source.choices(_TEXT.split(), k=half))
        return list(tokenizer.encode(text, add_special_tokens=False))[: half - 1]

    observed = tuple(str(tokenizer.decode(ids())) for _ in range(turns))
    said = tuple(
        Generation(
            (*words, end_token_id), (-0.5,) * (len(words) + 1), FinishReason.STOP, ((0, 1),), 0, f"request-{turn}"
        )
        for turn, words in enumerate(ids() for _ in range(turns))
    )
    return LongEpisode(observed, said)


async def converse(renderer: Renderer, episode: LongEpisode) -> list[Row]:
    """Hold the conversation as a run does, with an engine that takes no time, and return its rows."""
    room = 1 << 30
    with ThreadPoolExecutor(1) as pool:  # starts no thread until an environment wants one
        context = EpisodeContext(
            env_factory=Env,
            renderer=renderer,
            sampler=_Recorded(episode),
            tool_clients={},
            limits=Limits(max_turns=len(episode.said), max_tokens=room, max_seconds=float(room), max_new_tokens=room),
            sampling=SamplingParams(),
            pool=pool,
        )
        state = EpisodeState("bench", seed=0)
        conversation = Conversation(context, state)
        conversation.begin([Message("user", episode.observed[0])], "bench")
        for text in (*episode.observed[1:], None):
            said = await conversation.sample()
            assert said is not None, "the limits leave room for all turns"
            conversation.answer(said, () if text is None else (Message("user", text),), over=text is None)
        return state.trajectory.rows("bench", "bench")


class _Recorded:
    """A sampler that says what the episode holds, turn by turn."""

    def __init__(self, episode: LongEpisode) -> None:
        self._said = iter(episode.said)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        return next(self._said)

    async def abort(self, request_id: str) -> None:
        """Nothing runs."""

    async def close_session(self, session_id: str) -> None:
        """Nothing is kept."""


def retokenise(tokenizer: PreTrainedTokenizerBase, episode: LongEpisode, texts: list[str]) -> float:
    """Return the seconds of CPU time that it takes to tokenise the whole conversation by the chat template every turn.

    Args:
        tokenizer: with a chat template.
        episode: the conversation.
        texts: what was said as text, by turn; decoding it is not counted.
    """
    messages: list[dict[str, str]] = []
    start = time.thread_time()
    for observed, said in zip(episode.observed, texts, strict=True):
        messages.append({"role": "user", "content": observed})
        ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        assert len(ids) > 0
        messages.append({"role": "assistant", "content": said})
    return time.thread_time() - start
