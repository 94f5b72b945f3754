"""Joins the requests of an agent program to conversations: each continues the turn whose whole history it begins with.

Messages are compared by meaning: role, reasoning, text without white space at its ends, images by their bytes, and calls by
name and arguments as JSON values. Ids of calls are compared by the order in which they appear.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from agentrl.core.tool import Tool
from agentrl.core.types import ForkReason, MaskReason, Message, ToolCall
from agentrl.episode.chat import Chat
from agentrl.episode.state import TurnEnd
from agentrl.gateway.dialects.base import BadRequestError, call_id
from agentrl.render.formats.base import split_thinking

_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode
"""As ``json.dumps``, which makes an encoder each time."""
_RECENT = 8
"""Histories of a session whose digests the next request takes: of conversations that take turns, such as subagents'."""
_WHITE_SPACE = re.compile(rb"(?:\\[nrt]|\s)+")
"""In texts as JSON."""
_PROBE_TOKENS = 1
"""A request for so many tokens asks whether the endpoint works."""


@dataclass(slots=True, eq=False)
class Root:
    """A conversation that continues no earlier turn, with its branches."""

    tools: tuple[Tool, ...]
    """Tools of its first request."""
    related: list[Root] = field(default_factory=list)
    """Conversations that share a turn or the system prompt with it."""
    mask: MaskReason = MaskReason.NONE
    """Why none of it is trained."""
    chats: list[Chat] = field(default_factory=list)
    """All its chats."""

    def add(self, chat: Chat) -> None:
        """Add a chat."""
        self.chats.append(chat)
        chat.mask(self.mask)


@dataclass(slots=True, eq=False)
class Node:
    """A finished turn."""

    root: Root
    """The conversation that it is in."""
    parent: Node | None
    """The turn before it."""
    length: int
    """Messages up to it, itself included."""
    chat: Chat
    """The chat that has sampled it."""
    end: TurnEnd
    """Where other turns continue."""
    shown: Message
    """The turn as the agent program sees it."""
    is_continued: bool = False
    """Whether the chat has continued."""

    def path(self) -> dict[int, Node]:
        """Return this turn and those before it, by `length`."""
        nodes, node = dict[int, Node](), self
        while True:
            nodes[node.length] = node
            if node.parent is None:
                return nodes
            node = node.parent

    @property
    def call_ids(self) -> list[tuple[str, str]]:
        """Ids of the calls that are shown: the program's, and the policy's."""
        calls = (call for call in self.end.message.tool_calls if call.is_readable)
        return [(shown.id, call.id) for shown, call in zip(self.shown.tool_calls, calls, strict=True)]


@dataclass(frozen=True, slots=True)
class JoinPoint:
    """Where the turn that answers a request belongs."""

    history: History
    """History of the request; with its reply once the turn is added."""
    node: Node | None
    """The turn that it continues; None: it begins a conversation."""
    messages: tuple[Message, ...]
    """What follows ``node``, or the whole conversation, with the policy's own turns and ids."""
    fork: ForkReason
    """Why its tokens are in another row than the turns before."""
    mask: MaskReason
    """Why what is sampled is not trained."""
    changed: tuple[Message, ...]
    """Messages that are turns of the session with other white space; they are read as they are, and not as they were sampled."""


class History:
    """The messages of a request, with a digest of each beginning of them.

    Args:
        messages: of the request.
        tools: that it offers.
        earlier: a history whose digests are taken as far as its messages have the same meaning; None: all are computed.
    """

    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool], earlier: History | None = None) -> None:
        self.offered = tuple(tools)
        """The tools."""
        if earlier is not None and not _are_same(self.offered, earlier.offered):
            earlier = None
        self.messages: list[Message] = []
        """All of them; those that are equal in ``earlier`` are its objects."""
        self.tools: bytes = _tools_digest(self.offered) if earlier is None else earlier.tools
        self.meanings: list[bytes] = []
        """Of each message."""
        self.whole = [self.tools]
        """Digests of the beginnings, by their length."""
        self.unthought = [self.tools]
        """The same without reasoning."""
        numbers: dict[str, int] = {}
        known = () if earlier is None else earlier.messages
        same_ids = True  # of all calls so far: results name them
        for index, message in enumerate(messages):
            before = known[index] if index < len(known) else None
            # Arguments of calls are not compared as Python values, of which True equals 1.
            is_plain = not message.tool_calls and (message.role != "tool" or same_ids)
            if earlier is not None and before is not None and is_plain and message == before:
                self._take(earlier, before)
                continue
            thought, spoken = _meaning(message, numbers)
            if before is None or earlier is None or thought + spoken != earlier.meanings[index]:
                known = ()
                self._add(message, thought, spoken)
                continue
            same_ids = same_ids and [call.id for call in message.tool_calls] == [call.id for call in before.tool_calls]
            self._take(earlier, message)

    def add_reply(self, reply: Message) -> None:
        """Add the reply to the request."""
        self._add(reply, *_meaning(reply, {}))

    def _add(self, message: Message, thought: bytes, spoken: bytes) -> None:
        self.messages.append(message)
        self.meanings.append(thought + spoken)
        self.whole.append(_digest(self.whole[-1], thought + spoken))
        self.unthought.append(_digest(self.unthought[-1], spoken))

    def _take(self, earlier: History, message: Message) -> None:
        """Add a message that an earlier history has at the same place."""
        index = len(self.messages)
        self.messages.append(message)
        self.meanings.append(earlier.meanings[index])
        self.whole.append(earlier.whole[index + 1])
        self.unthought.append(earlier.unthought[index + 1])

    @property
    def system(self) -> bytes:
        """The meaning of the messages of role system with which it begins."""
        count = next((index for index, message in enumerate(self.messages) if message.role != "system"), None)
        return b"".join(self.meanings[:count])


