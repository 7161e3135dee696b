"""From a reading of a pool to the reasons why its jobs do not run. Pure: no I/O, and no clock but the reading's."""

from __future__ import annotations

from collections.abc import Iterator

from ...messages.broker import Waiting
from .of_workers import able, reasons_of_workers, weights_lost
from .reading import PoolReading
from .reason import CAUSES, Reason

MEMORY_FULL = 0.98
PAUSE_S = 30.0
"""An update pauses for seconds."""
TASKS = "task:"
"""Features with such a name are tasks: to embed, to score, to reward."""


def reasons(reading: PoolReading) -> list[Reason]:
    """Why jobs wait, the one that explains most first; and faults that would stop jobs, if none waits. Empty if all is
    well."""
    found = [*_of_redis(reading), *_of_workers(reading), *_of_jobs(reading), *_of_tenants(reading)]
    if reading.load.open_jobs and not any(reason.stops for reason in found):
        found += _slow(reading)
    first = {reason.cause: reason for reason in reversed(found)}
    return sorted(first.values(), key=lambda reason: (not reason.stops, CAUSES.index(reason.cause)))


def _of_redis(reading: PoolReading) -> Iterator[Reason]:
    for shard, why in sorted(reading.shards_away.items()):
        told = f"shard {shard} of the pool does not answer ({why}): its jobs wait, those of other shards go on"
        yield Reason("shard-away", told, "Start its Redis again, or see what is between.")
    for shard in reading.unreached:
        told = f"no worker reaches shard {shard} of the pool: its jobs wait, those of other shards go on"
        yield Reason("shard-away", told, "See what is between: the workers' logs say it.")
    if reading.memory_limit and reading.memory >= MEMORY_FULL * reading.memory_limit:
        told = f"Redis uses {_mib(reading.memory)} of {_mib(reading.memory_limit)} maxmemory, and refuses to write"
        do = "Give Redis more memory, cancel jobs, or drop results that nobody takes (`rolloutmq replies list`)."
        yield Reason("redis-memory", told, do)
    for shard, why in reading.refuses.items():
        told = f"shard {shard}: {why}" if shard else why
        yield Reason("redis-refuses", told.rstrip("."), "Mend that: the workers come again by themselves.")
    if (refused := reading.refused) is not None:
        load, since = reading.load, reading.at - refused.s
        if refused.why == "unread":
            told = f"client {refused.client} may not submit before it takes results that it has left unread"
            yield Reason("client-full", told, "Take results there, or `rolloutmq replies drop` them.", since)
        else:
            kept = load.open_bytes + load.unread_bytes + load.letter_bytes + load.saved_bytes + load.session_bytes
            told = (
                f"the pool refused a job of client {refused.client}: {load.open_jobs} jobs are open, and jobs, results "
                f"and dead letters hold {_mib(kept)} (cap {_mib(load.cap_bytes)})"
            )
            do = "Take results, drop what absent clients left (`rolloutmq replies list`), or add workers."
            yield Reason("pool-full", told, do, since)


def _of_workers(reading: PoolReading) -> Iterator[Reason]:
    waits = reading.load.open_jobs > 0
    if (lost := weights_lost(reading, stops=waits)) is not None:
        yield lost
    yield from reasons_of_workers(reading, reading.alive, stops=waits)


def _of_jobs(reading: PoolReading) -> Iterator[Reason]:
    """Why jobs that were put aside wait, and those in the queues though somebody serves."""
    for waiting in reading.needs:
        yield from _of_needs(reading, waiting)
    for adapter in reading.adapters:
        have = reading.adapters_at.get(adapter.what, 0)
        told = f"{_jobs(adapter.jobs)} for version {adapter.least} or newer of adapter {adapter.what}, now at {have}"
        if have >= adapter.least:
            yield Reason("adapter", f"{told}, and no worker has it yet", "See why with `rolloutmq weights list`.")
        else:
            yield Reason("adapter", told, "Publish that version, or ask for an older one (min_adapter_version).")
    if (ahead := reading.ahead) is not None:
        transfer = f", and transfer {reading.transfer} is under way" if reading.transfer else ""
        told = f"{_jobs(ahead.jobs)} for version {ahead.least} or newer of the weights; the pool's is "
        do = "Publish that version, or submit with a smaller min_version; a trainer that begins anew uses last_version."
        yield Reason("version-ahead", f"{told}{reading.committed}{transfer}", do)
    if (behind := reading.behind) is not None:
        newest = max((worker.version for worker in reading.alive), default=0)
        told = f"{_jobs(behind.jobs)} for version {behind.least} or newer, and workers have {newest} at most"
        if behind.least > newest and behind.by_staleness:
            do = "Let workers take the newest version (`rolloutmq weights list`), or allow a larger max_staleness."
            yield Reason("staleness", f"{told}: older ones are too stale", do)
        elif behind.least > newest:
            yield Reason("behind", told, "See what keeps them from it with `rolloutmq weights show`.")
        else:
            having = [worker for worker in reading.alive if worker.version >= behind.least]
            group = f"{_jobs(behind.jobs)} for version {behind.least} or newer"
            yield from reasons_of_workers(reading, having, stops=True, group=group)
    yield from _of_exact(reading)
    yield from _of_claims(reading)


