"""One conversation with a policy, token in and token out."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from agentrl.core.errors import AgentrlError, TaskError
from agentrl.core.tool import Tool
from agentrl.core.types import FinishReason, Fork, ForkReason, Generation, Message, Prompt, StopReason, ToolCall, Turn
from agentrl.episode.context import EpisodeContext
from agentrl.episode.state import EpisodeState
from agentrl.obs.waiting import waiting

_log = logging.getLogger(__name__)


class Conversation:
    """Lets a policy speak under the episode's limits, and records of every token who made it.

    What was sampled is never decoded and encoded again: `answer` appends to it (``Renderer.bridge``), or renders the
    whole conversation anew where the template changes earlier turns, and the trajectory forks there.

    Args:
        context: what it runs on.
        state: where it is recorded; changes only here, at whole turns, but for tokens that an unfinished turn sampled.
        tools: those that the policy may call; part of every prompt.
    """

    def __init__(self, context: EpisodeContext, state: EpisodeState, tools: Sequence[Tool] = ()) -> None:
        self.state = state
        self.tools = tools
        self.stop_reason: StopReason | None = None
        """Why `sample` returned None; None while the policy may speak."""
        self._context = context
        self._said: Generation | None = None
        self._recorded = False  # whether that is in the turns
        self._ends = {(token,) for token in context.renderer.end_token_ids}

    @property
    def ended_its_turn(self) -> bool:
        """Whether the last thing that the policy said is the end token: without a message after it, it is done."""
        return self._said is not None and self._said.token_ids[-1:] in self._ends

    def begin(self, messages: Sequence[Message], task_id: str) -> None:
        """Render the first prompt.

        Raises:
            TaskError: it leaves the policy no room to answer.
        """
        state, limits = self.state, self._context.limits
        prompt = self._context.renderer.render(messages, self.tools)
        if limits.room(len(prompt.token_ids)) < 1:
            raise TaskError(
                f"task {task_id!r}: its prompt of {len(prompt.token_ids)} tokens leaves no room to answer within "
                f"rollout.max_tokens={limits.max_tokens}"
            )
        state.messages.extend(messages)
        state.prompt_ids, state.added = prompt.token_ids, None
        state.prompt = self._context.renderer.decode(prompt.token_ids)

    def branch(self, tools: Sequence[Tool] | None = None) -> Conversation:
        """Return another conversation of the same episode that goes on from here; it may go on at the same time."""
        other = Conversation(self._context, self.state.branch(), self.tools if tools is None else tools)
        other._said, other._recorded, other.stop_reason = self._said, True, self.stop_reason
        return other

    def rewrite(self, messages: Sequence[Message], reason: ForkReason = ForkReason.CONTEXT) -> None:
        """Go on from other messages, rendered anew; rows that begin here are forks for ``reason``.

        What filled the old context ends it no longer: ``stop_reason`` ``MAX_TOKENS`` is taken back.
        """
        state = self.state
        state.messages = list(messages)
        prompt = self._context.renderer.render(messages, self.tools)
        state.prompt_ids, state.added, state.fork = prompt.token_ids, None, reason
        self._said = None
        if self.stop_reason is StopReason.MAX_TOKENS:
            self.stop_reason = None

    async def sample(self, stop: Sequence[str] = ()) -> Message | None:
        """Let the policy speak up to one of the ``stop`` strings, its end token or the limits.

        Its tool calls have ids that are unique in the episode; without ``tools`` it makes none. None where a
        limit or an abort ends the conversation; ``stop_reason`` then says which.

        Raises:
            SamplerError: the engine failed, or returned what does not belong together.
        """
        state, limits = self.state, self._context.limits
        room = limits.room(len(state.prompt_ids))
        if state.shared.turns >= limits.max_turns or room < 1:
            self.stop_reason = StopReason.MAX_TURNS if state.shared.turns >= limits.max_turns else StopReason.MAX_TOKENS
            return None
        state.trajectory.extend_to(state.prompt_ids, added=state.added, fork=state.fork)
        state.trajectory.temperature = self._context.sampling.temperature
        state.added, state.fork = 0, None
        state.shared.turns += 1
        try:
            generation = await self._generate(room, stop)
        except BaseException:
            state.shared.turns -= 1
            raise
        state.trajectory.append_sampled(generation)
        if generation.finish_reason is FinishReason.ABORT:
            self.stop_reason = StopReason.ABORTED
            return None
        self._said, self._recorded = generation, False
        said = self._context.renderer.parse(generation.token_ids, self.tools, prompt_ids=state.prompt_ids)
        return replace(said, tool_calls=self._named(said.tool_calls) if self.tools else ())

    def answer(self, said: Message, new: Sequence[Message], *, reward: float = 0.0, over: bool = False) -> None:
        """Record the turn that ``said`` was and the messages that answer it; prepare the next, unless it is ``over``."""
        self.record(said, new, reward=reward)
        assert self._said is not None, "record checks it"
        state, renderer = self.state, self._context.renderer
        generation, new = self._said, tuple(new)
        state.messages.extend((said, *new))
        if over:
            return
        added = renderer.bridge(state.messages[: len(state.messages) - len(new)], generation.token_ids, new, self.tools)
        if isinstance(added, Fork):
            state.prompt_ids, state.added = renderer.render(state.messages, self.tools).token_ids, None
            state.fork = added.reason
        else:
            # What is new is joined first: each joining copies all that it joins.
            state.prompt_ids, state.added = state.prompt_ids + (generation.token_ids + added), len(added)

    def record(self, said: Message, new: Sequence[Message], *, reward: float = 0.0) -> None:
        """Record the turn that ``said`` was, with what the policy is answered; a branch leaves its first to the other."""
        assert self._said is not None, "sample comes first"
        if not self._recorded:
            heard = "".join(message.content for message in new)
            self.state.turns.append(Turn(said.content, heard, self._said.finish_reason, reward))
        self._recorded = True

    def _named(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Return calls with ids that are unique in the episode: their own, or the turn's number and theirs in it."""
        state, used = self.state, self.state.shared.call_ids
        turn = ".".join(str(number) for number in (*state.trajectory.branch_name, len(state.turns)))
        named: list[ToolCall] = []
        for number, call in enumerate(calls):
            name = call.id if call.id and call.id not in used else f"{turn}.{number}"
            used.add(name)
            named.append(replace(call, id=name))
        return tuple(named)

    async def close(self) -> None:
        """Tell the sampler that nothing more comes. Where it cannot be told that is only logged: the episode is over."""
        try:
            await self._context.sampler.close_session(self.state.episode_id)
        except AgentrlError as error:
            _log.warning("session %s was not closed: %s", self.state.episode_id, error)

    async def _generate(self, room: int, stop: Sequence[str]) -> Generation:
        context, state, turn = self._context, self.state, len(self.state.turns)
        request_id = f"{state.name}/{turn}"
        sampling = context.sampling
        params = replace(
            sampling,
            max_new_tokens=min(room, sampling.max_new_tokens),
            stop=tuple(dict.fromkeys((*sampling.stop, *stop))),
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *context.renderer.end_token_ids))),
            seed=None if sampling.seed is None else _request_seed(sampling.seed, state.seed, request_id),
        )
        try:
            with waiting("sampling", request_id):
                return await context.sampler.generate(
                    Prompt(state.prompt_ids),
                    params,
                    session_id=state.episode_id,
                    request_id=request_id,
                    policy=context.policy,
                )
        except asyncio.CancelledError:
            await self._abort(request_id)
            raise

    async def _abort(self, request_id: str) -> None:
        try:
            await self._context.sampler.abort(request_id)
        except AgentrlError as error:
            _log.warning("request %s was not aborted: %s", request_id, error)


def _request_seed(run_seed: int, episode_seed: int, request_id: str) -> int:
    """Return a seed that depends on nothing but the request, the same in every process."""
    text = f"{run_seed}/{episode_seed}/{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