class ConversationTree:
    """All turns of one session."""

    def __init__(self) -> None:
        self.roots: list[Root] = []
        """Conversations that continue no earlier turn."""
        self._nodes: dict[bytes, list[Node]] = {}
        self._unthought = set[bytes]()
        self._replies: dict[bytes, list[Node]] = {}  # by their meaning
        self._similar_turns: dict[bytes, list[tuple[bytes, Node]]] = {}  # with what is said, by it without white space
        self._heads: dict[bytes, list[tuple[Root, bytes]]] = {}  # conversations and their tools by system prompt
        self._prompts = set[bytes]()  # of conversations
        self._recent: list[History] = []  # up to the last replies, the newest first

    @property
    def has_turns(self) -> bool:
        """Whether there are any."""
        return bool(self._nodes)

    def history(self, messages: Sequence[Message], tools: Sequence[Tool]) -> History:
        """Return the history of a request, most of which is that of an earlier one."""
        earlier = self._recent[0] if self._recent else None
        for recent in self._recent:
            size = len(recent.messages)
            if size <= len(messages) and messages[size - 1] == recent.messages[-1]:
                earlier = recent
                break
        return History(messages, tools, earlier)

    def join(self, history: History, max_tokens: int | None) -> JoinPoint:
        """Return where a request belongs; nothing changes."""
        mask = MaskReason.NONE
        if max_tokens is not None and max_tokens <= _PROBE_TOKENS:
            mask = MaskReason.AUXILIARY
        size = next((size for size in range(len(history.messages), 0, -1) if history.whole[size] in self._nodes), 0)
        unthought = any(digest in self._unthought for digest in history.unthought[size + 1 :])
        candidates = _same_ids(self._nodes.get(history.whole[size], []), history.messages)
        if len(candidates) > 1 and len({(id(node.parent), node.end.generation.token_ids) for node in candidates}) > 1:
            mask, candidates = MaskReason.AMBIGUOUS, []
        node = next((node for node in candidates if not node.is_continued), candidates[0] if candidates else None)
        messages, has_replies = self._own_messages(history, node)
        changed = tuple(message for message in history.messages[size:] if self._is_changed(message))
        if unthought:
            fork = ForkReason.THINKING
        elif node is None:
            has_similar = any(self._similar(message) for message in history.messages)
            is_rewritten = has_replies or has_similar or self._is_rewritten(history)
            fork = ForkReason.CONTEXT if is_rewritten else ForkReason.BRANCH
        else:
            fork = ForkReason.CONTEXT if any(message.role == "assistant" for message in messages) else ForkReason.BRANCH
        return JoinPoint(history, node, messages, fork, mask, changed)

    def _is_rewritten(self, history: History) -> bool:
        """Return whether a request has the system prompt and the tools of a conversation, and is not one again."""
        same_head = any(tools == history.tools for _, tools in self._heads.get(history.system, ()))
        return bool(history.system) and same_head and history.whole[-1] not in self._prompts

    def _similar(self, message: Message) -> Sequence[tuple[bytes, Node]]:
        """Return the turns that a message is, whatever their reasoning and white space are, and what is said in each."""
        if message.role != "assistant":
            return ()
        return self._similar_turns.get(_WHITE_SPACE.sub(b"", _meaning(message, {})[1]), ())

    def _is_changed(self, message: Message) -> bool:
        """Return whether a message is a turn of the session, apart from white space in its text or the arguments of its calls."""
        similar = self._similar(message)
        return bool(similar) and _meaning(message, {})[1] not in [spoken for spoken, _ in similar]

    def begin(self, point: JoinPoint, tools: Sequence[Tool]) -> Root:
        """Return a new conversation at a point."""
        history, root = point.history, Root(tuple(tools), mask=point.mask)
        heads = self._heads.setdefault(history.system, [])
        root.related = [node.root for message in history.messages for _, node in self._similar(message)]
        root.related += [sibling for sibling, _ in heads] if history.system else []
        for sibling in root.related:
            sibling.related.append(root)
        heads.append((root, history.tools))
        self.roots.append(root)
        self._prompts.add(history.whole[-1])
        return root

    def add(self, point: JoinPoint, root: Root, chat: Chat, shown: Message) -> None:
        """Add the turn that ``chat`` has sampled at a point."""
        assert chat.last_turn is not None, "it has sampled"
        history = point.history
        history.add_reply(shown)
        node = Node(root, point.node, len(history.messages), chat, chat.last_turn, shown)
        self._nodes.setdefault(history.whole[-1], []).append(node)
        self._unthought.add(history.unthought[-1])
        self._replies.setdefault(history.meanings[-1], []).append(node)
        spoken = _meaning(shown, {})[1]
        self._similar_turns.setdefault(_WHITE_SPACE.sub(b"", spoken), []).append((spoken, node))
        end = None if point.node is None else history.whole[point.node.length]
        others = [recent for recent in self._recent if recent.whole[-1] != end]
        self._recent = [history, *others[: _RECENT - 1]]

    def mask_auxiliary(self) -> None:
        """Mask conversations without tools that are related to none with tools, if there are such."""
        work = [root for root in self.roots if root.tools]
        for root in work:  # it grows
            work += [sibling for sibling in root.related if sibling not in work]
        for root in self.roots if work else ():
            if root not in work and root.mask is MaskReason.NONE:
                for chat in root.chats:
                    chat.mask(MaskReason.AUXILIARY)

    def _own_messages(self, history: History, node: Node | None) -> tuple[tuple[Message, ...], bool]:
        """Return what follows a turn with the policy's own turns and ids, and whether such turns are in it."""
        start = 0 if node is None else node.length
        if all(message.role not in ("assistant", "tool") for message in history.messages[start:]):
            return tuple(history.messages[start:]), False
        path = {} if node is None else node.path()
        ids: dict[str | None, str] = {}
        messages, has_replies = list[Message](), False
        for index, message in enumerate(history.messages):
            reply = path.get(index + 1)
            if index >= start and message.role == "assistant":
                equal = self._replies.get(history.meanings[index], [])
                has_replies = has_replies or bool(equal)
                # Which of several was meant is not guessed: the message is written as the program has sent it.
                reply = equal[0] if len({node.end.generation.token_ids for node in equal}) == 1 else None
            if reply is None:
                ids.update((call.id, call.id) for call in message.tool_calls)
            else:
                own_ids = (policy_id for _, policy_id in reply.call_ids)
                ids.update(zip((call.id for call in message.tool_calls), own_ids, strict=True))
            if index < start:
                continue
            if message.role == "tool":
                message = replace(message, tool_call_id=ids[message.tool_call_id])
            messages.append(message if reply is None else reply.end.message)
        return tuple(messages), has_replies