def _of_exact(reading: PoolReading) -> Iterator[Reason]:
    have = sorted({worker.version for worker in reading.alive})
    for version, jobs in sorted(reading.exact.items()):
        if version not in have:
            workers = f"no worker has; they have {', '.join(map(str, have))}" if have else "no worker has"
            told = f"{_jobs(jobs)} for exactly version {version} of the weights, which {workers}"
            do = f"Publish it, or start `rolloutmq worker --hold-version {version} --snapshots FOLDER`."
            yield Reason("exact-version", told, do)
        else:
            having = [worker for worker in reading.alive if worker.version == version]
            yield from reasons_of_workers(reading, having, stops=True, group=f"{_jobs(jobs)} for version {version}")


def _of_tenants(reading: PoolReading) -> Iterator[Reason]:
    if paused := {name: since for name, since in reading.tenants.items() if reading.at - since >= PAUSE_S}:
        told = f"new requests of {', '.join(sorted(paused))} wait at the gateways: their tenant has paused"
        yield Reason("paused", told, "Let it resume: POST /resume.", min(paused.values()), stops=False)


def _of_needs(reading: PoolReading, waiting: Waiting) -> Iterator[Reason]:
    names = [name for name in waiting.names if name != "generate"]
    told = f"{_jobs(waiting.jobs)} for {', '.join(names or waiting.names)}"
    do = "Start a worker that has it, or cancel them; an hour after the last such worker left, others refuse them."
    if not waiting.possible:
        task = any(name.startswith(TASKS) for name in names) or not names
        yield Reason("task" if task else "needs", f"{told}, and no worker of the pool has that", do)
    elif waiting.too_long:
        told = f"{_jobs(waiting.too_long)} for a longer context than the {waiting.context} tokens of the workers here"
        yield Reason("context", told, "Start a worker with a longer context, or shorten prompt or max_new_tokens.")
    elif (having := able(reading, waiting.names)) or "exact_version" not in names:
        yield from reasons_of_workers(reading, having, stops=True, group=told)
    else:
        yield Reason("exact-version", f"{told}, and no worker has all of that", "Publish it, or start such a worker.")


def _of_claims(reading: PoolReading) -> Iterator[Reason]:
    serving = [worker for worker in reading.alive if not worker.blocks and worker.state in {"serving", "updating"}]
    if not serving:
        return
    if reading.alone and len(reading.alone) >= len(serving):
        worker, job = next(iter(reading.alone.items()))
        told = f"job {job} has lost its worker before: on its last chance it runs without others on {worker}"
        yield Reason("suspect", told, f"Wait for it, or `rolloutmq cancel {job}`; `rolloutmq job {job}` has its life.")
    elif reading.load.suspects and not reading.alone:
        told = (
            f"{_jobs(reading.load.suspects)} for a last chance: a worker runs them one by one when it has ended its own"
        )
        yield Reason("suspect", told, "Wait; if none does, start one with the features and the version that they need.")
    if reading.unclaimed:
        slots = sum(worker.max_running - worker.held for worker in reading.free)
        told = f"{reading.ready} jobs wait for any worker beside {slots} free slots, of {reading.free[0].worker_id}"
        do = "That is a defect: please report it with `rolloutmq ops run audit-broker`. Restarting the workers helps."
        yield Reason("unclaimed", told, do, reading.oldest_at)


def _slow(reading: PoolReading) -> Iterator[Reason]:
    if reading.preferring and not reading.ready:
        told = f"{_jobs(reading.preferring)} for the worker that they prefer, which is busy"
        yield Reason("preferred", told, "Others get them when their prefer_s is over.")
        return
    alive, load = reading.alive, reading.load
    rate = sum(worker.tokens_per_s for worker in alive)
    samples, tokens = (sum(getattr(it, name) for it in alive) for name in ("finished_samples", "generated_tokens"))
    held, slots = sum(worker.held for worker in alive), sum(worker.max_running for worker in alive)
    told = f"{sum(load.queued)} jobs wait behind {held} samples in {slots} slots, at {rate:,.0f} tokens/s"
    if samples and rate:
        work_s = (sum(load.queued) + held) * tokens / samples / rate
        told += f": about {work_s:,.0f} s of work, if samples are as before"
    do = "Nothing is wrong. More workers would do it sooner." if held else "None runs; see one: `rolloutmq job ID`."
    yield Reason("slow", told, do, reading.oldest_at)


def _jobs(count: int) -> str:
    return f"{count} job{' waits' if count == 1 else 's wait'}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
