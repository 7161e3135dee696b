"""The exporter: reads the pool every few seconds, whoever asks or not, and shows what it read last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from redis.exceptions import NoPermissionError

from ...messages.broker import Broker, broker_of
from ...messages.model import WorkerStatus
from ...messages.redis import PoolRedis, connect, ping
from ...producer.diagnosis import reasons, why
from ...worker.metrics import MetricsServer, counter, gauge
from ..scale import History, ScaleSettings, decide
from .deletion_costs import EVERY_S, DeletionCosts, PodPatches
from .demand import PATIENCE_S, PoolWatch
from .families import pool_families, scale_families, standstill_family

log = logging.getLogger(__name__)
UNBOUNDED = ScaleSettings(most=1_000_000)
"""Whoever scales by the metric has bounds of its own."""


class Exporter:
    """Looks at one pool every `every_s` seconds.

    A scrape shows the last look and never asks Redis, so that any number of scrapes costs the pool nothing. After a
    look that failed only `rolloutmq_up` 0, the exporter's own metrics and why jobs wait are shown: others would look
    like new ones.
    """

    def __init__(self, redis_url: str, pool: str, every_s: float, scale: ScaleSettings = UNBOUNDED) -> None:
        self._redis_url, self._pool, self._every_s, self._scale = redis_url, pool, every_s, scale
        self._history = History()
        self._shown: list[Metric] = []
        self._up, self._looks, self._failed, self._took_s = False, 0, 0, 0.0
        self._said = ""
        self._watch: PoolWatch | None = None
        self._standstill: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        """What the last look found. Any thread may ask."""
        return [*self._own(), *self._standstill, *self._shown]

    @property
    def up(self) -> bool:
        """Whether the last look succeeded."""
        return self._up

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The living workers, as of the last look that succeeded."""
        return self._watch.workers if self._watch is not None else ()

    def _own(self) -> Iterator[Metric]:
        yield gauge("rolloutmq_up", "1 if the last look at the pool's Redis succeeded.", float(self._up))
        yield gauge("rolloutmq_exporter_read_seconds", "Seconds that the last look took.", self._took_s)
        yield counter("rolloutmq_exporter_reads_total", "Looks at the pool.", self._looks)
        yield counter("rolloutmq_exporter_failed_reads_total", "Looks that failed.", self._failed)

    async def run(self) -> None:
        """Look until cancelled."""
        redis = connect(self._redis_url, pool=self._pool)
        self._watch = watch = PoolWatch(redis, self._pool)
        try:
            while True:
                began = time.monotonic()
                await self._look(redis, watch)
                if not self._up:
                    await self._look_why(broker_of(redis, self._pool))
                self._took_s = time.monotonic() - began
                await asyncio.sleep(max(self._every_s / 2, self._every_s - self._took_s))
        finally:
            await redis.aclose()

    async def _look_why(self, broker: Broker) -> None:
        with contextlib.suppress(NoPermissionError):
            self._standstill = [standstill_family(await why(broker))]

    async def _look(self, redis: PoolRedis, watch: PoolWatch) -> None:
        self._looks += 1
        try:
            if not self._up:
                async with asyncio.timeout(PATIENCE_S):
                    await ping(redis, once=True)  # a URL that names other servers than the pool's would show none of it
            reading, view = await watch.read()
            decision, self._history = decide(view, self._scale, self._history)
            self._standstill = [standstill_family(reasons(reading.pool))]
            shown = [*pool_families(reading, watch.totals), *scale_families(decision)]
        except Exception as error:  # Redis is away, or has something that nobody foresaw: the next look may succeed
            self._up, self._shown, self._failed = False, [], self._failed + 1
            if (said := f"{type(error).__name__}: {error}") != self._said:
                log.warning("the pool cannot be read: %s", said)
                self._said = said
        else:
            self._up, self._shown, self._said = True, shown, ""


async def _tell(costs: DeletionCosts, exporter: Exporter) -> None:
    while True:
        await asyncio.sleep(EVERY_S)
        await asyncio.to_thread(costs.tell, exporter.workers)


async def _until_stopped(exporter: Exporter, costs: DeletionCosts | None) -> None:
    loop = asyncio.get_running_loop()
    looking = asyncio.gather(exporter.run(), *([_tell(costs, exporter)] if costs is not None else []))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, looking.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await looking


@contextlib.contextmanager
def served(exporter: Exporter, host: str, port: int) -> Iterator[int]:
    """Show what an exporter has read, with its probes, inside a `with` block; the port. Raises ConfigError."""
    probes = {"/live": lambda: True, "/ready": lambda: exporter.up}
    with MetricsServer(host, port, exporter.collect, probes) as server:
        yield server.port


def run_exporter(
    redis_url: str,
    pool: str,
    host: str,
    port: int,
    every_s: float,
    *,
    deletion_costs: bool = False,
    scale: ScaleSettings = UNBOUNDED,
) -> None:
    """Serve a pool's metrics until SIGTERM or SIGINT. Raises ConfigError, InvalidField.

    deletion_costs: also tell Kubernetes what deleting each worker's pod would cost. scale: what
    `rolloutmq_wanted_workers` follows.
    """
    costs = DeletionCosts(PodPatches()) if deletion_costs else None
    exporter = Exporter(redis_url, pool, every_s, scale)
    with served(exporter, host, port):
        asyncio.run(_until_stopped(exporter, costs))
