"""The names of all metrics, as Prometheus sees them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric
from support.pools.pool import status

from rolloutmq.messages.broker import PoolLoad
from rolloutmq.ops.metrics.exporter import Exporter
from rolloutmq.ops.metrics.families import pool_families, scale_families, standstill_family
from rolloutmq.ops.metrics.reading import Reading
from rolloutmq.ops.metrics.totals import Totals
from rolloutmq.ops.scale import Decision
from rolloutmq.producer.diagnosis import PoolReading
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.metrics import worker_families
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer
from rolloutmq.worker.worker import Worker

NOWHERE = "redis://127.0.0.1:1/0"


def exporter_metrics() -> list[Metric]:
    """All that an exporter may show."""
    load = PoolLoad(**dict.fromkeys(PoolLoad.__slots__, 0) | {"queued": (0, 0, 0)})
    pool = PoolReading("default", 0.0, load, workers=(status("w"),), lease_ends={"w": 1.0}, memory=1)
    reading = Reading(pool, (1.0,) * 3)
    totals = Totals()
    totals.rate = totals.tokens_per_sample = 1.0
    scale = scale_families(Decision(0, "idle", ""))
    standstill = standstill_family([])
    return [*Exporter(NOWHERE, "default", 1.0).collect(), standstill, *pool_families(reading, totals), *scale]


def worker_metrics() -> list[Metric]:
    """All that a worker may show."""
    worker = Worker(WorkerConfig(redis_url=NOWHERE), ScriptedEngine(), NoTokenizer())
    worker.vitals.beat(status("w"))
    worker.vitals.kv_use = 0.0
    return list(worker_families(worker.vitals, 0.0))


def names(metrics: Iterable[Metric]) -> set[str]:
    """As the documentation has them: counters with `_total`, histograms without `_bucket`."""
    return {f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in metrics}
