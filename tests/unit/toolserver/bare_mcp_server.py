"""An MCP server over its standard streams in the standard library alone: it starts fast, and proves no SDK is needed."""

import json
import os
import signal
import sys

ANYTHING = {"type": "object", "properties": {}}
TOOLS = [
    {"name": name, "description": f"Do {name}.", "inputSchema": ANYTHING} for name in ("count", "die", "hang", "pid")
]
counted = 0


def answer(method: str, params: dict) -> dict | None:
    global counted
    match method:
        case "initialize":
            server = {"name": "bare", "version": "1"}
            return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}
        case "tools/list":
            return {"tools": TOOLS}
        case "tools/call":
            counted += 1
            if params["name"] == "hang":
                return None
            if params["name"] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            text = str(os.getpid() if params["name"] == "pid" else counted)
            return {"content": [{"type": "text", "text": text}]}
    raise LookupError(method)


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    reply = {"jsonrpc": "2.0", "id": request["id"]}
    try:
        result = answer(request["method"], request.get("params") or {})
        if result is None:
            continue
        reply["result"] = result
    except LookupError as error:
        reply["error"] = {"code": -32601, "message": f"no method {error}"}
    print(json.dumps(reply), flush=True)
