"""Traces of jobs, from submission to result, with OpenTelemetry: off unless asked for.

A job carries its context in `trace_id`, as a W3C traceparent. A `trace_id` that the caller gives stays as it is. If it
is a traceparent, the spans of the job belong to that trace. OpenTelemetry's SDK decides what becomes of the spans.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

log = logging.getLogger(__name__)
VARIABLE = "ROLLOUTMQ_TRACES"
J = TypeVar("J")
FLUSH_MS = 2_000
_asked = False
_provider: TracerProvider | None = None
_tracer: Tracer | None = None


def enable(provider: TracerProvider | None = None) -> None:
    """Make spans from now on, in this process.

    provider: None takes OpenTelemetry's global one. Raises ConfigError if OpenTelemetry is not installed.
    """
    global _asked, _provider, _tracer
    try:
        from opentelemetry.trace import get_tracer  # noqa: PLC0415 – an extra
    except ModuleNotFoundError:
        raise ConfigError("traces need OpenTelemetry: pip install 'rolloutmq[otel]'") from None
    _asked, _provider, _tracer = True, provider, get_tracer("rolloutmq", tracer_provider=provider)


def flush() -> None:
    """Hand over the spans that wait to be sent, for a process that is about to end without Python's own way out."""
    if _tracer is not None:
        from opentelemetry.trace import get_tracer_provider  # noqa: PLC0415

        send = getattr(_provider or get_tracer_provider(), "force_flush", None)  # a method of the SDK's
        if send is not None:
            send(FLUSH_MS)


def disable() -> None:
    """Make no spans any more."""
    global _asked, _tracer
    _asked, _tracer = True, None


def tracer() -> Tracer | None:
    """What makes spans, None if traces are off."""
    global _asked  # noqa: PLW0603
    if not _asked:
        _asked = True
        if os.environ.get(VARIABLE) == "1":
            try:
                enable()
            except ConfigError as error:  # no reason to run no jobs
                log.warning("%s=1: %s", VARIABLE, error)
    return _tracer


def parent(trace_id: str | None) -> Context:
    """The context that a job's `trace_id` names; an empty one for what is no traceparent."""
    from opentelemetry.context import Context  # noqa: PLC0415
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    return TraceContextTextMapPropagator().extract({"traceparent": trace_id or ""}, Context())


def past(name: str, seconds: float, within: Context | None = None, **said: str | float) -> None:
    """Note what took so many seconds and ends now. within: None for the caller's own context."""
    if (making := tracer()) is not None:
        now = time.time_ns()
        start = now - round(max(0.0, seconds) * 1e9)
        making.start_span(name, within, start_time=start, attributes=_named(said)).end(now)


@contextmanager
def submission(jobs: Sequence[J]) -> Iterator[list[J]]:
    """The same jobs, each with a context in it, and a span for each until the block ends."""
    if (making := tracer()) is None:
        yield list(jobs)
        return
    spans = [_submitting(making, job) for job in jobs]
    try:
        yield [_carrying(job, span) for job, span in zip(jobs, spans, strict=True)]
    except Exception as error:
        for span in spans:
            span.record_exception(error)
        raise
    finally:
        for span in spans:
            span.end()


def _submitting(making: Tracer, job: Any) -> Span:
    from opentelemetry.trace import SpanKind  # noqa: PLC0415

    said = _named({"job_id": job.id, "group_id": job.group, "samples": job.n})
    given = parent(job.trace_id) if job.trace_id else None
    return making.start_span("rolloutmq submit", given or None, kind=SpanKind.PRODUCER, attributes=said)


def _carrying(job: Any, span: Span) -> Any:
    from opentelemetry.trace import set_span_in_context  # noqa: PLC0415
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    if job.trace_id is not None:
        return job
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    context = carrier.get("traceparent")  # none without an SDK
    return job if context is None else job.model_copy(update={"trace_id": context})


def _named(said: dict[str, Any]) -> dict[str, str | float]:
    return {f"rolloutmq.{name}": value for name, value in said.items()}
