"""Answers GET requests with the state of the service; the options are in config.json."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer

with open("/work/plum.json") as file:
    CONFIG = json.load(file)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{CONFIG['owner']} is up".encode()
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


HTTPServer(("127.0.0.1", CONFIG["port"]), Handler).serve_forever()
