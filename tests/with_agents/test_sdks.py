"""The SDKs of OpenAI and Anthropic, unmodified: a loop with a tool in every dialect, streamed and whole, is the same rollout."""

import json
from pathlib import Path

import numpy as np
import pytest
from program_episodes import play_program

from agentrl.config.agent import AgentConfig
from agentrl.render.renderer import ChatRenderer

pytestmark = pytest.mark.agents

PROGRAM = """
import json, os, subprocess, sys, threading, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

dialect, stream, drops = sys.argv[1], sys.argv[2] == "stream", sys.argv[3:] == ["drop"]


class DroppingProxy(BaseHTTPRequestHandler):
    # Forwards requests, and drops the connection of each first one when the reply is there.
    seen = set()
    upstream = os.environ["ANTHROPIC_BASE_URL"]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        with urllib.request.urlopen(urllib.request.Request(self.upstream + self.path, body, headers)) as response:
            content, kind = response.read(), response.headers["content-type"]
        self.close_connection = True
        if body not in self.seen:
            self.seen.add(body)
            return
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words):
        pass


if drops:
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), DroppingProxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{proxy.server_port}"
    os.environ |= {"OPENAI_BASE_URL": f"{address}/v1", "ANTHROPIC_BASE_URL": address}

model, prompt = os.environ["OPENAI_MODEL"], sys.stdin.read()
schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def run(arguments):
    return subprocess.run(arguments["command"], shell=True, capture_output=True, text=True).stdout


def chat():
    import openai

    client, messages = openai.OpenAI(), [{"role": "user", "content": prompt}]
    tools = [{"type": "function", "function": {"name": "shell", "description": "Run it.", "parameters": schema}}]
    while True:
        if stream:
            with client.chat.completions.stream(model=model, messages=messages, tools=tools) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        messages.append({"role": "assistant", "content": message.content})
        if not message.tool_calls:
            return message.content
        messages[-1]["tool_calls"] = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls]
        for call in messages[-1]["tool_calls"]:
            call["function"] = {key: call["function"][key] for key in ("name", "arguments")}
            output = run(json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})


def responses():
    import openai

    client, items = openai.OpenAI(), [{"role": "user", "content": prompt}]
    tools = [{"type": "function", "name": "shell", "description": "Run it.", "parameters": schema}]
    while True:
        if stream:
            with client.responses.stream(model=model, input=items, tools=tools, store=False) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(model=model, input=items, tools=tools, store=False)
        items += [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            output = run(json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def messages():
    import anthropic

    client, messages = anthropic.Anthropic(), [{"role": "user", "content": prompt}]
    tools = [{"name": "shell", "description": "Run it.", "input_schema": schema}]
    while True:
        request = {"model": model, "messages": messages, "tools": tools, "max_tokens": 1000}
        if stream:
            with client.messages.stream(**request) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**request)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return message.content[-1].text
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": run(call.input)} for call in calls]
        messages.append({"role": "user", "content": results})


answer = {"chat": chat, "responses": responses, "messages": messages}[dialect]()
assert answer == "Remu", answer
assert len(DroppingProxy.seen) == 3 * drops
"""


def call(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


SCRIPT = (f"I write.{call('echo Remu > answer.txt')}{call('echo written')}", call("cat answer.txt"), "Remu")


@pytest.mark.parametrize("bin_folder", ["sdks"], indirect=True)
def test_every_sdk_gives_the_same_rollout(bin_folder: Path, renderer: ChatRenderer, tmp_path: Path) -> None:
    """Also if each connection is dropped before the reply: the SDK retries, and no turn is sampled again."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    rows = []
    for dialect in ("chat", "responses", "messages"):
        for how in ("whole", "stream", "whole drop", "stream drop"):
            command = f"{bin_folder / 'python'} {path} {dialect} {how}"
            rollout, generations = play_program(AgentConfig(command=command), SCRIPT, renderer)
            assert rollout.failure is None, rollout.failure
            assert rollout.reward == 1.0
            assert len(generations) == 3
            (row,) = rollout.rows
            rows.append(row)
    for row in rows[1:]:
        for name in ("token_ids", "mask", "mask_reason", "logprobs", "provenance"):
            assert np.array_equal(getattr(row, name), getattr(rows[0], name)), name
