"""Spans of a run over OpenTelemetry (OTLP), by the OpenTelemetry SDK."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, time_ns
from typing import TYPE_CHECKING

from agentrl.core.extras import not_installed_error, require
from agentrl.obs.trackers import Tracker
from agentrl.obs.waiting import PHASE, ROLLOUT, waiting

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import SpanContext

QUEUE = 65536
"""Spans that wait for the collector; more are dropped."""


class OtlpSpans(Tracker):
    """A `WaitListener` and a `Tracker` that passes each span to a processor of the OpenTelemetry SDK.

    A phase of a step is a trace, and so is each attempt at an episode, with a link to the phase in which it began. A span is
    named by its kind, such as ``turn``, ``tool`` or ``request``. Its attribute ``agentrl.of`` names the object.

    Args:
        processor: receives ended spans; that of `open_otlp` sends them.
        run: name of the run, the attribute ``agentrl.run`` of the resource.
    """

    def __init__(self, processor: SpanProcessor, run: str) -> None:
        from opentelemetry.sdk.resources import Resource

        self._processor = processor
        self._resource = Resource.create({"service.name": "agentrl", "agentrl.run": run})
        self._random = random.Random()  # no seed of the run may repeat ids
        self._closed = False
        self._lock = threading.Lock()
        self._open: dict[waiting, tuple[SpanContext, SpanContext | None]] = {}
        """Spans in progress, with the span around each."""
        self._epoch_ns = time_ns() - int(monotonic() * 1e9)
        """Time of the epoch at which `time.monotonic`'s clock is 0."""

    def on_begin(self, wait: waiting) -> None:
        """Give a span its id, and that of its trace."""
        with self._lock:
            outer, _ = self._open.get(wait.parent, (None, None)) if isinstance(wait.parent, waiting) else (None, None)
            self._open[wait] = self._new_context(None if wait.kind == ROLLOUT else outer), outer

    def on_end(self, wait: waiting, ended_at: float, error: str) -> None:
        """Pass on a span that has ended."""
        with self._lock:
            context, outer = self._open.pop(wait)
        details = wait.details
        name = details.rpartition(", ")[2] if wait.kind == PHASE else wait.kind
        self._send(name, details, context, outer, (wait.since, ended_at), linked=wait.kind == ROLLOUT, error=error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the span of a training step."""
        if "time/step_s" in metrics:
            ended_at = monotonic()
            self._send(
                "step", f"step {step}", self._new_context(None), None, (ended_at - metrics["time/step_s"], ended_at)
            )

    def _send(
        self,
        name: str,
        details: str,
        context: SpanContext,
        outer: SpanContext | None,
        times: tuple[float, float],
        *,
        linked: bool = False,
        error: str = "",
    ) -> None:
        if self._closed:
            return
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Link, Status, StatusCode

        since, until = (self._epoch_ns + int(seconds * 1e9) for seconds in times)
        self._processor.on_end(
            ReadableSpan(
                name,
                context=context,
                parent=None if linked else outer,
                resource=self._resource,
                attributes={"agentrl.of": details},
                links=(Link(outer),) if linked and outer is not None else (),
                status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
                start_time=since,
                end_time=until,
            )
        )

    def _new_context(self, outer: SpanContext | None) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        trace_id = self._random.getrandbits(128) if outer is None else outer.trace_id
        return SpanContext(trace_id, self._random.getrandbits(64), is_remote=False, trace_flags=TraceFlags(1))

    def close(self) -> None:
        """Send pending spans, for the processor's time limit at most. Later spans are dropped."""
        if not self._closed:
            self._closed = True
            self._processor.shutdown()


def open_otlp(url: str, folder: Path) -> OtlpSpans:
    """Return what sends the spans of a run to the collector at ``url``, in a thread.

    Headers, such as a key, are in the environment variable ``OTEL_EXPORTER_OTLP_HEADERS``.

    Args:
        url: with the path, such as ``http://127.0.0.1:4318/v1/traces``.
        folder: of the run, whose name is the run's.

    Raises:
        MissingError: the OpenTelemetry SDK is not installed.
    """
    require("opentelemetry", f"obs.otlp={url}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:  # other packages install parts of it
        raise not_installed_error("opentelemetry", f"obs.otlp={url}") from error
    return OtlpSpans(BatchSpanProcessor(OTLPSpanExporter(endpoint=url), max_queue_size=QUEUE), folder.absolute().name)
