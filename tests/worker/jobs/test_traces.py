"""Spans of jobs, collected by OpenTelemetry's own SDK in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.peers.publishing import publish, publisher
from support.pools.pool import eventually, worker
from support.specimens.messages import job

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Caps, PoolBusy, SamplingParams, tracing
from rolloutmq.worker.scripted.engine import ScriptedEngine

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

SHORT = SamplingParams(max_new_tokens=4)
GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.enable(provider)
    try:
        yield exporter
    finally:
        tracing.disable()


def by_name(spans: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in spans.get_finished_spans():
        found.setdefault(span.name.removeprefix("rolloutmq "), []).append(span)
    return found


async def all_ended(spans: InMemorySpanExporter, jobs: int) -> dict[str, list[ReadableSpan]]:
    """Every span, once that many jobs have left the worker: it hears of its own publication after the client."""
    await eventually(lambda: len(by_name(spans).get("job", [])) == jobs, what="the jobs' spans have ended")
    return by_name(spans)


def trace_of(span: ReadableSpan) -> int:
    return span.context.trace_id


def above(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def number(span: ReadableSpan) -> int:
    return span.context.span_id


async def test_a_job_is_one_trace_from_submission_to_result(
    redis_db: str, client: RolloutClient, spans: InMemorySpanExporter
) -> None:
    async with worker(redis_db) as running:
        handle = await client.submit(job(n=2, sampling=SHORT))
        results = await client.wait(handle, timeout=60)
        found = await all_ended(spans, 1)
        assert running.worker._held.traces._held == {}
    assert {name: len(each) for name, each in found.items()} == {
        "submit": 1, "queue": 1, "job": 1, "leg": 2, "publish": 2, "wait": 1,
    }  # fmt: skip
    (submit,), (queue,), (taken,) = found["submit"], found["queue"], found["job"]
    inner = [*found["leg"], *found["publish"]]
    assert {trace_of(span) for span in [submit, queue, taken, *inner]} == {trace_of(submit)}
    assert above(queue) == above(taken) == number(submit)
    assert {above(span) for span in inner} == {number(taken)}
    assert all(span.end_time >= span.start_time for span in [*inner, queue])  # type: ignore[operator]
    assert taken.attributes == {"rolloutmq.job_id": handle.job_id, "rolloutmq.attempt": 1}
    assert {dict(leg.attributes or {})["rolloutmq.tokens"] for leg in found["leg"]} == {4}
    (context,) = {result.trace_id for result in results}
    assert context
    assert context.startswith(f"00-{trace_of(submit):032x}-{number(submit):016x}-")


async def test_a_version_is_traced_at_the_trainer_and_at_the_worker(redis_db: str, spans: InMemorySpanExporter) -> None:
    async with worker(redis_db), publisher(redis_db) as source:
        await publish(source, 1)
        await eventually(lambda: by_name(spans).keys() >= {"sync", "publish weights"}, what="both have ended")
    (sync,), (sent,) = by_name(spans)["sync"], by_name(spans)["publish weights"]
    assert dict(sync.attributes or {})["rolloutmq.ok"] is True
    assert dict(sent.attributes or {}) == {"rolloutmq.weights": "version 1"}


@pytest.mark.parametrize("given", ["my run, step 7", "00-zz-11-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_a_text_of_the_callers_own_stays_and_carries_no_context(
    given: str, redis_db: str, client: RolloutClient, spans: InMemorySpanExporter
) -> None:
    async with worker(redis_db):
        (result,) = await client.wait(await client.submit(job(trace_id=given, sampling=SHORT)), timeout=60)
        found = await all_ended(spans, 1)
    assert result.trace_id == given
    assert above(found["job"][0]) is None


async def test_a_callers_own_traceparent_is_the_parent(
    redis_db: str, client: RolloutClient, spans: InMemorySpanExporter
) -> None:
    async with worker(redis_db):
        (result,) = await client.wait(await client.submit(job(trace_id=GIVEN, sampling=SHORT)), timeout=60)
        found = await all_ended(spans, 1)
    assert result.trace_id == GIVEN
    for name in ("submit", "queue", "job"):
        assert f"{trace_of(found[name][0]):032x}" == GIVEN[3:35]
        assert above(found[name][0]) == int(GIVEN[36:52], 16)


async def test_each_attempt_has_a_span(redis_db: str, client: RolloutClient, spans: InMemorySpanExporter) -> None:
    slow = ScriptedEngine(tokens_per_s=0.01)
    async with worker(redis_db, engine=slow, drain_s=0.0) as first:
        handle = await client.submit(job(sampling=SHORT))
        await eventually(lambda: first.generation.running == 1, what="it runs")
    async with worker(redis_db):
        await client.wait(handle, timeout=60)
        found = await all_ended(spans, 2)
    assert [dict(span.attributes or {})["rolloutmq.attempt"] for span in found["job"]] == [1, 2]
    assert len({trace_of(span) for span in [*found["job"], *found["submit"]]}) == 1


async def test_a_refusal_is_in_the_span(redis_db: str, spans: InMemorySpanExporter) -> None:
    async with RolloutClient(redis_db, caps=Caps(jobs=0)) as client:
        with pytest.raises(PoolBusy):
            await client.submit_many([job(reply_to=""), job(reply_to="")])
    found = by_name(spans)["submit"]
    assert [event.name for span in found for event in span.events] == ["exception"] * 2


async def test_a_job_submitted_again_under_another_trace_is_the_same_job(broker: Broker, joined: Any) -> None:
    one = job(trace_id=GIVEN)
    again = one.model_copy(update={"trace_id": "another"})
    assert await broker.enqueue([one]) == ["new"]
    assert await broker.enqueue([again]) == ["q"]
    await broker.cancel([one.id])
    assert await broker.enqueue([again]) == ["cancelled"]


def test_off_it_costs_nothing() -> None:
    tracing.disable()
    jobs = [job()]
    with tracing.submission(jobs) as sent:
        assert sent[0] is jobs[0]
    tracing.past("nothing", 1.0)
    code = "import sys; sys.modules['opentelemetry'] = None\n"  # as where it is not installed
    code += "from rolloutmq.producer import core; assert core.tracing.tracer() is None"
    subprocess.run([sys.executable, "-c", code], check=True)
    asked = {**os.environ, tracing.VARIABLE: "1"}
    shown = subprocess.run([sys.executable, "-c", code], check=True, env=asked, capture_output=True, text=True)
    assert "pip install 'rolloutmq[otel]'" in shown.stderr


ENDS_AT_ONCE = """
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from rolloutmq.messages import tracing
from rolloutmq.worker.main import exit_at_once

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(), schedule_delay_millis=3_600_000))
tracing.enable(provider)
tracing.past("the last one", 1.0)
exit_at_once()
"""


def test_a_worker_that_ends_hands_over_its_last_spans() -> None:
    shown = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, check=True)
    assert '"name": "the last one"' in shown.stdout
