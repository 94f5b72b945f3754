"""An MCP server of the standard library alone, for machines without packages: ``python plain_mcp_server.py stdio|http|sse PORT``.

Its tool ``add`` counts up a number that it has in memory; ``end`` ends the process.
"""

import json
import os
import queue
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOLS = [
    {
        "name": "add",
        "description": "Add to the sum.",
        "inputSchema": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
    {"name": "end", "description": "End.", "inputSchema": {"type": "object"}},
]
total = 0
events: "queue.Queue[str]" = queue.Queue()


def answer(message: Any) -> Any:
    global total
    method, parameters = message.get("method"), message.get("params") or {}
    if "id" not in message:
        return None
    result: dict[str, Any] = {}
    if method == "initialize":
        server = {"name": "plain", "version": "1"}
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}
    elif method == "tools/list":
        result = {"tools": TOOLS}
    elif method == "tools/call":
        if parameters["name"] == "end":
            os._exit(3)
        total += parameters["arguments"]["number"]
        text = f"{total} as {os.getuid()}"
        result = {"content": [{"type": "text", "text": text}]}
    elif method != "ping":
        return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "no such method"}}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if sys.argv[1] == "http":
            return self.reply(405, "")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"event: endpoint\ndata: /messages\n\n")
        while True:
            self.wfile.write(f"event: message\ndata: {events.get()}\n\n".encode())
            self.wfile.flush()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        allowed = self.headers.get("Authorization") == "Bearer word" and self.headers["Host"].startswith("side")
        reply = answer(body)
        if not allowed:
            self.reply(401, "")
        elif sys.argv[1] == "sse":
            self.reply(202, "")
            if reply is not None:
                events.put(json.dumps(reply))
        else:
            self.reply(202 if reply is None else 200, "" if reply is None else json.dumps(reply))

    def do_DELETE(self) -> None:
        self.reply(200, "")

    def reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    if sys.argv[1] != "stdio":
        ThreadingHTTPServer(("", int(sys.argv[2])), Handler).serve_forever()
    for line in sys.stdin:
        if (reply := answer(json.loads(line))) is not None:
            print(json.dumps(reply), flush=True)


main()
