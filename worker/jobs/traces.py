"""Spans of a job on a worker: in the queue, here, each leg in the engine, each publication."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...messages import tracing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


@dataclass(slots=True)
class _Held:
    span: Span
    within: Context
    finished: dict[int, float] = field(default_factory=dict)  # sample -> when its last leg ended


class JobTraces:
    """The open spans of the jobs that one worker holds. It does nothing while traces are off."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def taken(self, job: Any, attempt: int, queued_s: float) -> bool:
        """A job was claimed and admitted. Returns whether there are spans of it."""
        if (making := tracing.tracer()) is None:
            return False
        from opentelemetry.trace import SpanKind, set_span_in_context  # noqa: PLC0415 – an extra

        within = tracing.parent(job.trace_id)
        tracing.past("rolloutmq queue", queued_s, within, job_id=job.id)
        said = {"rolloutmq.job_id": job.id, "rolloutmq.attempt": attempt}
        span = making.start_span("rolloutmq job", within, kind=SpanKind.CONSUMER, attributes=said)
        self._held[job.id] = _Held(span, set_span_in_context(span, within))
        return True

    def leg(self, job_id: str, sample: int, version: int, seconds: float, tokens: int) -> None:
        """A leg has ended in the engine."""
        if (held := self._held.get(job_id)) is not None:
            held.finished[sample] = time.monotonic()
            said = {"sample": sample, "version": version, "tokens": tokens}
            tracing.past("rolloutmq leg", seconds, held.within, **said)

    def published(self, job_id: str, sample: int) -> None:
        """A sample's result is on the reply stream."""
        if (held := self._held.get(job_id)) is not None:
            now = time.monotonic()
            tracing.past("rolloutmq publish", now - held.finished.pop(sample, now), held.within, sample=sample)

    def left(self, job_id: str) -> None:
        """The job is not here any more: done, handed back, cancelled or lost."""
        if (held := self._held.pop(job_id, None)) is not None:
            held.span.end()
