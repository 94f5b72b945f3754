"""Episodes of a scripted expert as training rows, for supervised fine-tuning.

The real environment is driven and the real renderer asked, so what a policy is taught is, token for token, what it
reads and says when it is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from agentrl.env import Env
from agentrl.errors import EnvironmentFailure, TaskError
from agentrl.protocols import Renderer
from agentrl.task import Demonstrator, Task
from agentrl.types import (
    Action,
    Fork,
    MaskReason,
    Message,
    Provenance,
    Rewrite,
    Row,
    RowKey,
    ToolCall,
    ToolCalls,
    ToolResult,
    ToolResults,
    ToolStatus,
)

LocalTool = Callable[[ToolCall], ToolResult]
"""A tool as a plain function in this process; see ``SearchService.local``."""
Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens added."""


def demonstrate(
    env: Env,
    task: Task,
    expert: Demonstrator,
    *,
    seed: int,
    tools: Mapping[str, LocalTool],
    renderer: Renderer,
    encode: Encode,
    max_turns: int,
) -> tuple[Row, float]:
    """Run one episode of ``expert`` and return its row and its reward.

    The expert's tokens have provenance ``DEMONSTRATED`` and mask 1. A turn that ends with none of the environment's
    stop strings ends with the end token, as the policy would have to say it.

    Raises:
        TaskError: the tokens of an earlier turn would change when the template renders the next one.
        EnvironmentFailure: the environment asked for a tool that is not in ``tools``, or rewrote the conversation.

    """
    messages, _ = env.reset(seed=seed, options={"task": task})
    assert isinstance(messages, tuple), "an episode begins with messages"
    history = list(messages)
    token_ids = renderer.render(messages).token_ids
    provenance = [Provenance.OBSERVED] * len(token_ids)
    reward = 0.0
    for _ in range(max_turns):
        text = expert.act(messages)
        said = [*encode(text), *(() if text.endswith(env.stop) else (renderer.end_token_id,))]
        provenance += [Provenance.DEMONSTRATED] * len(said)
        token_ids = (*token_ids, *said)
        messages, earned, over = _step(env, Message("assistant", text), tools)
        reward += earned
        if over:
            break
        history.append(Message("assistant", text))
        added = renderer.bridge(history, said, messages)
        if isinstance(added, Fork):
            raise TaskError(f"task {task.id!r}: one row cannot show the demonstration: {added.detail}")
        history.extend(messages)
        token_ids += added
        provenance += [Provenance.OBSERVED] * len(added)
    return _row(task.id, seed, token_ids, provenance), reward


def _step(env: Env, action: Action, tools: Mapping[str, LocalTool]) -> tuple[tuple[Message, ...], float, bool]:
    observation, reward, terminated, truncated, _ = env.step(action)
    while isinstance(observation, ToolCalls):
        results = ToolResults(tuple(_call(call, tools) for call in observation.calls))
        observation, earned, terminated, truncated, _ = env.step(results)
        reward += earned
    if isinstance(observation, Rewrite):
        raise EnvironmentFailure("the environment rewrites the conversation; one row cannot show the demonstration")
    return observation, float(reward), terminated or truncated


def _call(call: ToolCall, tools: Mapping[str, LocalTool]) -> ToolResult:
    if call.name not in tools:
        raise EnvironmentFailure(f"the environment calls tool {call.name!r}; there are: {', '.join(tools) or 'none'}")
    result = tools[call.name](call)
    if result.status is ToolStatus.UNAVAILABLE:
        raise EnvironmentFailure(f"tool {call.name!r} is unavailable to demonstrations: {result.content}")
    return result


def _row(task_id: str, seed: int, token_ids: Sequence[int], provenance: Sequence[Provenance]) -> Row:
    by = np.asarray(provenance, np.uint8)
    size = len(token_ids)
    mask = by == Provenance.DEMONSTRATED
    return Row(
        key=RowKey(task_id, f"{task_id}/demonstration-{seed}"),
        token_ids=np.asarray(token_ids, np.int32),
        provenance=by,
        mask=mask.astype(np.uint8),
        mask_reason=np.where(mask, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.zeros(size, np.float32),
        versions=np.full(size, -1, np.int32),
        requests=np.full(size, -1, np.int32),
    )
