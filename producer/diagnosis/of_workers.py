"""Why a group of workers, none of which serves, does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...messages.model import WorkerStatus
from .reading import PoolReading
from .reason import Cause, Reason

LOOP = 2
"""From so many restarts in a row on, an engine restarts in a loop."""
OWN = frozenset({"generate", "stream"})
"""Needs that a status does not list, or that every engine has."""
RESET = (
    "Publish again (in a trainer: `publisher.publish(publisher.last_version + 1, …)`), start workers with the "
    "`--snapshots` folder that the publisher saves to, or let the pool begin again from its workers' checkpoint: "
    "`rolloutmq weights reset`."
)
WAYS: dict[Cause, str] = {
    "restart-loop": "Read that worker's log: no memory (fewer --max-running), a broken GPU, or a job that kills it.",
    "starting": "Wait: `rolloutmq status --startup` shows how long starts took.",
    "engine-down": "Wait for its restart; its log says why the engine died.",
    "quarantined": "Publish a version, or wait: after 30 s without one its engine is restarted.",
    "draining": "Start other workers: these were told to leave.",
    "asleep": "`rolloutmq control wake`.",
    "stale-weights": "Publish a version, or `rolloutmq control load`: those it has are gone, or random.",
    "paused": "`rolloutmq control resume`.",
    "behind": "Wait; if it does not come, `rolloutmq weights show` says why.",
}


def reasons_of_workers(
    reading: PoolReading, workers: Sequence[WorkerStatus], *, stops: bool, group: str = ""
) -> Iterator[Reason]:
    """Why none of `workers` serves; nothing if one does. group: says in a reason whose jobs wait for them."""
    looping = [worker for worker in workers if worker.restarts_in_a_row >= LOOP]
    if looping:
        worst = max(looping, key=lambda worker: worker.restarts_in_a_row)
        told = f"the engine of {worst.worker_id} was started {worst.restarts_in_a_row} times without finishing a sample"
        yield _reason("restart-loop", told, worst.state_since, stops=stops)
    if any(_serves(worker) for worker in workers):
        return
    if not workers:
        if stops:
            yield _nobody(reading)
        return
    for cause, holds in _KINDS.items():
        found = [worker for worker in workers if holds(worker)]
        if found and (stops or cause == "quarantined"):
            since = min((worker.state_since for worker in found if worker.state_since), default=0.0)
            yield _reason(cause, _told(cause, found, len(workers), group), since, stops=stops)
            return


def _serves(worker: WorkerStatus) -> bool:
    return worker.state in {"serving", "updating"} and worker.restarts_in_a_row < LOOP


_KINDS: dict[Cause, Callable[[WorkerStatus], bool]] = {
    "engine-down": lambda it: it.state == "quarantined",
    "asleep": lambda it: "asleep" in it.blocks,
    "stale-weights": lambda it: "stale" in it.blocks,
    "quarantined": lambda it: "quarantine" in it.blocks,
    "paused": lambda it: it.state == "paused" or "pause" in it.blocks,
    "starting": lambda it: it.state == "starting" or (it.state == "syncing" and "weights" not in it.startup),
    "behind": lambda it: it.state == "syncing",
    "draining": lambda it: it.state == "draining",
}


def _told(cause: Cause, found: list[WorkerStatus], of: int, group: str) -> str:
    first = found[0]
    who = f"{first.worker_id} is" if of == 1 else f"{len(found)} of {of} workers are"
    words = {"engine-down": "without an engine", "stale-weights": "without weights", "behind": "behind"}
    told = f"{who} {words.get(cause, cause)}"
    if first.why:
        told += f" ({first.why})"
    if cause == "starting" and first.startup:
        told += f" ({', '.join(f'{phase} {seconds:.1f} s' for phase, seconds in first.startup.items())} so far)"
    return f"{group}: {told}" if group else told


def _coming(reading: PoolReading) -> Reason:
    first, began = min(reading.starting.items(), key=lambda it: it[1])
    took = f"; the last start took {reading.start_s:.0f} s" if reading.start_s else ""
    others = f", and {len(reading.starting) - 1} more do" if len(reading.starting) > 1 else ""
    told = f"{first} loads its engine, and is not in the pool yet{others}{took}"
    return Reason("starting", told, "Wait; its log says what it does.", began)


def _nobody(reading: PoolReading) -> Reason:
    if reading.starting:
        return _coming(reading)
    silent = sorted(reading.silent.items(), key=lambda it: -it[1])
    told, since = "the pool has no worker", reading.oldest_at
    if silent:
        told, since = f"{told}: {silent[0][0]} is silent, and its lease has run out", silent[0][1]
    return Reason("no-worker", told, "Start one: `rolloutmq worker --model …`, or see in its log why it ended.", since)


def weights_lost(reading: PoolReading, *, stops: bool) -> Reason | None:
    """The committed version, if no worker has it and nobody can send it."""
    alive = [it for it in reading.alive if it.hold_version is None]
    if not reading.committed or reading.having:
        return None
    offers = reading.transfer or "" in reading.offered_by
    if offers and not (alive and all("unavailable" in it.blocks for it in alive)):
        return None
    told = f"the pool's weights are version {reading.committed}; no worker has it, and nobody can send it"
    if why := next((it.why for it in alive if "unavailable" in it.blocks), ""):
        told += f" ({why})"
    since = min((it.state_since for it in alive if it.state_since), default=None)
    return Reason("weights-lost", told, RESET, since, stops)


def able(reading: PoolReading, names: Sequence[str]) -> list[WorkerStatus]:
    """The living workers whose engines have all of these features, and the version among them."""
    return [it for it in reading.alive if (set(names) - OWN).issubset((*it.features, f"version={it.version}"))]


def _reason(cause: Cause, told: str, since: float, *, stops: bool) -> Reason:
    return Reason(cause, told, WAYS[cause], since or None, stops)
