"""Traces of a benchmark, made as a run makes them, and dropped where they would be sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rolloutmq.messages import tracing
from rolloutmq.messages.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


@contextlib.contextmanager
def traces_on() -> Iterator[None]:
    """Inside the block this process makes spans with OpenTelemetry's SDK, in batches, every one of them sampled. They
    are dropped where they would be sent: what a collector costs is not measured."""
    provider = _provider()
    tracing.enable(provider)
    try:
        yield
    finally:
        tracing.disable()
        provider.shutdown()


def _provider() -> TracerProvider:
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import (
            BatchSpanProcessor,
            SpanExporter,
            SpanExportResult,
        )
    except ModuleNotFoundError:
        raise ConfigError("--watched needs OpenTelemetry: pip install 'rolloutmq[otel]'") from None

    class Dropped(SpanExporter):  # type: ignore[misc]
        def export(self, spans: Any) -> Any:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Dropped()))
    return provider
