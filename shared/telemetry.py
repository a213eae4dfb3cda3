"""Traces, metrics and structured logs of one process (opentelemetry-sdk, structlog).

Nothing leaves the machine unless ``otlp_endpoint`` is set. Metrics are read from ``/metrics`` in Prometheus' text format;
every log line is one JSON object with the ids of the current trace.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import structlog
from opentelemetry import metrics, propagate, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Histogram, generate_latest, start_http_server

from semantide.shared.config import Settings
from semantide.shared.listening import listening_address
from semantide.shared.redaction import RedactedLines, RedactedSpans, Redaction
from semantide.shared.version import code_version

_started = False


def start(process: str, settings: Settings) -> None:
    """Set up this process once; later calls do nothing."""
    global _started
    if _started:
        return
    _started = True
    redaction = Redaction.of(settings)
    resource = Resource.create({"service.name": f"semantide-{process}", "service.version": code_version()})
    # Without a collector spans only lend their ids to logs and messages; recording them would cost every request time for nothing.
    tracing = TracerProvider(resource=resource, sampler=DEFAULT_ON if settings.otlp_endpoint else ALWAYS_OFF)
    if settings.otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        tracing.add_span_processor(BatchSpanProcessor(RedactedSpans(OTLPSpanExporter(f"{settings.otlp_endpoint.rstrip('/')}/v1/traces"), redaction)))
    trace.set_tracer_provider(tracing)
    metrics.set_meter_provider(MeterProvider(resource=resource, metric_readers=[PrometheusMetricReader()]))
    if settings.metrics_port:
        start_http_server(settings.metrics_port, addr=listening_address(settings.metrics_host))
    start_logs(process, settings.log_level, redaction)


def start_logs(process: str, level: str, redaction: Redaction | None = None) -> None:
    """One JSON object a line on standard error, for our loggers and everybody else's."""

    def add_trace(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            event["trace_id"], event["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        event["process"] = process
        return event

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_trace,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    lines = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
    )
    handler.setFormatter(lines if redaction is None else RedactedLines(lines, redaction))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "celery", "kombu", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def logger(name: str) -> Any:
    """A structured logger: ``logger("ingestion").info("segment written", rows=500)``."""
    return structlog.stdlib.get_logger(f"semantide.{name}")


def tracer(name: str) -> trace.Tracer:
    """A tracer of one room."""
    return trace.get_tracer(f"semantide.{name}")


def current_trace() -> str | None:
    """The current span as a W3C ``traceparent``, to be kept where no message carries it; None outside of a trace."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent")


@contextmanager
def continued_trace(trace_parent: str | None, name: str, room: str = "jobs") -> Iterator[None]:
    """A span that continues a kept trace, or begins one of its own."""
    context = propagate.extract({"traceparent": trace_parent}) if trace_parent else None
    with tracer(room).start_as_current_span(name, context=context):
        yield


@contextmanager
def linked_span(room: str, name: str, trace_parents: Iterable[str]) -> Iterator[None]:
    """A span of work done for several requests at once, linked to the kept trace of each."""
    found = [trace.get_current_span(propagate.extract({"traceparent": kept})).get_span_context() for kept in trace_parents if kept]
    with tracer(room).start_as_current_span(name, links=[trace.Link(context) for context in found if context.is_valid]):
        yield


def stage_spans(room: str, stages: Iterable[tuple[str, float, float]]) -> None:
    """Spans below the current one of stages that were timed elsewhere: name, begin and end by ``time.perf_counter``."""
    if not trace.get_current_span().is_recording():
        return
    made, epoch = tracer(room), time.time_ns() - time.perf_counter_ns()
    for name, begin, end in stages:
        made.start_span(name, start_time=epoch + int(begin * 1e9)).end(epoch + int(end * 1e9))


def meter(name: str) -> metrics.Meter:
    """A meter of one room; instruments made from it appear on ``/metrics``."""
    return metrics.get_meter(f"semantide.{name}")


@cache
def fast_counter(name: str, description: str, label: str = "") -> Counter:
    """A counter for paths where every microsecond counts: a twentieth of the cost of a meter's. On the same page; one label at most."""
    return Counter(name, description, [label] if label else [])


@cache
def fast_histogram(name: str, description: str, bounds: tuple[float, ...], label: str = "") -> Histogram:
    """A histogram like ``fast_counter``."""
    return Histogram(name, description, [label] if label else [], buckets=bounds)


def metrics_page() -> tuple[bytes, str]:
    """The current metrics and their content type."""
    return generate_latest(), CONTENT_TYPE_LATEST
