"""Small clients of the gateway's dialects: conversations as bodies, replies and streams as what was said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Rewrite = Callable[[Any], Any]
"""Changes arguments of calls without changing their meaning; returns a JSON value."""


@dataclass(frozen=True)
class Said:
    """An assistant's message as a client has it."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str, Any], ...]
    """Id, name and arguments."""


@dataclass(frozen=True)
class Text:
    """A message of another role; a result of a tool has the id of its call."""

    role: str
    text: str
    call_id: str = ""


Talk = Sequence[Said | Text]
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "n": {"type": "number"}}}


class ChatClient:
    path = "/v1/chat/completions"

    def body(self, talk: Talk, tools: Sequence[str], rewrite: Rewrite) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for entry in talk:
            if isinstance(entry, Text):
                keys = {"tool_call_id": entry.call_id} if entry.call_id else {}
                messages.append({"role": entry.role, "content": entry.text, **keys})
                continue
            message: dict[str, Any] = {"role": "assistant", "content": entry.text or None}
            if entry.reasoning:
                message["reasoning_content"] = entry.reasoning
            if entry.calls:
                message["tool_calls"] = [
                    {
                        "id": id,
                        "type": "function",
                        "function": {"name": name, "arguments": json.dumps(rewrite(arguments))},
                    }
                    for id, name, arguments in entry.calls
                ]
            messages.append(message)
        functions = [{"name": name, "description": "Use it.", "parameters": SCHEMA} for name in tools]
        return {"messages": messages, "tools": [{"type": "function", "function": function} for function in functions]}

    def read(self, body: dict[str, Any]) -> Said:
        message = body["choices"][0]["message"]
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        return Said(
            message.get("reasoning_content", ""),
            message["content"] or "",
            tuple((id, function["name"], json.loads(function["arguments"])) for id, function in calls),
        )

    def read_stream(self, text: str) -> Said:
        deltas = [event["choices"][0]["delta"] for event in events(text) if event and event["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        joined = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content")}
        return self.read({"choices": [{"message": {**joined, "tool_calls": calls}}]})


class ResponsesClient:
    path = "/v1/responses"

    def body(self, talk: Talk, tools: Sequence[str], rewrite: Rewrite) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for entry in talk:
            if isinstance(entry, Text):
                if entry.call_id:
                    items.append({"type": "function_call_output", "call_id": entry.call_id, "output": entry.text})
                else:
                    items.append({"role": entry.role, "content": [{"type": "input_text", "text": entry.text}]})
                continue
            if entry.reasoning:
                items.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": entry.reasoning}]})
            if entry.text or not entry.calls:
                content = [{"type": "output_text", "text": entry.text}]
                items.append({"type": "message", "role": "assistant", "content": content})
            for id, name, arguments in entry.calls:
                text = json.dumps(rewrite(arguments))
                items.append({"type": "function_call", "call_id": id, "name": name, "arguments": text})
        functions = [
            {"type": "function", "name": name, "description": "Use it.", "parameters": SCHEMA} for name in tools
        ]
        return {"input": items, "tools": functions}

    def read(self, body: dict[str, Any]) -> Said:
        parts: dict[str, str] = {"reasoning": "", "message": ""}
        calls: list[tuple[str, str, Any]] = []
        for item in body["output"]:
            if item["type"] == "function_call":
                calls.append((item["call_id"], item["name"], json.loads(item["arguments"])))
            else:
                parts[item["type"]] += "".join(part["text"] for part in item["content"])
        return Said(parts["reasoning"], parts["message"], tuple(calls))

    def read_stream(self, text: str) -> Said:
        stream = [event for event in events(text) if event]
        assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
        said = self.read(
            {"output": [event["item"] for event in stream if event["type"] == "response.output_item.done"]}
        )
        deltas = [event["delta"] for event in stream if event["type"] == "response.output_text.delta"]
        assert stream[0]["type"] == "response.created"
        assert "".join(deltas) == said.text
        assert self.read(stream[-1]["response"]) == said
        return said


class MessagesClient:
    path = "/v1/messages"

    def body(self, talk: Talk, tools: Sequence[str], rewrite: Rewrite) -> dict[str, Any]:
        system = [entry.text for entry in talk if isinstance(entry, Text) and entry.role == "system"]
        messages: list[dict[str, Any]] = []
        for entry in talk:
            if isinstance(entry, Said):
                blocks: list[dict[str, Any]] = []
                if entry.reasoning:
                    blocks.append({"type": "thinking", "thinking": entry.reasoning, "signature": "x"})
                if entry.text:
                    blocks.append({"type": "text", "text": entry.text})
                for id, name, arguments in entry.calls:
                    blocks.append({"type": "tool_use", "id": id, "name": name, "input": rewrite(arguments)})
                messages.append({"role": "assistant", "content": blocks})
            elif entry.call_id:
                result = {"type": "tool_result", "tool_use_id": entry.call_id, "content": entry.text}
                if messages[-1]["role"] == "user":  # all results of a turn are in one message
                    messages[-1]["content"].append(result)
                else:
                    messages.append({"role": "user", "content": [result]})
            elif entry.role == "user":
                messages.append({"role": "user", "content": [{"type": "text", "text": entry.text}]})
        functions = [{"name": name, "description": "Use it.", "input_schema": SCHEMA} for name in tools]
        blocks = [{"type": "text", "text": text} for text in system]
        return {"messages": messages, "tools": functions, "max_tokens": 4096, **({"system": blocks} if blocks else {})}

    def read(self, body: dict[str, Any]) -> Said:
        blocks = body["content"]
        texts = {
            kind: "".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("thinking", "text")
        }
        calls = tuple((block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use")
        return Said(texts["thinking"], texts["text"], calls)

    def read_stream(self, text: str) -> Said:
        blocks: list[dict[str, Any]] = []
        arguments: dict[int, str] = {}
        for event in events(text):
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                delta, index = event["delta"], event["index"]
                if "partial_json" in delta:
                    arguments[index] = arguments.get(index, "") + delta["partial_json"]
                else:
                    kind = delta["type"].removesuffix("_delta")
                    blocks[index][kind] += delta[kind]
        for index, partial in arguments.items():
            blocks[index]["input"] = json.loads(partial)
        return self.read({"content": blocks})


Client = ChatClient | ResponsesClient | MessagesClient


def events(text: str) -> list[Any]:
    """Return the data of a stream's events; that of ``[DONE]`` is None."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [None if line == "[DONE]" else json.loads(line) for line in lines]
