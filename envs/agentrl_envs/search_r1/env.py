"""Search-R1: answer a question by searching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl import (
    Action,
    ConfigError,
    Env,
    Info,
    Message,
    Observation,
    Step,
    Task,
    TaskError,
    ToolCall,
    ToolCalls,
    ToolResult,
    ToolResults,
    ToolStatus,
)
from agentrl.rewards import exact_match, squad_normalize

from .protocol import INVALID_ACTION, PROMPT, STOP, documents, information, parse


class SearchR1Env(Env):
    """The published protocol. ``task.answer`` is the accepted answer or a list of them.

    ``task.metadata["corpus"]`` names the corpus to search, if the server has several.
    """

    blocking: ClassVar[bool] = False
    stop: ClassVar[tuple[str, ...]] = STOP
    tool_names: ClassVar[tuple[str, ...]] = ("search",)

    def __init__(
        self,
        *,
        topk: int = 3,
        max_searches: int = 4,
        observation_max_chars: int = 2000,
        format_reward: float = 0.0,
        shuffle_documents: bool = False,
        prompt: str = PROMPT,
    ) -> None:
        """Set the protocol's parameters.

        Args:
            topk: documents per search.
            max_searches: turns that may search, invalid turns included; then one last turn follows, in which a search is not run
                and anything but an answer truncates the episode.
            observation_max_chars: limit of the documents of one search; 2,000 characters are about the published
                500 tokens of English.
            format_reward: reward of a wrong answer at the end of an episode without an invalid turn.
            shuffle_documents: show the documents in random order instead of best first.
            prompt: the prompt around ``{question}``.

        Raises:
            ConfigError: a number is out of range, or the prompt is without ``{question}``.
        """
        for key, value, least in (
            ("topk", topk, 1),
            ("max_searches", max_searches, 0),
            ("observation_max_chars", observation_max_chars, 1),
        ):
            if value < least:
                raise ConfigError(f"env.options.{key} is {value}; it must be at least {least}")
        if "{question}" not in prompt:
            raise ConfigError(f"env.options.prompt has no {{question}} in it: {prompt[:80]!r}")
        self.topk = topk
        self.max_searches = max_searches
        self.observation_max_chars = observation_max_chars
        self.format_reward = format_reward
        self.shuffle_documents = shuffle_documents
        self.prompt = prompt
        self._begin()

    def _begin(self) -> None:
        self._turns = self._searches = self._invalid = 0
        self._pending: str | None = None
        self._answer: str | None = None
        self._match = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode; the observation is the prompt around the task's question.

        Raises:
            TaskError: the task has no question, or no answer to compare with.
        """
        super().reset(seed=seed, options=options)
        self._begin()
        accepted = self._accepted_answers()
        if not self.task.question or not accepted or not all(isinstance(text, str) for text in accepted):
            raise TaskError(
                f"task {self.task.id!r} needs a question and an answer (a string or a list of strings); "
                f"it has {self.task.question!r} and {self.task.answer!r}"
            )
        text = self.prompt.replace("{question}", self.task.question)
        return (Message("user", text),), self._info()

    def step(self, action: Action) -> Step:
        """Process a turn of the policy, or the result of its search.

        Raises:
            ValueError: results of a call that was not made, or a turn while a search's results are due.
        """
        if isinstance(action, ToolResults):
            return self._continue(self._receive_results(action))
        if self._pending is not None:
            raise ValueError(f"the results of call {self._pending!r} are due before the policy's next turn")
        parsed = parse(action.content)
        self._turns += 1
        if parsed.kind == "answer":
            return self._score_answer(parsed.text)
        self._invalid += parsed.kind == "invalid"
        if self._turns > self.max_searches:
            return (), 0.0, False, True, self._info()
        if parsed.kind == "invalid":
            return self._continue((Message("user", INVALID_ACTION, inline=True),))
        return self._continue(self._search(parsed.text))

    def _continue(self, observation: Observation) -> Step:
        return observation, 0.0, False, False, self._info()

    def _search(self, query: str) -> ToolCalls:
        self._searches += 1
        self._pending = f"search-{self._searches}"
        arguments: dict[str, Any] = {"query": query, "topk": self.topk}
        if "corpus" in self.task.metadata:
            arguments["corpus"] = self.task.metadata["corpus"]
        return ToolCalls((ToolCall(self._pending, "search", arguments),))

    def _receive_results(self, action: ToolResults) -> tuple[Message, ...]:
        if self._pending is None or [result.call_id for result in action.results] != [self._pending]:
            got = ", ".join(result.call_id for result in action.results)
            raise ValueError(f"results for {got or 'nothing'}; expected {self._pending or 'no results'}")
        self._pending = None
        text = self._text(action.results[0])[: self.observation_max_chars]
        return (Message("user", information(text), inline=True),)

    def _text(self, result: ToolResult) -> str:
        if result.status is not ToolStatus.OK:
            return f"The search failed ({result.status.value}): {result.content}"
        if result.data is None:
            return result.content
        hits = list(result.data)
        if not hits:
            return "No document matches the query."
        if self.shuffle_documents:
            hits = [hits[i] for i in self.np_random.permutation(len(hits))]
        return documents(hits)

    def _score_answer(self, answer: str) -> Step:
        self._answer = answer
        self._match = exact_match(answer, self._accepted_answers(), squad_normalize)  # as published
        reward = self._match or (self.format_reward if self._invalid == 0 else 0.0)
        return (), reward, True, False, self._info()

    def _accepted_answers(self) -> Sequence[Any]:
        answer = self.task.answer
        return [answer] if isinstance(answer, str) and answer else list(answer or ())

    def _info(self) -> Info:
        """Return the metrics so far: they must be correct at every point, since the runner may truncate the episode."""
        return {
            "metrics": {
                "exact_match": self._match,
                "searches": float(self._searches),
                "valid_format": float(self._invalid == 0 and self._answer is not None),
                "invalid_actions": float(self._invalid),
                "answer_length": float(len((self._answer or "").split())),
            }
        }

    @classmethod
    def example_task(cls) -> Task:
        """Return the question that the published prompt has as its example."""
        return Task("example", (Message("user", "What is the capital of China?"),), answer=["Beijing", "Peking"])

    def get_state(self) -> dict[str, Any]:
        """Return the episode's state, serializable as JSON."""
        return {
            **super().get_state(),
            "turns": self._turns,
            "searches": self._searches,
            "invalid": self._invalid,
            "pending": self._pending,
            "answer": self._answer,
            "match": self._match,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned, after a `reset` on the same task."""
        super().set_state(state)
        self._turns, self._searches, self._invalid = state["turns"], state["searches"], state["invalid"]
        self._pending, self._answer, self._match = state["pending"], state["answer"], state["match"]
