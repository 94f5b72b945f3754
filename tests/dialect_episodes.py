"""One episode as requests in every dialect, as a loop of agentrl, and as an environment, for tests that they are the same.

An episode is a list of steps: continue a turn, branch, sample in parallel, compact, request a subagent or a title, retry, lose
the connection. Clients write arguments of calls anew.
"""

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from deadlines import until
from gateway_clients import SCHEMA, ChatClient, Client, MessagesClient, ResponsesClient, Rewrite, Said, Text
from gateway_episodes import Played, Program
from hypothesis import strategies as st

from agentrl import Agent, Message, Rollout, Task
from agentrl.core.env import Env
from agentrl.core.env import Step as EnvStep
from agentrl.core.tool import Tool
from agentrl.core.types import Action, ForkReason, MaskReason, Observation
from agentrl.core.types import Rewrite as NewContext
from agentrl.episode.chat import Chat
from agentrl.episode.state import TurnEnd
from agentrl.testing import RecordedRequest

TOOLS = ("find", "count")
SYSTEM, SUBAGENT, TITLE = "Be brief. Né 🎈", "You are a subagent.", "Write a title."
WORDS = ("x", "Süß 🎈", 'quo"te\\', "новое", "a\nb", "<tool_call>", "")


def speak(request: RecordedRequest) -> str:
    """Answer as a function of the prompt and the number of the request."""
    ids = np.array(request.prompt.token_ids, np.int32).tobytes()
    number = int.from_bytes(hashlib.blake2b(ids, digest_size=4).digest(), "big")
    word = json.dumps(WORDS[number % 5], ensure_ascii=False)
    space = " " * (number % 3)
    call = f'<tool_call>{space}{{"name": "find", "arguments": {{"word":{space}{word}, "n": {request.turn}.0}}}}</tool_call>'
    other = f'<tool_call>{{"arguments": {{"n": {request.turn}}}, "name":{space}"count"}}</tool_call>'
    text = f"{WORDS[number // 7 % 4]} {request.turn}"
    turns = (
        text,
        f"<think>\nhm {word}\n</think>\n\n{text}",
        call,
        f"<think>\nhm\n</think>\n\n{text}{call}",
        call + other,
        call[:-9],
    )
    return turns[number // 64 % len(turns)]


@dataclass
class Turn:
    """A finished turn: what was said before it, and it."""

    talk: tuple[Said | Text, ...]
    said: Said
    tools: tuple[str, ...]
    chat: Any = None
    end: TurnEnd | None = None
    is_continued: bool = False


TEXTS = st.sampled_from(["go on", "Né? 🎈", " white ", "«»", "a\r\nb"])
Step = tuple[str, int, str]
"""What is done, the turn that it is done with (modulo the number of turns), and a text."""
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["continue"] * 5 + ["branch", "parallel", "compact", "subagent", "title", "retry", "lost"]),
        st.integers(0, 7),
        TEXTS,
    ),
    min_size=1,
    max_size=8,
)


