"""Prometheus metrics of a tool server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The format of `Metrics.text`."""
UNKNOWN = "(unknown)"
"""The label of calls of unknown tools: names that a policy invents would be unbounded labels."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "agentrl_tool_calls", "Calls answered; a retry does not count.", ["tool", "status"], registry=self.registry
        )
        self.calls_running = Gauge(
            "agentrl_tool_calls_running", "Calls that are not answered yet.", registry=self.registry
        )
        self.call_seconds = Histogram(
            "agentrl_tool_call_seconds",
            "From a call's arrival to its result, waiting for other calls of its session included.",
            ["tool"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.sessions_open = Gauge(
            "agentrl_sessions_open", "Sessions that are open or being closed.", registry=self.registry
        )
        self.sessions_waiting = Gauge("agentrl_sessions_waiting", "Sessions in the queue.", registry=self.registry)
        self.sessions_reaped = Counter(
            "agentrl_sessions_reaped", "Sessions closed for idleness.", registry=self.registry
        )
        self.sandboxes_open = Gauge(
            "agentrl_sandboxes_open", "Open sandboxes, those for scoring included.", registry=self.registry
        )
        self.sandbox_start_seconds = Histogram(
            "agentrl_sandbox_start_seconds", "Time to open a sandbox.", buckets=_SECONDS, registry=self.registry
        )
        self.sandbox_failures = Counter(
            "agentrl_sandbox_failures", "Calls that ended with a failure of their sandbox.", registry=self.registry
        )

    def text(self) -> bytes:
        """Return all metrics in the text format."""
        return bytes(generate_latest(self.registry))