def _same_ids(nodes: Sequence[Node], messages: Sequence[Message]) -> Sequence[Node]:
    """Return the turns whose calls, and those before them, have the ids that the messages have; all if none has them."""
    if len(nodes) < 2:
        return nodes
    same = [
        node
        for node in nodes
        if all(
            [call.id for call in messages[length - 1].tool_calls] == [call.id for call in turn.shown.tool_calls]
            for length, turn in node.path().items()
        )
    ]
    return same or nodes


def _meaning(message: Message, numbers: dict[str, int]) -> tuple[bytes, bytes]:
    """Return the reasoning of a message, and the rest of it, as bytes that are equal if the meaning is.

    Args:
        message: of any role.
        numbers: of the calls so far by their ids; those of the message are added.
    """
    digests = [image.digest for image in message.images]
    if message.role == "tool":
        return b"", _json(["tool", numbers.get(message.tool_call_id or ""), message.content.strip(), *digests])
    if message.role != "assistant":
        return b"", _json([message.role, message.content.strip(), *digests])
    reasoning, text = split_thinking(message.content)
    for call in message.tool_calls:
        numbers[call.id] = len(numbers)
    calls = [[call.name, _plain(call.arguments)] for call in message.tool_calls]
    return reasoning.strip().encode(), _json(["assistant", text.strip(), calls])


def _plain(value: Any) -> Any:
    """Return a JSON value with whole numbers as integers: programs in JavaScript write 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(member) for key, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, list) else value


def _json(value: Any) -> bytes:
    with suppress(TypeError):  # whole numbers above 64 bits, and deep nesting
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    try:
        return _encode(value).encode()
    except RecursionError:
        raise BadRequestError("the arguments of a call are nested too deeply") from None


def _are_same(tools: Sequence[Tool], others: Sequence[Tool]) -> bool:
    """Return whether tools are the same objects, which those of equal descriptions are (`make_tool`)."""
    return len(tools) == len(others) and all(map(operator.is_, tools, others))


def _tools_digest(tools: Sequence[Tool]) -> bytes:
    return _digest(b"", _json([[tool.name, tool.description, tool.parameters] for tool in tools]))


def _digest(first: bytes, second: bytes) -> bytes:
    return hashlib.blake2b(first + second, digest_size=16).digest()


def shown_calls(calls: Iterable[ToolCall], turn: int) -> tuple[ToolCall, ...]:
    """Return the calls that an agent program sees of a turn, with ids that every dialect allows."""
    readable = (call for call in calls if call.is_readable)
    return tuple(replace(call, id=call_id(turn, number)) for number, call in enumerate(readable))
