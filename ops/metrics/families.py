"""A reading of a pool as Prometheus' metrics. No text that somebody else wrote becomes a label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from ...messages.model import PRIORITIES
from ...producer.diagnosis import CAUSES, Reason
from ...worker.metrics import counter, counters, distribution, gauge, gauges
from ..scale import STATES, Decision
from ..sharing import PLACES
from .reading import Reading
from .totals import MOST_PER_S, Totals

P = "rolloutmq_"
VERSIONS = 16
"""Versions that workers serve and that have a label of their own, the newest; the others are `older`."""


def pool_families(reading: Reading, totals: Totals) -> Iterator[Metric]:
    """Everything that the exporter shows of a pool that it could read."""
    yield from _queue(reading, totals)
    yield from _jobs(reading)
    yield from _bytes(reading)
    yield from _workers(reading, totals)
    yield from _weights(reading, totals)


def _queue(reading: Reading, totals: Totals) -> Iterable[Metric]:
    load = reading.pool.load
    queued = dict(zip(PRIORITIES, load.queued, strict=True))
    yield gauges(P + "queued_jobs", "Jobs that wait, by priority class.", "class", queued)
    yield gauge(P + "suspect_jobs", "Jobs on their last chance, which run one at a time.", load.suspects)
    running = max(0, load.open_jobs - sum(load.queued) - load.suspects)
    yield gauge(P + "running_jobs", "Jobs that workers hold.", running)
    samples = reading.queued_samples
    yield gauge(P + "queued_samples", "Samples that wait: queued jobs, times the samples of those in front.", samples)
    if totals.tokens_per_sample is not None:
        yield gauge(P + "tokens_per_sample", "Mean tokens of the workers' finished samples.", totals.tokens_per_sample)
    if totals.rate is not None:
        about = "Tokens a second that the pool generated when it last had work."
        yield gauge(P + "measured_tokens_per_second", about, totals.rate)
    if (seconds := work_seconds(samples, totals)) is not None:
        yield gauge(P + "queued_work_seconds", "Seconds in which the pool would generate what waits.", seconds)


def scale_families(decision: Decision) -> Iterator[Metric]:
    """How many workers the pool needs, and in which state it is."""
    about = "Workers that the pool needs; it falls when fewer were enough for a while."
    yield gauge(P + "wanted_workers", about, decision.wanted)
    states = {state: float(state == decision.state) for state in STATES}
    yield gauges(P + "scale_state", "1 for the state in which the pool is, as to its size.", "state", states)


def standstill_family(reasons: Iterable[Reason]) -> Metric:
    """Why jobs wait."""
    found = {reason.cause for reason in reasons if reason.stops}
    return gauges(
        P + "standstill", "1 for each cause why jobs wait.", "cause", {cause: float(cause in found) for cause in CAUSES}
    )


def work_seconds(samples: float, totals: Totals) -> float | None:
    """Seconds of work for so many samples; None if something waits and no rate was measured yet."""
    if samples <= 0:
        return 0.0
    if not totals.rate or totals.tokens_per_sample is None:
        return None
    return samples * totals.tokens_per_sample / totals.rate


def _jobs(reading: Reading) -> Iterable[Metric]:
    load = reading.pool.load
    yield counter(P + "accepted_jobs_total", "Jobs that the pool has accepted.", load.accepted)
    ended = {"done": load.done, "cancelled": load.cancelled, "expired": load.expired, "dead": load.dead}
    yield counters(P + "ended_jobs_total", "Jobs that have ended, by outcome.", "outcome", ended)
    yield counter(P + "job_attempts_total", "Claims of a job by a worker.", load.attempts)
    yield counter(P + "job_redeliveries_total", "Claims of a job that a worker had before.", load.redelivered)
    yield counter(P + "lost_leases_total", "Workers that were silent for a whole lease.", load.leases_lost)
    yield gauge(P + "dead_letters", "Jobs that were given up and wait for an operator.", reading.dead_letters)
    yield counter(P + "keys_set_aside_total", "Keys renamed because nobody could use what they held.", load.set_aside)
    yield gauge(P + "gateways", "Gateways that have served somebody and not left.", len(reading.pool.gateways))
    yield gauge(P + "kept_answer_bytes", "Answers that gateways keep for repeats.", load.answer_bytes)
    yield counter(P + "expired_sessions_total", "Recorded sessions that ended and nobody took.", load.sessions_expired)


def _bytes(reading: Reading) -> Iterable[Metric]:
    pool, load = reading.pool, reading.pool.load
    used = {
        "jobs": load.open_bytes,
        "pieces": load.saved_bytes,
        "replies": load.unread_bytes,
        "letters": load.letter_bytes,
        "sessions": load.session_bytes,
    }
    yield gauges(P + "used_bytes", "Bytes that count against the pool's cap.", "kind", used)
    yield gauge(P + "cap_bytes", "The pool's cap, as the last submission said it; 0 before the first.", load.cap_bytes)
    yield gauge(P + "clients_with_unread_replies", "Clients whose results wait to be taken.", reading.unread_clients)
    if pool.memory:  # else this user may not ask
        yield gauge(P + "redis_memory_bytes", "Memory that Redis uses.", pool.memory)
        yield gauge(P + "redis_memory_limit_bytes", "Redis' maxmemory; 0 for none.", pool.memory_limit)


def _workers(reading: Reading, totals: Totals) -> Iterable[Metric]:
    pool, alive = reading.pool, reading.pool.alive
    newest = set(sorted({worker.version for worker in pool.workers})[-VERSIONS:])
    found = Counter(
        (
            worker.state if pool.lease_ends.get(worker.worker_id, 0.0) > pool.at else "silent",
            str(worker.version) if worker.version in newest else "older",
        )
        for worker in pool.workers
    )
    workers = GaugeMetricFamily(P + "workers", "Workers, by state and weights version.", labels=["state", "version"])
    for labels, count in found.items():
        workers.add_metric(labels, count)
    yield workers
    slots = sum(worker.max_running for worker in alive)
    yield gauge(P + "running_samples", "Samples in the workers' engines.", sum(worker.running for worker in alive))
    yield gauge(P + "slots", "Samples that the workers can decode at once.", slots)
    rate = sum(min(worker.tokens_per_s, MOST_PER_S) for worker in alive)
    yield gauge(P + "tokens_per_second", "Tokens a second over the last 10 s, as the heartbeats say it.", rate)
    about = "The highest of the workers' samples beside their shares; 1 if loads are even."
    yield gauge(P + "imbalance_ratio", about, reading.sharing.imbalance)
    places = {place: reading.sharing.count(place) for place in PLACES}
    yield gauges(P + "sharing_workers", "Workers, by whether they hold less or more than their share.", "load", places)
    since = ", since the exporter started."
    yield counter(P + "generated_tokens_total", "Tokens generated" + since, totals.tokens)
    yield counter(P + "finished_samples_total", "Samples ended" + since, totals.samples)
    yield counter(P + "engine_restarts_total", "Restarts of engines" + since, totals.engine_restarts)
    yield counter(P + "refused_publishes_total", "Samples published too late" + since, totals.refused_publishes)
    about = "Versions between a finished sample's oldest token and the pool's newest one" + since
    yield distribution(P + "sample_staleness_versions", about, totals.staleness)


def _weights(reading: Reading, totals: Totals) -> Iterable[Metric]:
    pool = reading.pool
    yield gauge(P + "committed_version", "The pool's newest weights version.", pool.committed)
    behind = sum(worker.behind(pool.committed) > 0 for worker in pool.alive)
    yield gauge(P + "workers_waiting_for_weights", "Live workers behind the committed version.", behind)
    about = "Seconds of a transfer on one worker, from rendezvous to verified parameters, since the exporter started."
    yield distribution(P + "sync_seconds", about, totals.syncs)
    yield counter(P + "sync_bytes_total", "Bytes of weights that workers received and verified.", totals.sync_bytes)
    yield counter(P + "failed_syncs_total", "Transfers that a worker refused or missed.", totals.failed_syncs)
    yield gauge(P + "last_sync_bytes_per_second", "Rate of the last transfer on one worker.", totals.last_bytes_per_s)
