"""Judge models: a model reads an answer, alone or next to another one, and writes a score."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeVar

import numpy as np

from agentrl.clients.chat_completions import open_chat_model
from agentrl.config.rewards import JudgeConfig, RewardFunctionConfig
from agentrl.core.chat_endpoint import ChatEndpoint
from agentrl.core.errors import ConfigError, EpisodeError, JudgeError
from agentrl.core.registry import reward_function
from agentrl.core.types import FinishReason, SamplingParams
from agentrl.core.user_code import user_error
from agentrl.rewards.functions import FunctionRunner, read_score, short_text
from agentrl.rewards.judge_prompts import JudgePrompt, judged_answer, reference
from agentrl.rewards.sample import Sample
from agentrl.rewards.scoring import Outcome

T = TypeVar("T")
TIE = 0.5
"""The reward of an answer that no other one of its group can be compared with."""


@dataclass(slots=True)
class Judgement:
    """The judgements of one answer or pair, and their cost.

    Its value is that of all of them, or there is none: the mean of those that happened to succeed would move the mean of the
    sample's group.
    """

    values: list[float] = field(default_factory=list)
    """From 0 to 1, those that succeeded."""
    errors: list[EpisodeError] = field(default_factory=list)
    """Errors of those that failed."""
    calls: float = 0.0
    failed_calls: float = 0.0
    """Calls without a score."""
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    seconds: float = 0.0
    """Duration of all calls, summed."""

    def mean(self) -> float:
        """Return the mean of the values; none may have failed."""
        assert not self.errors, "it has no value"
        return float(np.mean(self.values))

    def metrics(self, share: float = 1.0) -> dict[str, float]:
        """Return the cost, of which a sample has a share."""
        names = ("calls", "failed_calls", "prompt_tokens", "completion_tokens", "seconds")
        return {name: share * getattr(self, name) for name in names}


class JudgeScorer:
    """Implements `agentrl.rewards.scoring.Scorer` with a judge model.

    Args:
        config: with the section ``judge``.
        key: configuration key of that section, for messages.
        model: the judge; by default the one at ``judge.endpoint``. Only a check has none with ``judge.model``.

    Raises:
        ConfigError: its template or its function ``check`` cannot be used.
    """

    metric_prefix = "judge/"

    def __init__(self, config: RewardFunctionConfig, key: str, model: ChatEndpoint | None = None) -> None:
        assert config.judge is not None
        self._config: JudgeConfig = config.judge
        self._key = key
        self._prompt = JudgePrompt(self._config, key)
        if model is None and self._config.endpoint is not None:
            model = open_chat_model(self._config.endpoint, f"{key}.endpoint")
        self._model = model
        check = self._config.check
        self._check = None if check is None else FunctionRunner(reward_function(check), check, config.timeout_s)
        if self._check is not None and self._check.group:
            raise ConfigError(f"{key}.check={check} takes a group; it must score one sample")
        self.group = self._config.compares_group
        self._is_single = self._config.mode != "pairwise" and self._config.judgements == 1
        """Whether a reward needs one judgement: a request that fails costs others nothing."""

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the judge's rewards, from 0 to 1. An empty answer gets 0, and loses, without a call."""
        assert self._model is not None, "the run has engines for judge.model"
        async with self._model.keep_connections():
            outcomes = await self._compare_group(samples) if self.group else await _gather(map(self._judge, samples))
            return list(await _gather(map(self._add_agreement, samples, outcomes)))

    async def _judge(self, sample: Sample) -> Outcome:
        answer = judged_answer(sample, self._config)
        if not answer:
            return Outcome(0.0, Judgement().metrics())
        if self._config.mode == "pairwise":
            judgement = await self._compare(sample, answer, reference(sample))
        else:
            judgement = await self._repeat(sample, (answer,))
        metrics = judgement.metrics() | _agreement(judgement.values)
        if judgement.errors:
            return Outcome(None, metrics, judgement.errors[0])
        return Outcome(judgement.mean(), metrics)

    async def _compare_group(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Compare each pair of a group. The two samples of a comparison that failed have no reward.

        So a sample has the reward that it has if no call fails, or none: a failure moves no other reward.
        """
        answers = [judged_answer(sample, self._config) for sample in samples]
        pairs = [*combinations(range(len(samples)), 2)]
        judgements = await _gather(self._compare(samples[i], answers[i], answers[j]) for i, j in pairs)
        outcomes = []
        for number in range(len(samples)):
            comparisons = [
                (pair[0] == number, result) for pair, result in zip(pairs, judgements, strict=True) if number in pair
            ]
            costs = [result.metrics(0.5) for _, result in comparisons]
            metrics = {name: sum(cost[name] for cost in costs) for name in Judgement().metrics()}
            agreements = [_agreement(result.values)["agreement"] for _, result in comparisons if len(result.values) > 1]
            metrics |= {"agreement": float(np.mean(agreements))} if agreements else {}
            errors = [error for _, result in comparisons for error in result.errors]
            if errors:
                outcomes.append(Outcome(None, metrics, errors[0]))
                continue
            wins = [result.mean() if is_first else 1 - result.mean() for is_first, result in comparisons]
            outcomes.append(Outcome(float(np.mean(wins)) if wins else TIE, metrics))
        return outcomes

    async def _compare(self, sample: Sample, answer: str, other_answer: str) -> Judgement:
        """Compare two answers, in both orders with ``swap``. The values are of the first, one for each repetition and order."""
        if not (answer and other_answer):
            return Judgement([TIE if answer == other_answer else float(bool(answer))])
        judgement = await self._repeat(sample, (answer, other_answer))
        if self._config.swap:
            swapped = await self._repeat(sample, (other_answer, answer))
            values = [*judgement.values, *(1 - value for value in swapped.values)]
            judgement = Judgement(
                values,
                [*judgement.errors, *swapped.errors],
                judgement.calls + swapped.calls,
                judgement.failed_calls + swapped.failed_calls,
                judgement.prompt_tokens + swapped.prompt_tokens,
                judgement.completion_tokens + swapped.completion_tokens,
                judgement.seconds + swapped.seconds,
            )
        return judgement

    async def _repeat(self, sample: Sample, answers: tuple[str, ...]) -> Judgement:
        messages, judgement = self._prompt.messages(sample, *answers), Judgement()
        seed = zlib.crc32(repr(messages).encode("utf-8", "surrogatepass"))
        results = await _gather(
            self._call(messages, judgement, (seed + number * self._config.tries) % 2**31)
            for number in range(self._config.judgements)
        )
        judgement.values = [result for result in results if not isinstance(result, EpisodeError)]
        judgement.errors = [result for result in results if isinstance(result, EpisodeError)]
        return judgement

    async def _call(self, messages: list[dict[str, str]], judgement: Judgement, seed: int) -> float | EpisodeError:
        """Return one judgement, or why there is none, and add its cost."""
        config, model = self._config, self._model
        assert model is not None
        fault: EpisodeError = JudgeError("it was not requested")
        for _ in range(config.tries):
            params = SamplingParams(
                max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=seed % 2**31
            )
            begun = time.monotonic()
            judgement.calls += 1
            try:
                reply = await model.reply(messages, (), params)
            except EpisodeError as error:  # with the same seed it is the same judgement
                judgement.failed_calls += 1
                fault = error
                if self._is_single:  # the client has sent it again already
                    break
                continue
            finally:
                judgement.seconds += time.monotonic() - begun
            judgement.prompt_tokens += reply.usage.prompt_tokens
            judgement.completion_tokens += reply.usage.completion_tokens
            text = reply.message.content
            value = None if reply.finish_reason is FinishReason.LENGTH else self._prompt.read(text)
            if value is not None:
                return value
            judgement.failed_calls += 1
            seed += 1
            cut = f", and {self._key}.max_new_tokens={config.max_new_tokens} ended it"
            cut = cut if reply.finish_reason is FinishReason.LENGTH else ""
            fault = JudgeError(
                f"the judge {model.model} wrote no score ({self._key}.pattern){cut}: {short_text(text[-400:])}"
            )
        return fault

    async def _add_agreement(self, sample: Sample, outcome: Outcome) -> Outcome:
        """Add how far the reward agrees with that of the function ``check``."""
        if self._check is None or outcome.reward is None:
            return outcome
        try:
            checked = read_score(await self._check([sample]), None).reward
        except BaseException as error:
            return Outcome(None, outcome.metrics, user_error(error))
        assert checked is not None
        return Outcome(outcome.reward, {**outcome.metrics, "label_agreement": 1 - abs(outcome.reward - checked)})


def _agreement(values: Sequence[float]) -> dict[str, float]:
    """Return 1 minus the mean difference of two judgements of the same; empty with fewer than two."""
    differences = [abs(first - second) for first, second in combinations(values, 2)]
    return {"agreement": 1 - float(np.mean(differences))} if differences else {}


async def _gather(work: Iterable[Awaitable[T]]) -> list[T]:
    return list(await asyncio.gather(*work))
