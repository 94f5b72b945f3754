"""Episodes of a scripted expert as training rows, for supervised fine-tuning.

The environment and the renderer are those of a run, so that the tokens that a policy is trained on are the tokens that it
observes and samples later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from agentrl.core.env import Env
from agentrl.core.errors import EnvironmentFailure, TaskError
from agentrl.core.task import Demonstrator, Task
from agentrl.core.tool import Tool
from agentrl.core.types import (
    Action,
    CallStatus,
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
from agentrl.render.base import Renderer

LocalTool = Callable[[ToolCall], ToolResult]
"""A tool as a plain function in this process; see `ToolService.local`. One with sessions has an ``end_episode``."""
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
    served: Mapping[str, Tool] | None = None,
) -> tuple[Row, float]:
    """Run one episode of ``expert`` and return its row and its reward.

    The expert's tokens have provenance ``DEMONSTRATED`` and mask 1. A turn that ends with none of the environment's
    stop strings ends with the end token, as the policy would have to say it. Where the environment offers tools of
    servers, the expert calls them in the words of the chat format, and ``tools`` answer.

    Args:
        env: what it plays in.
        task: the problem.
        expert: who plays.
        seed: of the environment.
        tools: by name, what the environment or the expert may call.
        renderer: of the policy's chat format.
        encode: text to ids.
        max_turns: turns of the expert.
        served: tools of servers as the run's options make them, by name; offered in place of the environment's own.

    Raises:
        TaskError: the tokens of an earlier turn would change when the template renders the next one.
        EnvironmentFailure: a tool is called that is not in ``tools``, or the environment rewrote the conversation.

    """
    try:
        messages, _ = env.reset(seed=seed, options={"task": task})
        assert isinstance(messages, tuple), "an episode begins with messages"
        offered = tuple((served or {}).get(tool.name, tool) if tool.server else tool for tool in env.tools)
        history = list(messages)
        token_ids = renderer.render(messages, offered).token_ids
        provenance = [Provenance.OBSERVED] * len(token_ids)
        reward = 0.0
        for turn in range(max_turns):
            text = expert.act(messages)
            said = [*encode(text), *(() if text.endswith(env.stop) else (renderer.end_token_id,))]
            action = _said(text, said, token_ids, renderer, offered, turn)
            provenance += [Provenance.DEMONSTRATED] * len(said)
            token_ids = (*token_ids, *said)
            messages, earned, over = _answer(env, action, tools)
            reward += earned
            if over:
                break
            history.append(action)
            added = renderer.bridge(history, said, messages, offered)
            if isinstance(added, Fork):
                raise TaskError(f"task {task.id!r}: one row cannot show the demonstration: {added.detail}")
            history.extend(messages)
            token_ids += added
            provenance += [Provenance.OBSERVED] * len(added)
    finally:
        for tool in tools.values():
            getattr(tool, "end_episode", lambda: None)()
    return _row(task.id, seed, token_ids, provenance), reward


def _said(
    text: str, said: Sequence[int], before: Sequence[int], renderer: Renderer, offered: Sequence[Tool], turn: int
) -> Message:
    """Return what the expert said as the policy's message would be: with calls, where there are tools to call."""
    if not offered:
        return Message("assistant", text)
    message = renderer.parse(said, offered, prompt_ids=before)
    calls = (replace(call, id=call.id or f"{turn}.{number}") for number, call in enumerate(message.tool_calls))
    return replace(message, tool_calls=tuple(calls))


def _answer(env: Env, said: Message, tools: Mapping[str, LocalTool]) -> tuple[tuple[Message, ...], float, bool]:
    """Give the environment, or the tools that the expert calls, what it said."""
    if not said.tool_calls or env.handles_tool_calls:
        return _step(env, said, tools)
    results = [_call(call, tools) for call in said.tool_calls]
    return tuple(Message("tool", result.content, tool_call_id=result.call_id) for result in results), 0.0, False


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
    if call.status is not CallStatus.OK:
        return ToolResult(call.id, ToolStatus.INVALID, call.fault)
    if call.name not in tools:
        raise EnvironmentFailure(f"the episode calls tool {call.name!r}; there are: {', '.join(tools) or 'none'}")
    result = tools[call.name](call)
    if result.status in (ToolStatus.UNAVAILABLE, ToolStatus.SANDBOX_FAILURE):
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
