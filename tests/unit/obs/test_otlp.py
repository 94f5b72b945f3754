"""Spans over OpenTelemetry: their traces, names and times, and what arrives at a collector."""

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agentrl.core.errors import MissingError
from agentrl.obs.otlp import OtlpSpans, open_otlp
from agentrl.obs.waiting import PHASE, REQUEST, ROLLOUT, WaitRegistry, waiting

pytest.importorskip("opentelemetry.sdk")


class Processor:
    """Keeps ended spans."""

    def __init__(self):
        self.spans = {}
        self.closed = 0

    def on_end(self, span):
        self.spans[span.name] = span

    def shutdown(self):
        self.closed += 1


def play(listener):
    registry = WaitRegistry([listener])
    token = registry.enter()
    with waiting(PHASE, "step 3", "train"), waiting(ROLLOUT, "3/0/1"), pytest.raises(OSError), waiting(REQUEST, "x"):
        raise OSError
    listener.log(3, {"time/step_s": 1.5})
    listener.log(3, {"eval/reward": 1.5})
    registry.leave(token)


def test_an_episode_is_a_trace_with_a_link_to_its_phase():
    processor = Processor()
    state_before = time.time_ns()
    spans = OtlpSpans(processor, "first")
    play(spans)
    train, rollout, request, step = (processor.spans.pop(name) for name in ("train", "rollout", "request", "step"))
    assert not processor.spans
    assert train.parent is rollout.parent is None
    assert train.context.trace_id != rollout.context.trace_id
    assert [link.context for link in rollout.links] == [train.context]
    assert (request.parent, request.context.trace_id) == (rollout.context, rollout.context.trace_id)
    assert (request.status.is_ok, request.status.description) == (False, "OSError")
    assert rollout.attributes == {"agentrl.of": "3/0/1"}
    assert rollout.resource.attributes["agentrl.run"] == "first"
    assert state_before - 1e6 <= rollout.start_time <= request.start_time <= request.end_time <= rollout.end_time
    assert abs(step.end_time - step.start_time - 1.5e9) < 1e6
    spans.close()
    spans.close()
    play(spans)
    assert (processor.closed, processor.spans) == (1, {})


def test_a_collector_gets_them():
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        spans = open_otlp(f"http://127.0.0.1:{server.server_port}/v1/traces", Path("runs/first"))
        play(spans)
        spans.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    [(path, body)] = bodies
    assert path == "/v1/traces"
    assert all(word in body for word in (b"rollout", b"request", b"3/0/1", b"first"))


def test_parts_of_the_sdk_are_not_enough(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingError, match=r"obs\.otlp=http://x needs .*agentrl-framework\[otlp\]"):
        open_otlp("http://x", Path())
