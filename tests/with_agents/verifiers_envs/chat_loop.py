"""An agent of verifiers without a process of its own: OpenAI's SDK, and tools over MCP."""

import json

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils import mcp


class ChatLoop(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": 60} for name, url in mcp_urls.items()}
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        try:
            await self._talk(client, ctx.model, messages, servers)
        finally:
            await client.close()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _talk(self, client, model, messages, servers):
        tools, sessions = [], {}
        for spec in servers.values():
            async with mcp.mcp_client(spec) as session:
                for tool in (await session.list_tools()).tools:
                    schema = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
                    tools.append({"type": "function", "function": schema})
                    sessions[tool.name] = spec
        while True:
            extra = {"tools": tools} if tools else {}
            completion = await client.chat.completions.create(model=model, messages=messages, **extra)
            message = completion.choices[0].message
            if not message.tool_calls:
                return
            calls = [
                {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
                for call in message.tool_calls
            ]
            messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
            for call in message.tool_calls:
                async with mcp.mcp_client(sessions[call.function.name]) as session:
                    result = await session.call_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content[0].text})