class Speaker:
    """Requests turns; subclasses do it over HTTP or with chats."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    async def request(
        self, talk: tuple[Said | Text, ...], tools: tuple[str, ...], parent: Turn | None, how: str
    ) -> Turn:
        raise NotImplementedError

    async def run(self, steps: list[Step]) -> None:
        self.turns.append(await self.request((Text("system", SYSTEM), Text("user", "begin")), TOOLS, None, "first"))
        for how, number, text in steps:
            turn = self.turns[number % len(self.turns)] if how == "branch" else self.turns[-1]
            if how in ("compact", "subagent", "title"):
                count = len(self.turns)
                system = {"compact": SYSTEM, "subagent": f"{SUBAGENT}{count}", "title": TITLE}[how]
                tools = {"compact": TOOLS, "subagent": TOOLS[:1], "title": ()}[how]
                talk = (Text("system", system), Text("user", f"{text} {count}"))
                turn = await self.request(talk, tools, None, how)
                if how != "title":
                    self.turns.append(turn)
                continue
            talks = [self.continued(turn, text)]
            if how == "parallel":
                talks += [self.continued(turn, f"{text} {again}") for again in range(2)]
            self.turns += await asyncio.gather(*(self.request(talk, turn.tools, turn, how) for talk in talks))

    @staticmethod
    def continued(turn: Turn, text: str) -> tuple[Said | Text, ...]:
        results = [Text("tool", f"{text} {name}", id) for id, name, _ in turn.said.calls]
        more = [] if results and len(text) % 2 else [Text("user", text)]
        return (*turn.talk, turn.said, *results, *more)


@dataclass
class HttpSpeaker(Speaker):
    program: Program
    client: Client
    stream: bool
    rewrite: Rewrite
    gate: asyncio.Event
    turns: list[Turn] = field(default_factory=list)

    async def request(
        self, talk: tuple[Said | Text, ...], tools: tuple[str, ...], parent: Turn | None, how: str
    ) -> Turn:
        body = {"model": "m", "stream": self.stream, **self.client.body(talk, tools, self.rewrite)}

        async def post(**headers: str) -> Said:
            response = await self.program.post(self.client.path, body, **headers)
            assert response.status_code == 200, response.text
            return self.client.read_stream(response.text) if self.stream else self.client.read(response.json())

        if how == "lost":
            before = self.program.session.turns
            self.gate.clear()
            lost = asyncio.create_task(post())
            await until(lambda: self.program.session.turns > before)
            lost.cancel()
            await asyncio.wait({lost})
            self.gate.set()
        said = await post(**({"idempotency-key": str(len(self.program.replies))} if how == "parallel" else {}))
        if how == "retry":
            assert await post(**{"x-stainless-retry-count": "1"}) == said
        return Turn(talk, said, tools)


@dataclass
class ChatSpeaker(Speaker):
    """The same with the chats of a custom loop."""

    agent: Agent
    turns: list[Turn] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    titles: set[str] = field(default_factory=set)
    """Requests for a title: another one under the same system prompt cannot be told from a compaction."""

    async def request(
        self, talk: tuple[Said | Text, ...], tools: tuple[str, ...], parent: Turn | None, how: str
    ) -> Turn:
        size = 0 if parent is None else len(parent.talk) + 1
        new = [
            Message(entry.role, entry.text, tool_call_id=self.ids.get(entry.call_id))  # type: ignore[arg-type]
            for entry in talk[size:]
            if isinstance(entry, Text)
        ]
        offered = tuple(Tool(name, "Use it.", SCHEMA) for name in tools)
        chat = self.open_chat(new, offered, parent, how)
        message = await chat.sample()
        end = chat.last_turn
        assert message is not None
        assert end is not None
        calls = [call for call in message.tool_calls if call.is_readable]
        names = [f"{end.generation.request_id}-{number}" for number in range(len(calls))]
        self.ids |= dict(zip(names, (call.id for call in calls), strict=True))
        shown = tuple((name, call.name, call.arguments) for name, call in zip(names, calls, strict=True))
        return Turn(talk, Said("", "", shown), tools, chat, end)

    def open_chat(self, new: list[Message], tools: tuple[Tool, ...], parent: Turn | None, how: str) -> Chat:
        if how == "first":
            return self.agent.chat(new, tools=tools)
        if parent is None:
            text = new[-1].content
            is_context = how == "compact" or bool(how == "title" and self.titles and text not in self.titles)
            fork = ForkReason.CONTEXT if is_context else ForkReason.BRANCH
            chat = self.agent.chats[0].branch(new, tools=tools, fork=fork)
            if how == "title":
                self.titles.add(text)
                chat.mask(MaskReason.AUXILIARY)
            return chat
        chat = parent.chat.branch(end=parent.end) if parent.is_continued else parent.chat
        parent.is_continued = True
        chat.add(*new)
        return chat


def plain(rollout: Rollout) -> dict[str, Any]:
    """All of a rollout but its wall time, comparable."""
    rows = [
        {
            field.name: value.tobytes() if isinstance(value := getattr(row, field.name), np.ndarray) else value
            for field in dataclasses.fields(row)
        }
        for row in rollout.rows
    ]
    return dataclasses.asdict(dataclasses.replace(rollout, rows=[], seconds=0.0, tool_seconds=0.0, tool_uses={})) | {
        "rows": rows
    }


def as_loop(steps: list[Step]) -> Any:
    async def generate(task: Task, agent: Agent) -> Rollout:
        await ChatSpeaker(agent).run(steps)
        return agent.chats[0].rollout(len(steps) / 8)

    return generate


def rewritten(arguments: Any) -> Any:
    """Return arguments as another program may write them."""
    numbers = {name: int(value) if isinstance(value, float) else value for name, value in arguments.items()}
    return dict(reversed(numbers.items()))


class TalkEnv(Env):
    """The episode as an environment: it answers calls itself, and a compaction is a new context."""

    handles_tool_calls = True

    def __init__(self, steps: Sequence[Step]) -> None:
        self.tools = tuple(Tool(name, "Use it.", SCHEMA) for name in TOOLS)
        self._steps = list(steps)
        self._turns = 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, Any]:
        super().reset(seed=seed, options=options)
        return (Message("system", SYSTEM), Message("user", "begin")), {}

    def step(self, action: Action) -> EnvStep:
        assert isinstance(action, Message)
        if not self._steps:
            return (), self._turns / 8 - 1 / 8, True, False, {}
        how, _, text = self._steps.pop(0)
        self._turns += 1
        if how == "compact":
            messages = (Message("system", SYSTEM), Message("user", f"{text} {self._turns - 1}"))
            return NewContext(messages), 0.0, False, False, {}
        calls = [call for call in action.tool_calls if call.is_readable]
        results = [Message("tool", f"{text} {call.name}", tool_call_id=call.id) for call in calls]
        more = [] if results and len(text) % 2 else [Message("user", text)]
        return (*results, *more), 0.0, False, False, {}


def check_dialects(
    play: Callable[..., Played],
    steps: list[Step],
    clients: Sequence[Client] = (),
    streams: Sequence[bool] = (False, True),
) -> Played:
    """Play an episode as a loop and in every dialect, check that all rollouts are the same, and return that of the loop.

    Args:
        play: ``play(talk, is_loop=…, gate=…)``.
        steps: of the episode.
        clients: of the dialects; all if it is empty.
        streams: whether the clients request streams.
    """
    expected = play(as_loop(steps), is_loop=True, gate=None)
    assert expected.rollout.failure is None, expected.rollout.failure
    for client in clients or CLIENTS:
        for stream in streams:
            gate = asyncio.Event()
            gate.set()

            def speaker(
                program: Program, client: Client = client, stream: bool = stream, gate: asyncio.Event = gate
            ) -> Speaker:
                return HttpSpeaker(program, client, stream, rewritten if stream else lambda arguments: arguments, gate)

            async def talk(program: Program, make: Callable[[Program], Speaker] = speaker) -> None:
                await make(program).run(steps)
                program.sessions.may_reward = True
                assert (await program.post("/v1/session/reward", {"reward": len(steps) / 8})).status_code == 200

            played = play(talk, is_loop=False, gate=gate)
            assert played.rollout.failure is None, played.rollout.failure
            assert plain(played.rollout) == plain(expected.rollout), client.path
            assert played.sampler.requests == expected.sampler.requests
    return expected


def check_environment(play: Callable[..., Played], steps: Sequence[Step], *, seeded: bool = False) -> None:
    """Check that what an environment can do of an episode is the same in a loop, but for the names of a compaction.

    After a compaction an environment's conversation goes on, and a loop's is another one, whose turns have other names.
    Environments have no branches, no other conversations and no requests.

    Args:
        play: see `check_dialects`.
        steps: of the episode.
        seeded: the sampler draws by seeds, which depend on names: compactions are left out.
    """
    steps = [step for step in steps if step[0] != "compact" or not seeded]
    linear = [("compact" if how == "compact" else "continue", 0, text) for how, _, text in steps if how in LINEAR]
    expected = play(as_loop(linear), is_loop=True)
    played = play(None, env=partial(TalkEnv, linear))
    assert played.rollout.failure is None, played.rollout.failure
    if any(how == "compact" for how, _, _ in linear):
        assert trained(played.rollout) == trained(expected.rollout)
    else:
        assert plain(played.rollout) == plain(expected.rollout)
        assert played.sampler.requests == expected.sampler.requests


def trained(rollout: Rollout) -> Any:
    """Return what is trained."""
    rows = [(row.token_ids.tolist(), row.mask.tolist(), row.logprobs.tobytes()) for row in rollout.rows]
    return rows, rollout.reward, [turn.action for turn in rollout.turns]


LINEAR = ("continue", "retry", "lost", "compact")
"""Steps that go on from the last turn, or from the prompt again."""
LIMITS = {"max_turns": 100, "max_tokens": 50_000}
CLIENTS: tuple[Client, ...] = (ChatClient(), ResponsesClient(), MessagesClient())
