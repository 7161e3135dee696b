"""A worker's numbers as Prometheus' metrics. They are read when somebody asks, so generating costs nothing more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric

from .kinds import counter, counters, distribution, gauge, gauges
from .vitals import Vitals

P = "rolloutmq_worker_"
REASONS = ("asleep", "dead", "drain", "memory", "pause", "quarantine", "quiet", "switch", "update")
"""Why a gate is shut. A counter has to begin with 0: of one that appears with a value, Prometheus takes no increase."""


def worker_families(vitals: Vitals, now: float) -> Iterator[Metric]:
    """Everything that a worker shows. now: on time.monotonic."""
    yield gauge(P + "ready", "1 if the worker serves weights that were verified.", float(vitals.ready))
    yield gauge(P + "live", "1 if the worker still tries to send heartbeats.", float(vitals.live))
    phases = vitals.startup.seconds.copy()
    yield gauges(P + "startup_seconds", "Seconds of each phase of the start.", "phase", phases)
    yield from _load(vitals, now)
    yield from _weights(vitals)
    if (status := vitals.status) is not None:
        restarts, refused = status.engine_restarts, status.refused_publishes
        yield counter(P + "engine_restarts_total", "Restarts of the engine.", restarts)
        yield counter(
            P + "refused_publishes_total", "Samples that were published too late: others had the job.", refused
        )


def _load(vitals: Vitals, now: float) -> Iterable[Metric]:
    generation, slots, since = vitals.generation, vitals.generation.slots, vitals.generation.busy_since
    running, limit = generation.running, slots.limit
    yield gauge(P + "running_samples", "Samples in the engine.", running)
    yield gauge(P + "waiting_samples", "Samples that wait on the worker for a slot.", len(slots.waiting))
    yield gauge(P + "slots", "Samples that may be in the engine at once; fewer after it ran out of memory.", limit)
    yield gauge(P + "batch_occupancy_ratio", "Samples in the engine, divided by slots.", running / limit)
    if vitals.kv_use is not None:
        yield gauge(P + "kv_cache_use_ratio", "Share of the KV cache that requests hold.", vitals.kv_use)
    yield counter(P + "generated_tokens_total", "Tokens of samples whose leg has ended.", generation.generated_tokens)
    yield counter(P + "finished_samples_total", "Samples that have ended.", generation.finished)
    about = "Tokens in front of what requests generated: prompts, and what earlier legs had generated."
    yield counter(P + "prompt_tokens_total", about, generation.prompt_tokens)
    about = "Of these, tokens found in the prefix cache."
    yield counter(P + "cached_prompt_tokens_total", about, generation.cached_tokens)
    yield counters(P + "engine_errors_total", "Requests that the engine did not answer.", "kind", generation.errors)
    yield counter(P + "memory_retries_total", "Samples tried again because memory was short.", slots.retried)
    stalled = max(0.0, now - since) if since else 0.0
    yield gauge(P + "stalled_seconds", "Seconds since a request began or ended, while some run.", stalled)
    shut = dict.fromkeys(REASONS, 0.0) | generation.gate.held_s(now)
    yield counters(P + "gate_closed_seconds_total", "Seconds in which no sample could start.", "reason", shut)


def _weights(vitals: Vitals) -> Iterable[Metric]:
    yield gauge(P + "weights_version", "The version that the next leg runs under.", vitals.generation.version)
    behind = max(0, vitals.committed - vitals.generation.version)
    yield gauge(P + "versions_behind", "How far that is behind the pool's newest version.", behind)
    yield distribution(P + "sync_seconds", "Seconds from rendezvous to verified parameters.", vitals.syncs)
    yield counter(P + "sync_bytes_total", "Bytes of weights received, verified and loaded.", vitals.sync_bytes)
    yield counter(P + "failed_syncs_total", "Transfers of weights that this worker refused.", vitals.failed_syncs)
    yield gauge(P + "last_sync_bytes_per_second", "Rate of the last transfer.", vitals.last_bytes_per_s)
    cost = vitals.generation.updates
    about = "Seconds that updates cost: until everything that they stopped had a new token."
    yield counter(P + "update_cost_seconds_total", about, cost.lost_s)
    about = "Tokens of which updates had the caches computed anew."
    yield counter(P + "update_anew_tokens_total", about, cost.tokens_anew)
    yield distribution(
        P + "sample_staleness_versions", "Versions between a sample's oldest token and its end.", vitals.samples
    )
