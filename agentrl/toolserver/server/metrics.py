"""What a tool server counts, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The format of `Metrics.text`."""
UNKNOWN = "(unknown)"
"""The label of calls that name no tool: names that a policy makes up would be labels without end."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The figures of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "agentrl_tool_calls", "Calls answered; a retry does not count.", ["tool", "status"], registry=self.registry
        )
        self.calls_running = Gauge(
            "agentrl_tool_calls_running", "Calls that have come and are not answered.", registry=self.registry
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
        self.sessions_waiting = Gauge(
            "agentrl_sessions_waiting", "Sessions that wait for room.", registry=self.registry
        )
        self.sessions_reaped = Counter(
            "agentrl_sessions_reaped", "Sessions closed because nobody called.", registry=self.registry
        )
        self.sandboxes_open = Gauge(
            "agentrl_sandboxes_open", "Sandboxes, those for scoring included.", registry=self.registry
        )
        self.sandbox_start_seconds = Histogram(
            "agentrl_sandbox_start_seconds",
            "Until a new sandbox was ready.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.sandbox_failures = Counter(
            "agentrl_sandbox_failures", "Calls that ended because a sandbox failed.", registry=self.registry
        )

    def text(self) -> bytes:
        """Return all figures in the text format."""
        return bytes(generate_latest(self.registry))
