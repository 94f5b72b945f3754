"""Privileged contexts of teachers: another first prompt, such as one with the answer, before the same sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.config.checks import is_context_template
from agentrl.core.errors import AgentrlError, ConfigError, RunStopped
from agentrl.core.imports import load_object
from agentrl.core.types import MaskReason, Message, Provenance, Rollout, Row
from agentrl.core.user_code import describe, user_code
from agentrl.render.base import Renderer
from agentrl.rewards.sample import Sample

MakeContext = Callable[[Sample], Sequence[Message]]
"""Returns the messages that a teacher reads in place of the first prompt's."""


def load_context(text: str, key: str) -> MakeContext:
    """Return the function that ``algo.distillation.teachers.NAME.context`` names, or that fills in its template.

    Args:
        text: the template or the import path.
        key: that holds it, for messages.

    Raises:
        ConfigError: there is no such function.
    """
    if is_context_template(text):
        return partial(_from_template, text, key)
    function = load_object(text, key)
    if not callable(function):
        raise ConfigError(f"{key}={text}: {function!r:.100} is not a function")
    make: MakeContext = function
    return make


def _from_template(text: str, key: str, sample: Sample) -> tuple[Message, ...]:
    *earlier, last = sample.rollout.messages
    answer = sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label
    if answer is None and "{answer}" in text:
        raise RunStopped(f"{key} has {{answer}}, and task {sample.prompt_id!r} has none")
    return *earlier, replace(last, content=text.format(message=last.content, answer=answer), token_ids=())


class PrivilegedRows:
    """The rows of a rollout with another first prompt.

    Args:
        make: the messages of that prompt.
        key: the configuration key that names it, for messages.
        renderer: of the policy's chat format.
    """

    def __init__(self, make: MakeContext, key: str, renderer: Renderer) -> None:
        self._make = make
        self._key = key
        self._renderer = renderer

    def rows(self, rollout: Rollout) -> dict[Row, int]:
        """Return each row with the other prompt, in the order of the rollout's, and how many tokens longer it became.

        Raises:
            RunStopped: the function failed, or a row does not begin with the first prompt.
        """
        if not rollout.rows:
            return {}
        first = rollout.rows[0]
        sampled = np.flatnonzero(first.provenance == Provenance.SAMPLED)
        length = int(sampled[0]) if len(sampled) else len(first.token_ids)
        opening, privileged_prompt = first.token_ids[:length], self._prompt(rollout)
        for row in rollout.rows:
            if not np.array_equal(row.token_ids[:length], opening):
                raise RunStopped(
                    f"{self._key}: row {row.key.row} of rollout {rollout.rollout_id} (fork: {row.fork}) does not begin with "
                    "the rollout's first prompt, which the context would replace; leave out the context, or the rewriting "
                    "of conversations"
                )
        return {_with_prompt(row, length, privileged_prompt): len(privileged_prompt) - length for row in rollout.rows}

    def _prompt(self, rollout: Rollout) -> NDArray[np.int32]:
        if not rollout.messages:
            raise RunStopped(
                f"{self._key}: the messages of rollout {rollout.rollout_id} are not known, as recorded rollouts have none; "
                "train without --replay, or leave out the context"
            )
        try:
            failed = f"{self._key} failed for rollout {rollout.rollout_id}"
            with user_code(lambda error: RunStopped(f"{failed}: {describe(error)}")):
                messages = tuple(self._make(Sample.from_rollout(rollout)))
            if not messages or not all(isinstance(message, Message) for message in messages):
                raise RunStopped(f"{self._key} must return messages (agentrl.Message), not {messages!r:.100}")
            return np.array(self._renderer.render(messages, rollout.tools).token_ids, np.int32)
        except RunStopped:
            raise
        except AgentrlError as error:
            raise RunStopped(f"{self._key}: rollout {rollout.rollout_id}: {error}") from error


def _with_prompt(row: Row, length: int, prompt: NDArray[np.int32]) -> Row:
    """Return a row whose first ``length`` tokens are replaced by a prompt."""
    fills: dict[str, Any] = {
        "provenance": Provenance.OBSERVED, "mask": 0, "mask_reason": MaskReason.OBSERVED,
        "logprobs": 0.0, "versions": -1, "requests": -1,
    }  # fmt: skip
    arrays: dict[str, Any] = {"token_ids": np.concatenate([prompt, row.token_ids[length:]]).astype(np.int32)}
    for name, value in fills.items():
        tail = getattr(row, name)[length:]
        arrays[name] = np.concatenate([np.full(len(prompt), value, tail.dtype), tail])
    return replace(row, **arrays)
