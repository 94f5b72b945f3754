"""The turns of a seat whose program requests its observations, and posts its moves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from agentrl.core.types import Message
from agentrl.gateway.dialects.base import BadRequestError, Json
from agentrl.gateway.program_process import plain_messages


class SeatTurns:
    """Hands the observations of a seat to its program, and takes its moves: one for each turn, numbered from 0."""

    def __init__(self) -> None:
        self._observation: Json = {}
        """Observation of the turn that began last."""
        self._move: asyncio.Future[str] | None = None
        """Move of that turn; done once the program has posted it."""
        self._moves: list[str] = []
        self._is_over = False
        self._changed = asyncio.Event()  # replaced each time that it is set

    def begin(self, prompt: str, messages: Sequence[Message]) -> asyncio.Future[str]:
        """Begin a turn; return the move, which the program will post.

        Args:
            prompt: the text of what the agent has read since its last turn.
            messages: the conversation of the seat.
        """
        turn = len(self._moves)
        self._observation = {"turn": turn, "prompt": prompt, "messages": plain_messages(messages), "over": False}
        self._move = asyncio.get_running_loop().create_future()
        self._notify()
        return self._move

    def end(self) -> None:
        """Let requests for observations be answered that the episode is over."""
        self._is_over = True
        self._notify()

    async def observation(self, wait_s: float) -> Json:
        """Return the observation of the turn that is to be played, as often as it is requested before the move.

        Its ``turn`` is None if there is none within ``wait_s`` seconds, or the episode is over.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._is_over and not self._is_to_move:
                    await self._changed.wait()
        if self._is_over or not self._is_to_move:
            return {"turn": None, "over": self._is_over}
        return self._observation

    def move(self, turn: int, text: str) -> None:
        """Take the move of a turn; the same move again changes nothing.

        Raises:
            BadRequestError: the turn has another move, or is not to be played.
        """
        if 0 <= turn < len(self._moves):
            if self._moves[turn] != text:
                raise BadRequestError(f"turn {turn} has been played with another move", 409)
            return
        if self._is_over:
            raise BadRequestError("the episode is over", 409)
        if self._move is None or self._move.done() or turn != len(self._moves):
            to_play = f"turn {len(self._moves)} is" if self._is_to_move else "it is another agent's turn, or none"
            raise BadRequestError(f"turn {turn} is not to be played: {to_play}", 409)
        self._moves.append(text)
        self._move.set_result(text)

    @property
    def _is_to_move(self) -> bool:
        return self._move is not None and not self._move.done()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
