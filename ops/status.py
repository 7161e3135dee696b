"""`rolloutmq status`: the pool at a glance, as plain data and as lines of at most 80 columns."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..messages.broker import Broker, DeadLetters, broker_of
from ..messages.model import PRIORITIES
from ..producer.diagnosis import read_pool, reasons
from ..worker.metrics import PHASES
from .redis import connected
from .sharing import COSTLY, read_sharing, update_share
from .terminal import printable

WIDTH = 80


async def pool_state(redis_url: str, pool: str) -> dict[str, Any]:
    """Queue, workers, weights and dead letters as plain data. Raises RedisUnavailable, ConfigError, InvalidField."""
    async with connected(redis_url, pool, all_shards=True, lenient=True) as redis:
        return await read_state(broker_of(redis, pool))


async def read_state(broker: Broker) -> dict[str, Any]:
    """The same over a connection that there is."""
    reading = await read_pool(broker)
    load, workers, committed = reading.load, reading.workers, reading.committed
    alive, parts = {it.worker_id for it in reading.alive}, reading.parts_there(broker)
    boxes, sharing = [DeadLetters(part) for part in parts], await read_sharing(parts)
    shares = {worker: round(taker.share, 1) for worker, taker in sharing.takers.items()}
    letters = [letter for box in boxes for letter in await box.page(count=5)]
    return {
        "pool": broker.keys.pool,
        "queued": dict(zip(PRIORITIES, load.queued, strict=True)),
        "suspects": load.suspects,
        "open_jobs": load.open_jobs,
        "open_bytes": load.open_bytes,
        "unread_bytes": load.unread_bytes,
        "session_bytes": load.session_bytes,
        "gateways": sorted(reading.gateways),
        "answer_bytes": load.answer_bytes,
        "sessions_expired": load.sessions_expired,
        "set_aside": load.set_aside,
        "reasons": [asdict(one) | {"told": one.told(reading.at)} for one in reasons(reading)],
        "waiting_for_engines": [asdict(one) for one in reading.needs],
        "ended": {"done": load.done, "cancelled": load.cancelled, "expired": load.expired, "dead": load.dead},
        "committed_version": committed,
        "transfer_under_way": reading.transfer,
        "waiting_for_weights": sorted(w.worker_id for w in reading.alive if w.behind(committed)),
        "imbalance": round(sharing.imbalance, 2),
        "update_share": update_share([w for w in workers if w.worker_id in alive]),
        "workers": [
            w.model_dump() | {"alive": w.worker_id in alive, "share": shares.get(w.worker_id)} for w in workers
        ],
        "dead_letters": [
            {"job_id": d.job_id, "cause": d.cause, "error": d.error, "host": d.host, "at": d.at}
            for d in sorted(letters, key=lambda letter: letter.at, reverse=True)[:5]
        ],
        "dead_letters_kept": sum([await box.count() for box in boxes]),
    }


def status_lines(state: dict[str, Any]) -> Iterator[str]:
    """The state of a pool for people. A line is longer than 80 columns only if a single word is."""
    queued = ", ".join(f"{count} {name}" for name, count in state["queued"].items())
    ended = ", ".join(f"{count} {name}" for name, count in state["ended"].items())
    yield from _wrapped(f"pool {state['pool']}", f"weights version {state['committed_version']}")
    yield from _wrapped(f"open: {state['open_jobs']} jobs, {state['open_bytes']:,} bytes", f"queued: {queued}")
    for reason in state["reasons"]:
        yield from _wrapped(f"{'why jobs wait' if reason['stops'] else 'problem'}: {reason['told']}")
    if state["unread_bytes"]:
        yield f"results that wait for their clients: {state['unread_bytes']:,} bytes"
    if state["gateways"] or state["answer_bytes"]:
        yield f"gateways: {len(state['gateways'])}; answers kept for repeats: {state['answer_bytes']:,} bytes"
    if state["session_bytes"] or state["sessions_expired"]:
        lost = f"{state['sessions_expired']} ended that nobody took"
        yield f"recorded sessions: {state['session_bytes']:,} bytes; {lost}"
    if state["set_aside"]:
        yield f"keys set aside, as nobody could use them: {state['set_aside']}; see  rolloutmq ops run audit-broker"
    for waiting in state["waiting_for_engines"]:
        who = "busy or short of context" if waiting["possible"] else "no worker has it"
        yield from _wrapped(f"jobs that wait for {', '.join(waiting['names'])}: {waiting['jobs']} ({who})")
    yield f"ended: {ended}"
    if len(state["workers"]) > 1:
        yield f"imbalance: {state['imbalance']:.2f} (samples of the fullest worker beside its share; 1 is even)"
    if state["update_share"] >= COSTLY:
        yield f"updates of the weights cost {state['update_share']:.0%} of the last minute; see  rolloutmq doctor"
    for worker in state["workers"]:
        yield from _worker(worker)
    if not state["workers"]:
        yield "no workers: start one with  rolloutmq worker --model …"
    for letter in state["dead_letters"]:
        yield from _wrapped(f"dead {letter['job_id']}: {letter['cause']}: {letter['error']}")


def _worker(worker: dict[str, Any]) -> Iterator[str]:
    up = max(0, time.time() - worker["started_at"])
    yield from _wrapped(
        f"worker {worker['worker_id']}",
        worker["state"] if worker["alive"] else "silent",
        f"version {worker['version']}",
        f"up {up:.0f} s",
    )
    yield from _wrapped(
        f"    {worker['running']}/{worker['max_running']} running",
        f"{worker['held']} held" + (f" of a share of {worker['share']:g}" if worker["share"] is not None else ""),
        f"{worker['finished_samples']:,} samples",
        f"{worker['generated_tokens']:,} tokens",
    )
    yield from _wrapped(f"    {worker['engine']} on {worker['device']}", worker["model"])
    if worker["why"]:
        yield from _wrapped(f"    {worker['why']}")


def startup_lines(state: dict[str, Any]) -> Iterator[str]:
    """How long the start of each worker took, by phase, for people."""
    for worker in state["workers"]:
        phases = dict(worker["startup"])
        served = f"served after {_until_served(phases):.1f} s" if "weights" in phases else "does not serve yet"
        yield from _wrapped(f"worker {worker['worker_id']}", served)
        named = [f"{phase} {phases[phase]:.1f} s" for phase in PHASES if phase in phases]
        if named:
            yield from _wrapped(f"    {named[0]}", *named[1:])


def _until_served(phases: dict[str, float]) -> float:
    return sum(seconds for phase, seconds in phases.items() if phase in PHASES and phase != PHASES[-1])


def _wrapped(*parts: str) -> Iterator[str]:
    """The parts on one line if they fit, else each on a line of its own, wrapped between words."""
    told = [printable(part) for part in parts if part]
    line = "   ".join(told)
    if len(line) <= WIDTH:
        yield line
        return
    indent = " " * (len(told[0]) - len(told[0].lstrip()) + 4)
    for number, part in enumerate(told):
        first = "" if number == 0 else indent
        yield from textwrap.wrap(
            part, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
